"""The paged kernels of torch.nn.attention.varlen: FlashAttention 3 and 4, which are separate packages."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .layer import AttentionCall, AttentionSpec, KVLayer
from .paged import PagedAttention, PagedStep, kernel_limits

_PARAMETERS = frozenset({"block_table", "seqused_k", "window_size", "enable_gqa", "scale"})
_IMPLEMENTATIONS = {9: "FA3", 10: "FA4"}
"""Implementations that read blocks, by the GPU's major compute capability. torch's own FlashAttention 2 does not."""


def varlen_problem(setting: AttentionSpec) -> str | None:
    """Why torch's varlen attention cannot serve this, without running it; None if it may."""
    if any(needs.has_sinks for needs in setting.needs):
        return "it has no attention sinks, which this model needs"
    if any(needs.softcap is not None for needs in setting.needs):
        return "it has no soft cap, which this model needs"
    if (limits := kernel_limits(setting)) is not None:
        return limits
    if _function() is None:  # last, because the import takes a second
        return f"torch {torch.__version__} has no varlen attention with block tables, which needs 2.12 or newer"
    return None


def make_varlen(setting: AttentionSpec) -> PagedAttention:
    """The backend. Activates torch's FlashAttention 3 or 4 in this process, if installed.

    Raises RuntimeError where varlen_problem returns a problem.
    """
    function = _function()
    if function is None:
        raise RuntimeError("torch has no varlen attention with block tables")
    _activate(setting.device)
    return PagedAttention(partial(varlen_kernel, function))


def undo_varlen() -> None:
    attention: Any = importlib.import_module("torch.nn.attention")
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def varlen_version() -> str:
    """torch's version and the implementation in use, for the log."""
    attention: Any = importlib.import_module("torch.nn.attention")
    return f"torch {torch.__version__}, {attention.current_flash_attention_impl() or 'its own FlashAttention'}"


def _activate(device: torch.device) -> None:
    attention: Any = importlib.import_module("torch.nn.attention")
    if device.type != "cuda" or attention.current_flash_attention_impl() is not None:
        return
    name = _IMPLEMENTATIONS.get(torch.cuda.get_device_capability(device)[0])
    if name is None:
        return
    try:
        attention.activate_flash_attention_impl(name)
    except (ImportError, RuntimeError, ValueError):
        return  # not installed: the self-test then reports torch's error


def _function() -> Callable[..., torch.Tensor] | None:
    try:
        function = getattr(importlib.import_module("torch.nn.attention.varlen"), "varlen_attn", None)
    except ImportError:
        return None
    if function is None or _PARAMETERS - inspect.signature(function).parameters.keys():
        return None
    typed: Callable[..., torch.Tensor] = function
    return typed


def varlen_kernel(
    function: Callable[..., torch.Tensor], query: torch.Tensor, layer: KVLayer, step: PagedStep, call: AttentionCall
) -> torch.Tensor:
    """With varlen_attn as its function, a PagedKernel."""
    return function(
        query,
        layer.k_cache,
        layer.v_cache,
        step.query_ends,
        None,  # no key offsets: FlashAttention 3 accepts either these or block tables
        step.max_query_len,
        step.max_context_len,
        scale=call.scaling,
        # (-1, 0) is causal. A window counts the token itself, the kernel's left side does not.
        window_size=(-1 if layer.window is None else layer.window - 1, 0),
        enable_gqa=query.shape[1] != layer.k_cache.shape[2],
        seqused_k=step.context_lens,
        block_table=step.block_tables,
    )
