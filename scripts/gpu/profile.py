"""Counts kernels, copies and waits of some work with torch's profiler, if it works."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

_CUDA: Final[Any] = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
_LAUNCHES: Final = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch")
_WAITS: Final = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_COPIES: Final = ("cudaMemcpyAsync", "cudaMemcpy")
_NUM_KERNELS: Final = 12
"""Number of slowest kernels listed by name."""


def profile_of(work: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Counts of one run, whose time is not comparable, because the profiler is slow. If it does not work, the reason."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    try:
        with profile(activities=activities) as profiler:
            began = time.perf_counter()
            work()
            seconds = time.perf_counter() - began
        events = profiler.key_averages()
    except Exception as error:  # access to counters may be denied; other measurements remain
        return {"problem": f"{type(error).__name__}: {error}"}
    on_device = [event for event in events if event.device_type == _CUDA]
    busy_s = sum(event.self_device_time_total for event in on_device) / 1e6
    longest = sorted(on_device, key=lambda event: -event.self_device_time_total)[:_NUM_KERNELS]
    return {
        "operators": sum(event.count for event in events if event.key.startswith("aten::")),
        "launches": _count(events, _LAUNCHES),
        "waits": _count(events, _WAITS),
        "copies": _count(events, _COPIES),
        "device_busy_ms": busy_s * 1e3,
        "device_idle_share": max(0.0, 1 - busy_s / seconds) if on_device else None,
        "kernels": {
            event.key[:100]: {"ms": event.self_device_time_total / 1e3, "count": event.count} for event in longest
        },
    }


def _count(events: Any, names: tuple[str, ...]) -> int:
    return sum(event.count for event in events if event.key in names)
