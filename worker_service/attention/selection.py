"""Selects the attention backend: the requested one, or the first that passes its self-test."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from .flash import flash_problem, flash_version, make_flash
from .invariance import Finding, find_shapes
from .layer import AttentionBackend, AttentionSpec, LayerNeeds
from .torch_backend import FREE_SHAPES, MIN_SHARED_TOKENS, NEVER_SHARE, TorchAttention
from .varlen import make_varlen, undo_varlen, varlen_problem, varlen_version
from .verification import SelfTestFailed, run_self_test

BackendName = Literal["auto", "torch", "varlen", "flash"]

_OTHER_BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Block sizes that are tried if a requested backend fails its self-test, to recommend one with which it passes."""


class UnsuitableBackend(RuntimeError):
    """The requested backend cannot serve. The message says why and what to change."""


@dataclass(frozen=True, slots=True)
class BackendCandidate:
    """A backend that may serve."""

    name: str
    problem: Callable[[AttentionSpec], str | None]
    """Why it cannot, without running it; None if it may."""
    make: Callable[[AttentionSpec], AttentionBackend]
    describe: Callable[[], str]
    """Its version, for the log."""
    undo: Callable[[], None] = lambda: None
    """Undo what make has changed in this process."""


CANDIDATES = (
    BackendCandidate("flash", flash_problem, make_flash, flash_version),
    BackendCandidate("varlen", varlen_problem, make_varlen, varlen_version, undo_varlen),
)
"""Backends in the order in which auto tries them."""


def choose_backend(
    name: BackendName,
    setting: AttentionSpec,
    say: Callable[[str], None],
    candidates: Sequence[BackendCandidate] = CANDIDATES,
) -> AttentionBackend:
    """The backend of that name; auto: the first candidate that passes its self-test here, else plain torch.

    say gets one line: the choice, and why others were rejected. Raises UnsuitableBackend if the named backend cannot serve; the
    block size is never changed to make it fit.
    """
    if name == "torch":
        return _torch(setting, say, [])
    reasons: list[str] = []
    for candidate in candidates:
        if name not in ("auto", candidate.name):
            continue
        started = time.monotonic()
        backend, reason = _try(candidate, setting)
        if backend is not None:
            took = time.monotonic() - started
            say(f"attention: {candidate.name} ({candidate.describe()}; passed its self-test in {took:.1f} s)")
            return backend
        if name == candidate.name:
            raise UnsuitableBackend(
                f"--attention-backend {name} cannot serve this model here: {reason}. Give --attention-backend auto or torch"
                f"{_advice(candidate, setting)}."
            )
        reasons.append(f"not {candidate.name}: {reason}")
    assert name == "auto", f"{name} is none of {[candidate.name for candidate in candidates]}"
    return _torch(setting, say, [] if setting.device.type == "cpu" else reasons)


def _torch(setting: AttentionSpec, say: Callable[[str], None], reasons: Sequence[str]) -> AttentionBackend:
    finding = find_invariance(setting.dtype, setting.device, setting.needs)
    say("; ".join(["attention: torch", *([] if finding is None else [finding.describe()]), *reasons]))
    return make_torch(setting.dtype, setting.device, setting.needs)


def make_torch(dtype: torch.dtype, device: torch.device, needs: Sequence[LayerNeeds]) -> TorchAttention:
    """Plain torch for layers with these needs; in float32 on a CPU batch-invariant, if this CPU allows it."""
    # Only the CPU has a fused kernel that returns the log-sum-exp; on other devices merging would store all scores.
    min_shared_tokens = MIN_SHARED_TOKENS if device.type == "cpu" else NEVER_SHARE
    finding = find_invariance(dtype, device, needs)
    return TorchAttention(dtype, min_shared_tokens, FREE_SHAPES if finding is None else finding.shapes)


def find_invariance(dtype: torch.dtype, device: torch.device, needs: Sequence[LayerNeeds]) -> Finding | None:
    """The result of find_shapes for these layers; None if the torch backend need not be batch-invariant there."""
    return find_shapes(needs) if dtype == torch.float32 and device.type == "cpu" else None


def _try(candidate: BackendCandidate, setting: AttentionSpec) -> tuple[AttentionBackend | None, str]:
    """The backend, or None and the reason."""
    problem = candidate.problem(setting)
    if problem is not None:
        return None, problem
    try:
        backend = candidate.make(setting)
        run_self_test(backend, setting)
    except SelfTestFailed as failed:
        reason = f"it failed its self-test: {failed}"
    except Exception as error:  # a broken installation may raise anything
        reason = f"it could not be set up: {type(error).__name__}: {error}"
    else:
        return backend, ""
    candidate.undo()
    return None, reason


def _advice(candidate: BackendCandidate, setting: AttentionSpec) -> str:
    if candidate.problem(setting) is not None:
        return ""
    others = [size for size in _OTHER_BLOCK_SIZES if size != setting.block_size]
    passing = [size for size in others if _try(candidate, replace(setting, block_size=size))[0] is not None]
    candidate.undo()
    return f", or --block-size {passing[0]}, with which it passes" if passing else ""
