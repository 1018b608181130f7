"""A backend serves only if it computes what plain torch does; which one is chosen, and what is said of the others.

The kernels themselves need a GPU. Here their arguments are checked by stand-ins with the same signatures and rules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from kvpool.worker_service.attention import flash, selection, varlen
from kvpool.worker_service.attention.flash import flash_kernel, flash_problem
from kvpool.worker_service.attention.layer import AttentionBackend, AttentionCall, AttentionSpec, KVLayer, LayerNeeds
from kvpool.worker_service.attention.packing import Packing
from kvpool.worker_service.attention.paged import PagedAttention, PagedStep
from kvpool.worker_service.attention.selection import CANDIDATES, BackendCandidate, UnsuitableBackend, choose_backend
from kvpool.worker_service.attention.torch_backend import TorchAttention
from kvpool.worker_service.attention.varlen import varlen_kernel, varlen_problem
from kvpool.worker_service.attention.verification import SelfTestFailed, run_self_test
from tests.attention import paged_reference
from tests.refused import refused

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
PLAIN = LayerNeeds(4, 2, 16, 16, scaling=0.25, window=None, softcap=None, has_sinks=False)
WINDOWED = PLAIN._replace(window=40)
CAPPED = PLAIN._replace(softcap=30.0)
SINKS = PLAIN._replace(has_sinks=True)
ALL = (PLAIN, WINDOWED, CAPPED)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

Kernel = Callable[[torch.Tensor, KVLayer, PagedStep, AttentionCall], torch.Tensor]


def flash_like() -> PagedAttention:
    return PagedAttention(partial(flash_kernel, paged_reference.flash_attn_varlen_func))


def varlen_like() -> PagedAttention:
    return PagedAttention(partial(varlen_kernel, paged_reference.varlen_attn))


def self_test(
    backend: AttentionBackend,
    needs: tuple[LayerNeeds, ...] = ALL,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
) -> None:
    run_self_test(backend, AttentionSpec(tuple(needs), dtype, CPU, block_size))


# -- backends that are right


@pytest.mark.parametrize(("dtype", "block_size"), list(zip(DTYPES, [1, 256, 16], strict=True)))
def test_right_kernels_pass(dtype: torch.dtype, block_size: int) -> None:
    self_test(flash_like(), ALL, dtype, block_size)
    self_test(varlen_like(), (PLAIN, WINDOWED), dtype, block_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_passes_its_own_test(dtype: torch.dtype) -> None:
    wide = PLAIN._replace(num_heads=8, num_kv_heads=1, v_head_dim=24, scaling=0.02)
    self_test(TorchAttention(dtype, min_shared_tokens=1), (*ALL, SINKS, wide), dtype)


# -- backends that are wrong, each in its own way


Seen = tuple[PagedStep, AttentionCall, KVLayer]


class Wrong(PagedAttention):
    """A paged backend that is right but for what its kernel sees, what it returns, or what it writes as well."""

    def __init__(
        self,
        see: Callable[[PagedStep, AttentionCall, KVLayer], Seen] = lambda *seen: seen,
        *,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda out: out,
        write: Callable[[KVLayer, torch.Tensor, torch.Tensor], object] = lambda *_: None,
    ) -> None:
        """`write`: to layer, slots and key."""
        right = partial(flash_kernel, paged_reference.flash_attn_varlen_func)

        def kernel(query: torch.Tensor, layer: KVLayer, step: PagedStep, call: AttentionCall) -> torch.Tensor:
            step, call, layer = see(step, call, layer)
            return right(query, layer, step, call)

        super().__init__(kernel)
        self._change, self._write = change, write

    def begin(self, packing: Packing) -> None:
        super().begin(packing)
        self._slots = packing.groups[0].slot_mapping

    def attend(
        self, layer: KVLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        out = super().attend(layer, query, key, value, call)
        self._write(layer, self._slots, key[0].transpose(0, 1))
        return self._change(out)


def context_by(shift: int) -> Wrong:
    """Each part of a step has so many keys more; those behind the sequence were never written."""

    def change(step: PagedStep, call: AttentionCall, layer: KVLayer) -> Seen:
        lens = (step.context_lens + shift).clamp(min=1)
        ends = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
        return step._replace(context_lens=lens, context_ends=ends, max_context_len=int(lens.max())), call, layer

    return Wrong(change)


def with_window(window: Callable[[int], int | None]) -> Wrong:
    def change(step: PagedStep, call: AttentionCall, layer: KVLayer) -> Seen:
        changed = None if layer.window is None else window(layer.window)
        return step, call, KVLayer(0, changed, layer.k_cache, layer.v_cache)

    return Wrong(change)


def with_call(**changes: Any) -> Wrong:
    return Wrong(lambda step, call, layer: (step, call._replace(**changes), layer))


def with_tables(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    return Wrong(lambda step, call, layer: (step._replace(block_tables=change(step.block_tables)), call, layer))


def raises(query: torch.Tensor, layer: KVLayer, step: PagedStep, call: AttentionCall) -> torch.Tensor:
    raise RuntimeError("Paged KV cache block size must be divisible by 256")


def lets_unwritten_slots_in(query: torch.Tensor, layer: KVLayer, step: PagedStep, call: AttentionCall) -> torch.Tensor:
    """Weight 0 times NaN is NaN."""
    out = flash_kernel(paged_reference.flash_attn_varlen_func, query, layer, step, call)
    return out + 0 * layer.v_cache[step.block_tables[:, -1].long()].sum().to(out.dtype)


WRONG: dict[str, AttentionBackend] = {
    "sees one key too few": context_by(-1),
    "sees one key too many": context_by(1),
    "ignores the window": with_window(lambda window: None),
    "window too large by one": with_window(lambda window: window + 1),
    "window too small by one": with_window(lambda window: window - 1),
    "ignores the cap": with_call(softcap=None),
    "another scale": with_call(scaling=0.27),
    "rows of tables mixed up": with_tables(lambda tables: tables.roll(1, 0)),
    "blocks mixed up": with_tables(lambda tables: tables.flip(1)),
    "null block only": with_tables(torch.zeros_like),
    "writes one slot too many": Wrong(
        write=lambda layer, slots, key: layer.v_cache.flatten(0, 1)[slots.max() + 1].zero_()
    ),
    "writes the null block": Wrong(write=lambda layer, slots, key: layer.k_cache[0].add_(1)),
    "writes K to V": Wrong(write=lambda layer, slots, key: layer.v_cache.flatten(0, 1).index_copy_(0, slots, key)),
    "heads mixed up": Wrong(change=lambda out: out.roll(1, 2)),
    "tokens mixed up": Wrong(change=lambda out: out.roll(1, 1)),
    "one row is NaN": Wrong(change=lambda out: out.index_fill(1, torch.tensor([0]), float("nan"))),
    "not contiguous": Wrong(change=lambda out: out.transpose(1, 2).contiguous().transpose(1, 2)),
    "another shape": Wrong(change=lambda out: out[0]),
    "raises": PagedAttention(raises),
    "lets unwritten slots in": PagedAttention(lets_unwritten_slots_in),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_backends_are_refused(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(SelfTestFailed):
        self_test(WRONG[name], ALL, dtype)


def test_a_backend_without_sinks_is_refused_where_there_are_some() -> None:
    with pytest.raises(SelfTestFailed, match="outputs differ from plain torch by"):
        self_test(flash_like(), (SINKS,))


# -- choosing


SETTING = AttentionSpec((PLAIN,), torch.bfloat16, CPU, 16)


def candidate(
    name: str,
    backend: Callable[[AttentionSpec], AttentionBackend] = lambda _: flash_like(),
    problem: str | None = None,
    undone: list[str] | None = None,
) -> BackendCandidate:
    noted = [] if undone is None else undone
    return BackendCandidate(name, lambda _: problem, backend, lambda: f"{name} 1.0", lambda: noted.append(name))


def choose(
    name: selection.BackendName, *candidates: BackendCandidate, setting: AttentionSpec = SETTING
) -> tuple[AttentionBackend, str]:
    lines: list[str] = []
    backend = choose_backend(name, setting, lines.append, candidates)
    assert len(lines) == 1
    return backend, lines[0]


def test_auto_takes_the_first_that_passes() -> None:
    undone: list[str] = []
    broken = candidate("flash", lambda _: WRONG["another scale"], undone=undone)
    backend, line = choose("auto", broken, candidate("varlen", lambda _: varlen_like()))
    assert isinstance(backend, PagedAttention)
    assert line.startswith("attention: varlen (varlen 1.0; passed its self-test in ")
    assert undone == ["flash"]


def test_auto_says_why_the_others_do_not_serve() -> None:
    def unbuilt(_: AttentionSpec) -> AttentionBackend:
        raise OSError("libcudart.so.13 is missing")

    setting = replace(SETTING, device=torch.device("meta"))
    backend, line = choose(
        "auto", candidate("flash", problem="it is not installed"), candidate("varlen", unbuilt), setting=setting
    )
    assert isinstance(backend, TorchAttention)
    assert line == (
        "attention: torch; not flash: it is not installed; not varlen: it could not be set up: OSError: libcudart.so.13 is "
        "missing"
    )


@pytest.mark.parametrize(("name", "candidates"), [("auto", CANDIDATES), ("torch", [candidate("flash")])])
def test_torch_is_taken_at_its_word_and_nothing_is_said_of_what_needs_a_gpu(
    name: selection.BackendName, candidates: list[BackendCandidate]
) -> None:
    backend, line = choose(name, *candidates)
    assert isinstance(backend, TorchAttention)
    assert line == "attention: torch"


def test_what_is_asked_for_and_cannot_serve_is_an_error() -> None:
    with pytest.raises(
        UnsuitableBackend, match=r"--attention-backend flash .*: it is not installed. Give .* auto or torch\.$"
    ):
        choose("flash", candidate("flash", problem="it is not installed"), candidate("varlen"))
    with pytest.raises(UnsuitableBackend, match=r"failed its self-test: outputs differ .* or torch\.$"):
        choose("varlen", candidate("flash"), candidate("varlen", lambda _: WRONG["another scale"]))
    with pytest.raises(UnsuitableBackend, match="it runs on CUDA devices, not on cpu"):
        choose("varlen", *CANDIDATES)


def test_the_block_size_that_would_do_is_named_and_not_taken() -> None:
    """As with flash-attn from PyPI."""

    def wants_256(setting: AttentionSpec) -> AttentionBackend:
        return flash_like() if setting.block_size % 256 == 0 else WRONG["raises"]

    refusal = r"must be divisible by 256\. .* or torch, or --block-size 256, with which it passes\.$"
    with pytest.raises(UnsuitableBackend, match=refusal):
        choose("flash", candidate("flash", wants_256))
    backend, line = choose("auto", candidate("flash", wants_256))
    assert isinstance(backend, TorchAttention)
    backend, line = choose("flash", candidate("flash", wants_256), setting=replace(SETTING, block_size=256))
    assert isinstance(backend, PagedAttention)
    assert line.startswith("attention: flash")


# -- what each can do


ON_GPU = AttentionSpec((PLAIN,), torch.bfloat16, CUDA, 16)


@pytest.mark.parametrize(
    ("needs", "dtype", "flash_says", "varlen_says"),
    [
        ((PLAIN, WINDOWED), torch.float16, None, None),
        ((CAPPED,), torch.float16, None, "no soft cap"),
        ((PLAIN, SINKS), torch.float16, "no attention sinks", "no attention sinks"),
        ((PLAIN,), torch.float32, "not in float32", "not in float32"),
        ((PLAIN._replace(v_head_dim=8),), torch.float16, "have 16 and 8", "have 16 and 8"),
        ((PLAIN._replace(k_head_dim=12, v_head_dim=12),), torch.float16, "this model's is 12", "this model's is 12"),
        ((PLAIN._replace(k_head_dim=512, v_head_dim=512),), torch.float16, "up to 256", "up to 256"),
    ],
)
def test_by_what_the_model_needs(
    needs: tuple[LayerNeeds, ...],
    dtype: torch.dtype,
    flash_says: str | None,
    varlen_says: str | None,
    installed: None,
) -> None:
    setting = replace(ON_GPU, needs=needs, dtype=dtype)
    for problem, expected in ((flash_problem(setting), flash_says), (varlen_problem(setting), varlen_says)):
        if expected is None:
            assert problem is None
        else:
            assert problem is not None
            assert expected in problem


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if both kernels were there."""
    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = paged_reference.flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(varlen, "_function", lambda: paged_reference.varlen_attn)


