"""Modules whose output depends on positions alone: found by what they return, and looked up from then on."""

from __future__ import annotations

import pytest
import torch

from kvpool.worker_service.model.forward.given_positions import GivenPositions, find_position_tables

SIZE, LONGEST = 6, 20
TEXTS = (torch.arange(10, 17)[None], torch.arange(30, 37)[None])


class Places(torch.nn.Module):
    """Learned positions, counted from the beginning of the row."""

    def __init__(self, has_batch: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(LONGEST, SIZE)
        self.has_batch = has_batch

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(torch.arange(ids.shape[1]))
        return found[None] if self.has_batch else found


class Model(torch.nn.Module):
    """Words, positions, and what looks like a position: a module of the words, one that is called twice, one of distances."""

    def __init__(self, has_batch: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(64, SIZE)
        self.places = Places(has_batch)
        self.kinds = torch.nn.Embedding(2, SIZE)
        self.twice = torch.nn.Identity()
        self.distances = torch.nn.Embedding(64, 3)
        self.mix = torch.nn.Linear(SIZE, SIZE)
        self.num_mixed = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        row = self.words(ids) + self.places(ids) + self.kinds(torch.zeros_like(ids))
        self.twice(self.places.table.weight[: ids.shape[1]])
        self.twice(self.words(ids))
        self.distances(torch.zeros(ids.shape[1], ids.shape[1], dtype=torch.int64))
        self.num_mixed += 1
        mixed: torch.Tensor = self.mix(row)
        return mixed


@pytest.mark.parametrize("has_batch", [True, False])
def test_positions_are_found_and_given(has_batch: bool) -> None:
    """The outermost module of each kind, whatever the shape of its output; also what is the same at every position."""
    model = Model(has_batch)
    modules = dict(model.named_modules())
    tables = find_position_tables(modules, model, TEXTS, LONGEST)
    assert {table.module: table.has_batch for table in tables} == {model.places: has_batch, model.kinds: True}
    assert all(table.table.shape == (LONGEST, SIZE) for table in tables)

    row = torch.tensor([[3, 4, 5, 6]])
    whole = model(torch.tensor([[9, 9, 9, 3, 4]]))
    before = model(row)
    given = GivenPositions()
    given.install(tables)
    with given.at(torch.tensor([[3, 4, 0, 19]])):
        moved = model(row)
    torch.testing.assert_close(moved[0, :2], whole[0, 3:])
    assert not torch.allclose(moved[0, 2:], before[0, 2:], atol=1e-3)
    torch.testing.assert_close(model(row), before)  # outside, the row counts again


def test_a_row_may_be_longer_than_the_longest_text() -> None:
    """Many texts in a row: the module itself would fail."""
    model = Model()
    given = GivenPositions()
    given.install(find_position_tables(dict(model.named_modules()), model, TEXTS, LONGEST))
    ids = torch.zeros(1, 3 * LONGEST, dtype=torch.int64)
    with pytest.raises(IndexError):
        model(ids)
    with given.at((torch.arange(3 * LONGEST) % LONGEST)[None]):
        rows = model(ids)[0]
    torch.testing.assert_close(rows[:LONGEST], rows[LONGEST : 2 * LONGEST])


def test_the_table_costs_no_whole_pass() -> None:
    model = Model()
    find_position_tables(dict(model.named_modules()), model, TEXTS, LONGEST)
    assert model.num_mixed == len(TEXTS)
