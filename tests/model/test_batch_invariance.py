"""In float32 on a CPU the logits of a token are the same bits whatever else runs, and however its sequence was cut into steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from tests.model.paged import BLOCK_SIZE, NEVER, PagedModel, load
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_tiny_model
from worker_service.attention.torch_backend import FIXED_SHAPES
from worker_service.engine.step import SequencePart
from worker_service.model.load import LoadedModel
from worker_service.model.packed_linear import packing_works

pytestmark = pytest.mark.skipif(not packing_works(torch.float32), reason="no packed float32 products on this CPU")

NUM_BLOCKS = 1024
PARTITION = FIXED_SHAPES.partition or 0
SHARED = 268
"""Tokens that the first and the last text have in common: more than one segment of the keys, and not a whole number."""
LENGTHS = (290, 33, 5, 131, 275)


def texts() -> list[list[int]]:
    numbers = random.Random(5)
    made = [[numbers.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    made[-1][:SHARED] = made[0][:SHARED]
    return made


TEXTS = texts()


@dataclass
class Run:
    """A text on its way through a model."""

    text: Sequence[int]
    table: list[int]
    computed: int = 0

    def part(self, length: int) -> SequencePart:
        return SequencePart(list(self.text[self.computed : self.computed + length]), self.computed, self.table, None)


def compute(paged: PagedModel, runs: Sequence[Run], chunks: Iterator[int]) -> list[torch.Tensor]:
    """The logits [T, vocab_size] of what is left of each text, the texts in chunks of the next length each, all that are not at
    their end together in a step, the order of which changes from step to step."""
    logits: list[list[torch.Tensor]] = [[] for _ in runs]
    numbers = random.Random(1)
    while waiting := [index for index, run in enumerate(runs) if run.computed < len(run.text)]:
        numbers.shuffle(waiting)
        parts = [runs[index].part(next(chunks)) for index in waiting]
        lengths = [len(part.token_ids) for part in parts]
        for index, rows in zip(waiting, torch.split(paged.runner.logits(parts), lengths), strict=True):
            logits[index].append(rows)
            runs[index].computed += len(rows)
    return [torch.cat(rows) for rows in logits]


def chunks_of(*lengths: int) -> Iterator[int]:
    while True:
        yield from lengths


def fresh(paged: PagedModel, text: Sequence[int], shared: Sequence[int] = ()) -> Run:
    request = paged.request(text, 0, shared)
    return Run(text, request.table, request.start)


@dataclass
class Subject:
    loaded: LoadedModel
    alone: list[torch.Tensor]
    """Logits of each text alone, at once."""

    def paged(self, min_shared_tokens: int = NEVER) -> PagedModel:
        return PagedModel(self.loaded, NUM_BLOCKS, min_shared_tokens)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    loaded = load(make_tiny_model(request.param, tmp_path_factory.mktemp(request.param)).path)
    subject = Subject(loaded, [])
    paged = subject.paged()
    for text in TEXTS:
        subject.alone += compute(paged, [fresh(paged, text)], chunks_of(NEVER))
    return subject


def assert_same_bits(ours: torch.Tensor, alone: torch.Tensor) -> None:
    assert ours.shape == alone.shape
    different = (ours != alone).any(dim=-1).nonzero().flatten().tolist()
    assert not different, (
        f"{len(different)} of {len(alone)} rows differ, by {(ours - alone).abs().max():.2g} at most: {different[:8]} …"
    )


@pytest.mark.parametrize(
    "lengths", [(NEVER,), (64,), (7,), (1, 40, 3, 16, 17, 100, 2)], ids=["at_once", "64", "7", "mixed"]
)
def test_neighbours_order_offset_and_chunks_change_no_bit(subject: Subject, lengths: tuple[int, ...]) -> None:
    paged = subject.paged()
    together = compute(paged, [fresh(paged, text) for text in TEXTS], chunks_of(*lengths))
    for ours, alone in zip(together, subject.alone, strict=True):
        assert_same_bits(ours, alone)


def test_a_row_decoded_alone_has_the_bits_of_prefill(subject: Subject) -> None:
    """Token by token, across the border of a segment of keys."""
    paged = subject.paged()
    run = fresh(paged, TEXTS[0][: PARTITION + 5])
    first = compute(paged, [Run(run.text[:240], run.table)], chunks_of(NEVER))
    run.computed = 240
    ours = compute(paged, [run], chunks_of(1))
    assert_same_bits(torch.cat([*first, *ours]), subject.alone[0][: len(run.text)])


@pytest.mark.parametrize("min_shared_tokens", [NEVER, 1], ids=["gathered", "attended_once"])
@pytest.mark.parametrize("chunk", [NEVER, 7, 1])
def test_a_cached_prefix_changes_no_bit(subject: Subject, min_shared_tokens: int, chunk: int) -> None:
    """Whether it is computed or found, read for each sharer or once for all of them."""
    paged = subject.paged(min_shared_tokens)
    first = fresh(paged, TEXTS[0])
    compute(paged, [first], chunks_of(50))
    shared = first.table[: SHARED // BLOCK_SIZE]
    sharers = [fresh(paged, TEXTS[-1], shared), fresh(paged, TEXTS[0], shared), fresh(paged, TEXTS[1])]
    expected = (subject.alone[-1][SHARED:], subject.alone[0][SHARED:], subject.alone[1])
    for ours, alone in zip(compute(paged, sharers, chunks_of(chunk)), expected, strict=True):
        assert_same_bits(ours, alone)
