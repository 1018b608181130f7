"""Cross attention over the blocks of encoders' outputs: the torch backend against plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from kvpool.worker_service.attention.encoder_tables import EncoderTables, slots_of
from kvpool.worker_service.attention.invariance import FIXED_SHAPES, OWN_SUMS
from kvpool.worker_service.attention.layer import AttentionCall
from kvpool.worker_service.attention.layout import BlockGroup, PackingError
from kvpool.worker_service.attention.packing import pack
from kvpool.worker_service.attention.torch_backend import FREE_SHAPES, TorchAttention
from kvpool.worker_service.attention.torch_plan import PlanShapes, Sight, build_view
from kvpool.worker_service.step import EncoderBlocks, SequencePart
from tests.attention.scene import BLOCK_SIZE, CPU, NEVER, Shape, nan_layer, one_query, shuffled_blocks

HEADS, KV_HEADS, DIM = 6, 2, 8
SHORT = FIXED_SHAPES[0]._replace(partition=16, key_multiple=16)
SHAPES = pytest.mark.parametrize(
    "shapes", [FREE_SHAPES, FIXED_SHAPES[0], SHORT, OWN_SUMS], ids=["free", "fixed", "short", "own"]
)


class Text(NamedTuple):
    """New tokens of a sequence, and which encoder's output it sees."""

    start: int
    num_new: int
    encoder: int


