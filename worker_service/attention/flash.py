"""The paged kernel of the package flash-attn."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch

from .layer import AttentionCall, AttentionSpec, KVLayer
from .paged import PagedAttention, PagedStep, kernel_limits

_NAME = "flash_attn_varlen_func"
_INSTALL = "pip install '.[flash]' in a checkout of kvpool, which compiles it"


def flash_problem(setting: AttentionSpec) -> str | None:
    """Why flash-attn cannot serve this, without running it; None if it may."""
    if any(needs.has_sinks for needs in setting.needs):
        return "it has no attention sinks, which this model needs"
    return kernel_limits(setting) or (None if _function() else f"flash-attn is not installed ({_INSTALL})")


def make_flash(_: AttentionSpec) -> PagedAttention:
    """The backend. Raises RuntimeError where flash_problem returns a problem."""
    function = _function()
    if function is None:
        raise RuntimeError(f"flash-attn is not installed ({_INSTALL})")
    return PagedAttention(partial(flash_kernel, function))


def flash_version() -> str:
    """Name and version of the package, for the log."""
    try:
        return f"flash-attn {version('flash-attn')}"
    except PackageNotFoundError:
        return "flash-attn"


def _function() -> Callable[..., torch.Tensor] | None:
    # The function, not the package: flash-attn-4 has a namespace package of the same name.
    try:
        function = getattr(importlib.import_module("flash_attn"), _NAME, None)
    except (ImportError, OSError, RuntimeError):  # not installed, or built for another torch or CUDA
        return None
    return function if callable(function) else None


def flash_kernel(
    function: Callable[..., torch.Tensor], query: torch.Tensor, layer: KVLayer, step: PagedStep, call: AttentionCall
) -> torch.Tensor:
    """With flash_attn_varlen_func as its function, a PagedKernel."""
    return function(
        query,
        layer.k_cache,
        layer.v_cache,
        cu_seqlens_q=step.query_ends,
        cu_seqlens_k=step.context_ends,
        max_seqlen_q=step.max_query_len,
        max_seqlen_k=step.max_context_len,
        softmax_scale=call.scaling,
        causal=True,
        # A window counts the token itself, the kernel's left side does not.
        window_size=(-1 if layer.window is None else layer.window - 1, 0 if layer.window is not None else -1),
        softcap=call.softcap or 0.0,
        block_table=step.block_tables,
    )
