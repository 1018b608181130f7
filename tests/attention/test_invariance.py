"""The worker finds out with which shapes attention is batch-invariant, also on CPUs whose products add in other orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from kvpool.worker_service.attention import softmax
from kvpool.worker_service.attention.invariance import FIXED_SHAPES, find_shapes, first_difference, fixed_shapes
from kvpool.worker_service.attention.layer import AttentionCall, AttentionSpec, KVLayer, LayerNeeds
from kvpool.worker_service.attention.layout import BlockGroup
from kvpool.worker_service.attention.packing import pack
from kvpool.worker_service.attention.selection import choose_backend
from kvpool.worker_service.attention.torch_backend import TorchAttention
from kvpool.worker_service.attention.torch_plan import PlanShapes
from kvpool.worker_service.step import SequencePart as Part
from scripts.cpus import CHOICE
from tests.attention.fake_blas import (
    Cuts,
    FakeBlas,
    InexactCpu,
    fixed,
    in_halves,
    odd_rows,
    odd_rows_of_odd_widths,
    rest_first,
)

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_TOKENS = 270
"""More than the longest partition."""
NEEDS = LayerNeeds(2, 1, 8, 8, 0.35, None, None, False)
CAPPED = NEEDS._replace(softcap=20.0)
"""Computed in plain products, not by the fused kernel."""


@pytest.fixture(autouse=True)
def trials_of_its_own() -> Iterator[None]:
    """What was found with other products says nothing about those of a test."""
    first_difference.cache_clear()
    yield
    first_difference.cache_clear()


class Text:
    """A random sequence whose KV is in blocks, and a neighbour with half as many tokens; no code of the self-test."""

    def __init__(self, needs: LayerNeeds) -> None:
        self._needs = needs
        random = torch.Generator().manual_seed(8)
        self._num_blocks = 1 + 2 * NUM_TOKENS // BLOCK_SIZE
        blocks = torch.randperm(self._num_blocks - 1, generator=random) + 1
        self._tables = [half.tolist() for half in blocks.chunk(2)]
        self._query, self._key, self._value = (
            torch.randn(2, NUM_TOKENS, heads, dim, generator=random)
            for heads, dim in (
                (needs.num_heads, needs.k_head_dim),
                (needs.num_kv_heads, needs.k_head_dim),
                (needs.num_kv_heads, needs.v_head_dim),
            )
        )

    def rows(self, shapes: PlanShapes, chunks: Sequence[int], neighbour: bool = False) -> torch.Tensor:
        """[T, Hq, Dv], computed in chunks of these lengths in turn, in the company of as many rows of the neighbour."""
        needs = self._needs
        size = (self._num_blocks, BLOCK_SIZE, needs.num_kv_heads)
        layer = KVLayer(0, needs.window, torch.zeros(*size, needs.k_head_dim), torch.zeros(*size, needs.v_head_dim))
        backend = TorchAttention(torch.float32, shapes=shapes)
        call = AttentionCall(needs.scaling, needs.window, needs.softcap)
        done = 0
        rows: list[torch.Tensor] = []
        while done < NUM_TOKENS:
            end = min(NUM_TOKENS, done + chunks[len(rows) % len(chunks)])
            spans = [(1, 0, min(end, NUM_TOKENS // 2))] if neighbour else []
            spans.append((0, done, end))
            parts = [Part([0] * (last - first), first, (self._tables[index],)) for index, first, last in spans]
            backend.begin(pack(parts, BLOCK_SIZE, [BlockGroup(self._num_blocks)], CPU))
            query, key, value = (
                torch.cat([tensor[index, first:last] for index, first, last in spans]).transpose(0, 1)[None]
                for tensor in (self._query, self._key, self._value)
            )
            with torch.inference_mode():
                rows.append(backend.attend(layer, query, key, value, call)[0, done - end :])
            done = end
        return torch.cat(rows)


def is_invariant(needs: LayerNeeds, shapes: PlanShapes) -> bool:
    """Rows at once, in chunks, one by one and with a neighbour have the same bits."""
    text = Text(needs)
    at_once = text.rows(shapes, [NUM_TOKENS])
    ways = (([64, 64, 10], False), ([150, 1, 9], True), ([NUM_TOKENS], True))
    return all(torch.equal(text.rows(shapes, chunks, neighbour), at_once) for chunks, neighbour in ways)


@pytest.mark.parametrize(
    ("needs", "cuts", "partition"),
    [
        pytest.param(NEEDS, in_halves(192), 192, id="halves_192"),
        pytest.param(NEEDS, in_halves(96), 128, id="halves_96"),
        pytest.param(CAPPED, rest_first(48), 64, id="rest_first_48_plain"),
        pytest.param(CAPPED, fixed(192), 256, id="fixed_192_plain"),
    ],
)
def test_the_largest_partition_that_holds_is_taken(needs: LayerNeeds, cuts: Cuts, partition: int) -> None:
    """Where a BLAS cuts a long sum; 96 in halves is no cut for 128, because 64 and 128 keys begin with the same 64."""
    with FakeBlas(cuts) as blas:
        finding = find_shapes([needs])
        assert finding.holds
        assert finding.shapes == fixed_shapes(partition)
        assert [shapes for shapes, _ in finding.rejected] == [
            shapes for shapes in FIXED_SHAPES if (shapes.partition or 0) > partition
        ]
        assert blas.num_products
        assert is_invariant(needs, finding.shapes)


def test_one_layer_that_needs_a_shorter_partition_decides_for_all() -> None:

    class TwoWays(FakeBlas):  # type: ignore[no-untyped-call]
        def _product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            self._cuts = in_halves(128) if right.shape[-1] == 12 else fixed(64)
            return super()._product(left, right)

    narrow, wide = NEEDS, NEEDS._replace(k_head_dim=12, v_head_dim=12)
    with TwoWays(fixed(64)):
        assert find_shapes([narrow]).shapes.partition == 256
        assert find_shapes([narrow, wide]).shapes.partition == 128


def test_odd_heads_of_v_are_padded_where_that_is_what_helps() -> None:
    odd = NEEDS._replace(v_head_dim=6, k_head_dim=6)
    with FakeBlas(in_halves(192), odd_rows_of_odd_widths):
        finding = find_shapes([odd])
        assert finding.holds
        assert finding.shapes == fixed_shapes(192)._replace(value_multiple=4)
        assert is_invariant(odd, finding.shapes)
        assert not is_invariant(odd, fixed_shapes(192))
        assert find_shapes([NEEDS]).shapes == fixed_shapes(192)
    assert "padded to a multiple of 4" in finding.describe()


def test_where_no_partition_holds_the_sums_are_our_own() -> None:
    with FakeBlas(fixed(64), odd_rows) as blas:
        finding = find_shapes([CAPPED])
        assert finding.holds
        assert finding.shapes.own_sums
        assert len(finding.rejected) == len(FIXED_SHAPES)
        before = blas.num_products
        assert is_invariant(CAPPED, finding.shapes)
        assert blas.num_products == before, "no product of the BLAS is in it"
        assert not is_invariant(CAPPED, fixed_shapes(16))
    assert "slow" in finding.describe()


def test_a_cpu_on_which_nothing_holds_is_reported() -> None:
    with InexactCpu():  # type: ignore[no-untyped-call]
        finding = find_shapes([NEEDS])
        assert not finding.holds
    assert finding.describe().startswith("not batch-invariant")
    assert finding.rejected[0][1] in finding.describe()


def test_the_self_test_sees_the_plain_path_where_the_fused_kernel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls what the backend calls, whatever that is."""
    monkeypatch.setattr(softmax, "fused_cpu_attention_works", lambda: False)
    with FakeBlas(in_halves(128)):
        finding = find_shapes([NEEDS])
        assert finding.shapes.partition == 128
        assert is_invariant(NEEDS, finding.shapes)