class CrossScene:
    """Encoders' outputs in NaN-filled blocks, and the queries of some texts."""

    def __init__(self, lengths: Sequence[int], texts: Sequence[Text]) -> None:
        torch.manual_seed(0)
        self.lengths, self.texts = lengths, texts
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        self.num_blocks = 1 + sum(counts)
        self.layer, free = nan_layer(self.num_blocks, Shape(), is_cross=True), shuffled_blocks(self.num_blocks)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.keys = [torch.randn(length, KV_HEADS, DIM) for length in lengths]
        self.values = [torch.randn(length, KV_HEADS, DIM) for length in lengths]
        for table, key, value in zip(self.tables, self.keys, self.values, strict=True):
            slots = torch.from_numpy(slots_of(table, 0, len(key), BLOCK_SIZE))
            self.layer.write(slots, key.transpose(0, 1)[None], value.transpose(0, 1)[None])
        self.query = torch.randn(1, HEADS, sum(text.num_new for text in texts), DIM)

    def parts(self) -> list[SequencePart]:
        first, parts = 1, []
        for text in self.texts:
            count = -(-(text.start + text.num_new) // BLOCK_SIZE)
            encoder = EncoderBlocks(self.tables[text.encoder], self.lengths[text.encoder])
            own = list(range(first, first + count))
            parts.append(SequencePart([0] * text.num_new, text.start, (own,), None, encoder=encoder))
            first += count
        return parts

    def paged(self, shapes: PlanShapes) -> torch.Tensor:
        parts = self.parts()
        packing = pack(parts, BLOCK_SIZE, [BlockGroup(10_000)], CPU)
        packing = replace(packing, encoders=EncoderTables.of(parts, BlockGroup(self.num_blocks), BLOCK_SIZE))
        backend = TorchAttention(torch.float32, NEVER, shapes)
        backend.begin(packing)
        before = self.layer.k_cache.clone()
        # What the decoder projects in service: it must be ignored.
        row = torch.full((1, KV_HEADS, 1, DIM), float("nan"))
        out = backend.attend(self.layer, self.query, row, row, AttentionCall(0.3))
        assert torch.equal(before, self.layer.k_cache) or torch.equal(before.isnan(), self.layer.k_cache.isnan())
        return out

    def oracle(self) -> torch.Tensor:
        rows, index = [], 0
        for text in self.texts:
            for _ in range(text.num_new):
                query, key = self.query[0, :, index], self.keys[text.encoder]
                rows.append(one_query(query, key, self.values[text.encoder], AttentionCall(0.3)))
                index += 1
        return torch.stack(rows)[None]


DECODES = [Text(7, 1, 0), Text(30, 1, 1), Text(3, 1, 2), Text(0, 1, 3)]
MIXED = [Text(0, 9, 1), Text(12, 1, 0), Text(0, 5, 3), Text(4, 1, 1), Text(40, 3, 2)]


@SHAPES
@pytest.mark.parametrize("texts", [DECODES, MIXED, [Text(0, 20, 1)]], ids=["decodes", "mixed", "alone"])
@pytest.mark.parametrize("lengths", [(5, 33, 1, 16), (300, 17, 4, 700)], ids=["short", "long"])
def test_every_row_sees_all_of_its_own_encoder_and_nothing_else(
    lengths: tuple[int, ...], texts: list[Text], shapes: PlanShapes
) -> None:
    scene = CrossScene(lengths, texts)
    torch.testing.assert_close(scene.paged(shapes), scene.oracle(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("shapes", [FIXED_SHAPES[0], SHORT], ids=["fixed", "short"])
def test_a_row_has_the_same_bits_alone_and_with_others_over_its_encoder(shapes: PlanShapes) -> None:
    """With shapes that hold here, see test_invariance; elsewhere nothing is promised."""
    scene = CrossScene((300, 17, 4, 700), MIXED)
    together = scene.paged(OWN_SUMS)
    offset = 0
    for index, text in enumerate(scene.texts):
        alone = CrossScene((300, 17, 4, 700), MIXED)
        alone.texts = [scene.texts[index]]
        alone.query = scene.query[:, :, offset : offset + text.num_new]
        assert torch.equal(alone.paged(OWN_SUMS), together[:, offset : offset + text.num_new])
        offset += text.num_new
    torch.testing.assert_close(scene.paged(shapes), together, atol=2e-5, rtol=1e-4)


def test_an_encoder_that_several_texts_share_is_read_once() -> None:
    scene = CrossScene((30,), [Text(0, 3, 0), Text(5, 1, 0), Text(9, 2, 0)])
    parts = scene.parts()
    packing = replace(
        pack(parts, BLOCK_SIZE, [BlockGroup(100)], CPU), encoders=EncoderTables.of(parts, BlockGroup(50), BLOCK_SIZE)
    )
    view = build_view(packing, Sight(1, None, is_cross=True), torch.float32, NEVER, FREE_SHAPES)
    assert [len(batch.kv_slots) for batch in view.batches] == [30]


def part(encoder: EncoderBlocks | None) -> SequencePart:
    return SequencePart([1], 0, ([1],), None, encoder=encoder)


@pytest.mark.parametrize(
    ("encoders", "message"),
    [
        ([None], "has no input of the encoder"),
        ([EncoderBlocks([1], 0)], "has no input of the encoder"),
        ([EncoderBlocks([1], 5)], "has 1 blocks for 5 tokens"),
        ([EncoderBlocks([1, 9], 5)], "outside 1 … 8"),
        ([EncoderBlocks([0], 3)], "outside 1 … 8"),
        ([EncoderBlocks([1], 3, [7, 7])], "has 2 tokens for the encoder, and blocks for 3"),
        ([EncoderBlocks([1], 1, [7]), EncoderBlocks([1], 1, [7])], "written to the same block"),
    ],
)
def test_a_bad_input_of_the_encoder_is_refused(encoders: list[EncoderBlocks | None], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        EncoderTables.of([part(encoder) for encoder in encoders], BlockGroup(9), BLOCK_SIZE)


def test_a_table_may_be_longer_than_its_input_and_shared_if_nothing_is_written() -> None:
    long, same = EncoderBlocks([3, 1, 2], 5, [7] * 5), EncoderBlocks([3, 1], 5)
    tables = EncoderTables.of([part(long), part(same)], BlockGroup(9), BLOCK_SIZE)
    assert tables == ([(3, 1), (3, 1)], [5, 5])