def test_an_empty_package_of_that_name_is_not_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 installs one."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert "not installed" in (flash_problem(ON_GPU) or "")
    with pytest.raises(RuntimeError, match="not installed"):
        flash.make_flash(ON_GPU)


def test_a_torch_whose_varlen_attention_has_no_block_tables_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: query  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    assert "2.12 or newer" in (varlen_problem(ON_GPU) or "")


def test_this_torch_has_what_the_varlen_backend_calls() -> None:
    """The parameters by which the stand-in was written."""
    if torch.__version__ >= "2.12":
        assert varlen._function() is not None


def check_that_it_serves(candidate: BackendCandidate, setting: AttentionSpec) -> None:
    """It passes, or the test is one of a backend that is refused."""
    try:
        backend = choose_backend(candidate.name, setting, lambda _: None, [candidate])  # type: ignore[arg-type]
    except UnsuitableBackend as refusal:
        refused(refusal)
    try:
        run_self_test(backend, setting)
    finally:
        candidate.undo()


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
def test_a_candidate_serves_on_a_gpu_or_is_refused(
    candidate: BackendCandidate, dtype: torch.dtype, block_size: int
) -> None:
    needs = (
        PLAIN._replace(k_head_dim=64, v_head_dim=64, scaling=0.125),
        WINDOWED._replace(k_head_dim=64, v_head_dim=64),
    )
    check_that_it_serves(candidate, AttentionSpec(needs, dtype, CUDA, block_size))


def test_a_candidate_that_is_refused_does_not_count_as_one_that_serves() -> None:
    check_that_it_serves(candidate("flash"), SETTING)
    with pytest.raises(pytest.skip.Exception, match=r"^refused: .*it is not installed"):
        check_that_it_serves(candidate("flash", problem="it is not installed"), SETTING)
    with pytest.raises(pytest.skip.Exception, match=r"^refused: .*failed its self-test"):
        check_that_it_serves(candidate("flash", lambda _: WRONG["another scale"]), SETTING)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_passes_on_a_gpu(dtype: torch.dtype) -> None:
    setting = AttentionSpec((PLAIN, WINDOWED, CAPPED, SINKS), dtype, CUDA, 16)
    run_self_test(selection.make_torch(dtype, CUDA, (PLAIN,)), setting)