@pytest.mark.parametrize(
    "needs",
    [
        NEEDS._replace(k_head_dim=64, v_head_dim=64),
        NEEDS._replace(k_head_dim=10, v_head_dim=10),
        CAPPED._replace(k_head_dim=24, v_head_dim=16),
    ],
    ids=["64", "10", "16_capped"],
)
def test_what_is_chosen_holds_on_this_cpu(needs: LayerNeeds, record_property: Callable[[str, str], None]) -> None:
    finding = find_shapes([needs])
    name = f"{needs.v_head_dim}{'' if needs.softcap is None else ' capped'}"
    record_property(CHOICE, f"{name}: {finding.how if finding.holds else 'none'}")
    if finding.holds:
        assert is_invariant(needs, finding.shapes)


def test_a_shape_is_tried_once_in_a_process() -> None:
    with FakeBlas(in_halves(192)) as blas:
        first = find_shapes([NEEDS])
        num_products = blas.num_products
        again = find_shapes([NEEDS, NEEDS])
        assert blas.num_products == num_products
    assert (again.shapes, again.rejected) == (first.shapes, first.rejected)


def test_the_backend_takes_the_shapes_and_the_log_has_the_reason() -> None:
    said: list[str] = []
    with FakeBlas(in_halves(192)):
        backend = choose_backend("auto", AttentionSpec((NEEDS,), torch.float32, CPU, 16), said.append)
    assert isinstance(backend, TorchAttention)
    assert backend.shapes == fixed_shapes(192)
    assert said[0].startswith("attention: torch; batch-invariant by partitions of 192 keys")
    assert "256 does not hold" in said[0]


def test_other_dtypes_keep_the_shapes_that_cost_least() -> None:
    said: list[str] = []
    backend = choose_backend("torch", AttentionSpec((NEEDS,), torch.bfloat16, CPU, 16), said.append)
    assert isinstance(backend, TorchAttention)
    assert backend.shapes.partition is None
    assert said == ["attention: torch"]
