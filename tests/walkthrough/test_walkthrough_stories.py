"""What the sentences of each case say, asked of the core: its answers and its state after each step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.hashing import block_hash, xxh64
from kvpool.cache_service.core.integrity import Audit
from kvpool.walkthrough import recording
from kvpool.walkthrough.__main__ import CASES
from kvpool.walkthrough.changes import changed_blocks
from kvpool.walkthrough.recording import Scene, record
from kvpool.walkthrough.snapshot import GroupView, NodeView, TableView
from kvpool.walkthrough.words import Words
from kvpool.walkthrough.worker import Worker


class Seen(NamedTuple):
    """A step as seen in one group."""

    scene: Scene
    calls: tuple[str, ...]
    before: GroupView
    after: GroupView
    roots: tuple[NodeView, ...]
    """Of the prefix tree after it."""

    @property
    def text(self) -> str:
        """What the scene says, on one line."""
        return " ".join(self.scene.sentences.split())


def play(name: str, group: int = 0) -> list[Seen]:
    """The steps of a case."""
    return [
        Seen(step.scene, step.calls, step.before.groups[group], step.after.groups[group], step.after.roots)
        for step in record(CASES[name])
    ]


def table(group: GroupView, sequence_id: str) -> TableView:
    """What a live sequence has."""
    return next(table for table in group.tables if table.sequence_id == sequence_id)


def blocks(group: GroupView, sequence_id: str) -> list[int]:
    """The block ids of its table."""
    return [entry.block for entry in table(group, sequence_id).entries]


def states(group: GroupView, ids: Iterable[int]) -> list[str]:
    """Their states."""
    return [group.blocks[block].state.name for block in ids]


def ref_counts(group: GroupView, ids: Iterable[int]) -> list[int]:
    """Their ref counts."""
    return [group.blocks[block].ref_count for block in ids]


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_one_call_and_keeps_every_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit runs after each one; what a step starts from is what the step before it left; gN is the call's number."""
    audits = []
    check = Worker.check

    def counted(worker: Worker) -> Audit:
        audits.append(check(worker))
        return audits[-1]

    monkeypatch.setattr(Worker, "check", counted)
    steps = record(CASES[name])
    capacities = [group.num_blocks - 1 for group in CASES[name].layout.groups]
    assert [audit.num_blocks for audit in audits] == [sum(capacities)] * len(steps)
    for number, step in enumerate(steps, 1):
        assert step.violations == ()
        assert step.calls or number == 1, "a story may begin before the first call"
        if number > 1:
            assert step.before is steps[number - 2].after
        granted = {
            block.generation
            for after, before in zip(step.after.groups, step.before.groups, strict=True)
            for block, old in zip(after.blocks, before.blocks, strict=True)
            if block.generation != old.generation
        }
        assert granted <= {number if steps[0].calls else number - 1}
    for first, capacity in zip(steps[0].before.groups, capacities, strict=True):
        assert (first.counts.capacity, first.counts.free, len(first.blocks)) == (capacity, capacity, capacity + 1)
        assert first.free_list == tuple(range(1, capacity + 1))


def test_a_story_of_one_group_has_sixteen_blocks_and_others_a_row_more() -> None:
    assert {
        name: [group.num_blocks - 1 for group in case.layout.groups]
        for name, case in CASES.items()
        if len(case.layout.groups) > 1
    } == {"window": [16, 8], "state": [16, 8]}


@pytest.mark.parametrize("name", CASES)
def test_the_null_block_is_never_touched(name: str) -> None:
    """Not granted, not held, on no list."""
    for step in record(CASES[name]):
        for group in step.after.groups:
            null = group.blocks[0]
            assert (null.ref_count, null.generation, null.sealed, null.words) == (0, 0, False, ())
            assert 0 not in group.free_list
            assert all(entry.block for table in group.tables for entry in table.entries)


@pytest.mark.parametrize("name", CASES)
def test_figures_in_sentences_come_from_the_core(name: str) -> None:
    """In the source of a story, no digit stands in a sentence outside braces, except in names and for the null block."""
    source = Path(recording.__file__).with_name(f"{name}.py").read_text()
    scenes = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Scene"
    ]
    assert len(scenes) == len(play(name))
    for scene in scenes:
        text = "".join(
            str(part.value)
            for argument in scene.args
            for part in ast.walk(argument)
            if isinstance(part, ast.Constant) and part not in _in_braces(argument)
        )
        assert not re.search(r"\d", re.sub(r"xxh64|\bA[23]\b|Block 0 is the\s+null block", "", text))


def _in_braces(argument: ast.expr) -> list[ast.AST]:
    return [
        inner for part in ast.walk(argument) if isinstance(part, ast.FormattedValue) for inner in ast.walk(part.value)
    ]


def test_allocation() -> None:
    """Three blocks and two empty slots; a reserve; growth out of it; sharing; what goes where when a sequence ends."""
    a, b, grown, c, b_gone, d, a_gone = play("allocation")

    assert blocks(a.after, "A") == [1, 2, 3] == list(a.before.free_list[:3])
    assert (table(a.after, "A").num_tokens, len(table(a.after, "A").entries[-1].words)) == (10, 2)
    assert "10 tokens need 3 blocks of 4" in a.scene.sentences
    assert "2 empty slots" in a.text

    assert states(b.after, [4, 5]) == ["RESERVED", "RESERVED"]
    assert blocks(b.after, "B") == [6, 7]
    assert "blocks 4 and 5 now belong" in b.scene.sentences

    assert blocks(grown.after, "A") == [1, 2, 3, 4]
    assert (grown.before.blocks[4].state, grown.after.blocks[4].state) == (State.RESERVED, State.HELD)
    assert grown.after.blocks[4].generation == b.after.blocks[4].generation
    assert grown.after.counts.reserved == grown.before.counts.reserved == 2
    assert [entry.sealed for entry in table(grown.after, "A").entries] == [True, True, True, False]
    assert not any(entry.sealed for entry in table(grown.before, "A").entries)
    assert table(grown.after, "A").num_tokens - table(grown.after, "A").num_computed_tokens == 1

    assert blocks(c.after, "C")[:2] == blocks(c.after, "A")[:2] == [1, 2]
    assert blocks(c.after, "C")[2] not in blocks(c.after, "A")
    assert table(c.after, "C").num_cached_tokens == 8
    assert ref_counts(c.after, [1, 2]) == [2, 2]
    assert c.after.counts.shared == 2
    assert [c.after.blocks[block].generation for block in (1, 2)] == [1, 1]

    assert b_gone.after.free_list[0] == 7
    assert b_gone.after.free_list[-1] == 6
    assert states(b_gone.after, [6, 7]) == ["CACHED", "FREE"]
    assert b_gone.after.blocks[6].words == ("my", "dog", "ran", "to")
    assert b_gone.after.blocks[7].words == ()

    assert blocks(d.after, "D") == list(d.before.free_list[:3])
    assert blocks(d.after, "D")[0] == 7
    assert [d.before.blocks[block].generation for block in blocks(d.after, "D")[1:]] == [0, 0]
    assert d.after.blocks[7].generation > d.before.blocks[7].generation
    assert f"that of block 7 is {d.after.blocks[7].generation} now" in d.scene.sentences
    assert d.after.free_list[-1] == 6

    assert ref_counts(a_gone.after, [1, 2]) == [1, 1]
    assert states(a_gone.after, [1, 2, 3, 4]) == ["HELD", "HELD", "CACHED", "FREE"]
    assert blocks(a_gone.after, "C") == blocks(c.after, "C")
    assert a_gone.after.num_evicted == 0


def test_prefix() -> None:
    """Three reused, one new; the free list is the cache; hits leave it; a full hit computes one token."""
    a, computed, b, a_gone, b_gone, turn, again = play("prefix")

    assert len(blocks(a.after, "A")) == 4
    assert not any(entry.sealed for entry in table(a.after, "A").entries)
    assert all(entry.sealed for entry in table(computed.after, "A").entries)

    assert blocks(b.after, "B")[:3] == blocks(b.after, "A")[:3]
    assert b.scene.title == "Chat B comes: 3 blocks are reused, 1 is new"
    assert ref_counts(b.after, blocks(b.after, "B")) == [2, 2, 2, 1]
    assert b.before.counts.free - b.after.counts.free == 1
    last_of_a, last_of_b = (table(b.after, name).entries[3].words for name in "AB")
    assert sum(mine != theirs for mine, theirs in zip(last_of_a, last_of_b, strict=True)) == 1

    assert ref_counts(a_gone.after, [1, 2, 3]) == [1, 1, 1]
    assert states(a_gone.after, [4]) == ["CACHED"]
    assert a_gone.after.free_list[-1] == 4
    assert a_gone.after.blocks[4].words == last_of_a

    assert (b_gone.after.counts.held, b_gone.after.counts.cached, b_gone.after.tables) == (0, 5, ())
    assert (b_gone.before.blocks[5].sealed, b_gone.after.blocks[5].sealed) == (False, True)
    assert b_gone.after.free_list[-4:] == (5, 3, 2, 1)

    assert blocks(turn.after, "A2")[:4] == [1, 2, 3, 4]
    assert {1, 2, 3, 4} <= set(turn.before.free_list)
    assert not {1, 2, 3, 4} & set(turn.after.free_list)
    assert 5 in turn.after.free_list
    assert [turn.after.blocks[block].generation for block in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert turn.after.num_evicted == 0
    assert changed_blocks(turn.before, turn.after)[1] == "hit, cached → held"

    assert (table(again.after, "A3").num_tokens, table(again.after, "A3").num_cached_tokens) == (16, 12)
    assert again.before.blocks[4].sealed
    assert blocks(again.after, "A3")[:3] == [1, 2, 3]
    last = blocks(again.after, "A3")[3]
    assert again.before.blocks[last].state is State.FREE
    assert again.after.blocks[last].words == again.after.blocks[4].words


def test_chain() -> None:
    """Equal words: two nodes and two names; each a hit only behind its own parent."""
    a, a_sealed, b, b_sealed, gone, c, d, e = play("chain")
    words = ("bank", "and", "sit", "down")

    assert [node.leaders for node in _nodes(a)] == [("A",), ("A",)]
    assert [node.block_hash for node in _nodes(a)] == [None, None]

    river, bank = _nodes(a_sealed)
    (root,) = a_sealed.roots
    encoder = Words()
    tokens = encoder.encode("we row to the"), encoder.encode("bank and sit down")
    assert root.block_hash is not None
    assert river.block_hash == block_hash(xxh64, root.block_hash, tokens[0])
    assert bank.block_hash == block_hash(xxh64, river.block_hash, tokens[1])
    for node in (river, bank):
        assert f"{node.block_hash:016x}" in a_sealed.scene.sentences

    assert table(b.after, "B").num_cached_tokens == 0
    assert b.after.blocks[2].sealed
    assert b.after.blocks[2].words == b.after.blocks[5].words == words
    assert b.scene.title.endswith(": 0 tokens cached")

    same = [node for node in _nodes(b_sealed) if node.words == words]
    assert len(same) == len({node.block_hash for node in same}) == 2
    assert all(f"{node.block_hash:016x}" in b_sealed.scene.sentences for node in same)

    assert states(gone.after, [1, 2, 3, 4, 5, 6]) == ["CACHED", "CACHED", "FREE", "CACHED", "CACHED", "FREE"]
    assert _nodes(gone) == _nodes(b_sealed)

    assert blocks(c.after, "C")[:2] == [1, 2]
    assert table(c.after, "C").num_cached_tokens == 8
    assert states(c.after, [5]) == ["CACHED"]

    assert blocks(d.after, "D")[:2] == [4, 5]
    assert table(d.after, "D").num_cached_tokens == 8

    assert table(e.after, "E").num_cached_tokens == 0
    assert table(e.after, "E").entries[0].words == words
    assert [node.words for node in e.roots[0].children].count(words) == 1
    assert len([node for node in _nodes(e) if node.words == words]) == 3


def _nodes(step: Seen) -> list[NodeView]:
    """All nodes behind the one root, parents first."""
    (root,) = step.roots
    found: list[NodeView] = []
    rest = list(root.children)
    while rest:
        node = rest.pop(0)
        found.append(node)
        rest = [*node.children, *rest]
    return found


def test_eviction() -> None:
    """Least recently used first, tail first, saved in time, all or nothing."""
    abc, a_gone, b_gone, d, e, refused, c_gone, f = play("eviction")

    assert [len(table.entries) for table in abc.after.tables] == [4, 4, 4]
    assert {abc.after.blocks[block].generation for block in range(1, 13)} == {1}
    assert abc.after.counts.free == 4

    assert all(a_gone.after.blocks[block].sealed for block in (1, 2, 3, 4))
    assert a_gone.after.free_list == (13, 14, 15, 16, 4, 3, 2, 1)
    assert b_gone.after.free_list == (13, 14, 15, 16, 4, 3, 2, 1, 8, 7, 6, 5)
    assert b_gone.after.counts.cached == 8

    assert blocks(d.after, "D") == [13, 14, 15, 16, 4, 3]
    assert (d.before.num_evicted, d.after.num_evicted) == (0, 2)
    assert [changed_blocks(d.before, d.after)[block] for block in (4, 3)] == ["evicted, cached → held"] * 2
    assert d.after.free_list[:2] == (2, 1)
    assert "A's beginning, 2 and 1" in d.text

    assert e.before.free_list[:2] == (2, 1)
    assert blocks(e.after, "E") == [1, 2, 8, 7]
    assert table(e.after, "E").num_cached_tokens == 8
    assert [e.after.blocks[block].generation for block in (1, 2)] == [1, 1]
    assert e.after.blocks[1].words == abc.after.blocks[1].words
    assert e.after.free_list == (6, 5)

    assert refused.after == refused.before
    assert changed_blocks(refused.before, refused.after) == {}
    assert "NO_BLOCKS: needed 3 blocks" in refused.calls[0]
    assert "F needs 3 blocks, and only 2 are left: 6 and 5" in refused.text
    assert states(refused.after, [6, 5]) == ["CACHED", "CACHED"]

    assert c_gone.after.free_list == (6, 5, 12, 11, 10, 9)
    assert (c_gone.after.counts.free, c_gone.after.counts.cached) == (0, 6)

    assert blocks(f.after, "F") == [6, 5, 12]
    assert f.after.free_list == (11, 10, 9)
    assert f.after.num_evicted == 7
    assert "7 blocks were evicted" in f.scene.sentences


def entries(group: GroupView, sequence_id: str) -> dict[int, int]:
    """Block ids by table index."""
    return {entry.table_index: entry.block for entry in table(group, sequence_id).entries}


def scratch(group: GroupView, sequence_id: str) -> set[int]:
    """Its blocks without a place."""
    return set(table(group, sequence_id).scratch)


def test_window() -> None:
    """A ring that stays as it is; windows named at the ends and where prompts part; what of them is hit, and what goes first."""
    a, named, grown, a_gone, turn, turn_gone, b, b_named, c = play("window", 1)
    full = play("window")

    assert entries(a.after, "A") == {}
    assert scratch(a.after, "A") == {1, 2, 3, 4, 5}
    assert all(a.after.blocks[block].is_scratch and not a.after.blocks[block].words for block in range(1, 6))
    assert table(a.after, "A").boundaries == (12,)
    assert "granted 5 scratch blocks" in a.text

    assert entries(named.after, "A") == {1: 2, 2: 3}
    assert [named.after.blocks[block].words for block in (2, 3)] == [
        full[1].after.blocks[block].words for block in blocks(full[1].after, "A")[1:3]
    ]
    assert all(named.after.blocks[block].sealed for block in (2, 3))
    assert scratch(named.after, "A") == {1, 4, 5}
    assert table(named.after, "A").boundaries == ()
    assert "in blocks 2 and 3 of the second group" in named.text

    assert len(blocks(full[2].after, "A")) - len(blocks(full[1].after, "A")) == 3
    assert scratch(grown.after, "A") == scratch(named.after, "A")
    assert grown.after.free_list[:3] == grown.before.free_list, "nothing was granted"
    assert states(grown.after, [2, 3]) == ["CACHED", "CACHED"]
    assert changed_blocks(grown.before, grown.after) == {2: "held → cached", 3: "held → cached"}

    assert changed_blocks(a_gone.before, a_gone.after) == {
        **dict.fromkeys((1, 5), "sealed, scratch → cached"),
        4: "scratch → free",
    }
    assert (a_gone.after.counts.cached, full[3].after.counts.cached) == (4, 6)
    assert "kept 4 blocks of A, two windows; the first has kept all 6" in a_gone.text

    assert table(full[4].after, "A2").num_cached_tokens == 24
    assert entries(turn.after, "A2") == {4: 5, 5: 1}
    assert {1, 5} <= set(turn.before.free_list)
    assert [changed_blocks(turn.before, turn.after)[block] for block in (1, 5)] == ["hit, cached → held"] * 2
    assert turn.scene.title == "A's next turn: 24 tokens are hits, with 2 blocks in the second group"

    cached = [block for block in turn_gone.after.free_list if turn_gone.after.blocks[block].state is State.CACHED]
    assert cached == [5, 1, 2, 3, 6, 4]
    assert "blocks 5 and 1, which it went on from, are nearer to the head than blocks 2 and 3" in turn_gone.text

    assert [node.words for node in b.roots[0].children] == [("in", "a", "deep", "forest")]
    assert table(b.after, "B").num_cached_tokens == 0
    assert table(b.after, "B").boundaries == (8, 16)
    assert "The first 8 tokens are in the first group" in b.text

    assert entries(b_named.after, "B") == {2: 7, 3: 8}
    assert scratch(b_named.after, "B") == {2}
    junction = [1, 5]
    assert [changed_blocks(b_named.before, b_named.after)[block] for block in junction] == [
        "sealed, scratch → cached"
    ] * 2

    assert table(c.after, "C").num_cached_tokens == 8
    assert entries(c.after, "C") == {0: 1, 1: 5}
    assert blocks(full[8].after, "C")[:2] == [4, 5], "A's blocks; those of B are duplicates"


def test_state() -> None:
    """A leader that is told a place, a snapshot there, hits at snapshots and nowhere else."""
    a, waits, at_8, b, a_done, gone, c, d = play("state", 1)
    full = play("state")

    assert (scratch(a.after, "A"), table(a.after, "A").boundaries) == ({3, 4}, (16,))
    assert len(blocks(full[0].after, "A")) == 6

    assert waits.calls == ('allocate("B", 15 tokens) → wait for \'A\' up to position 8; downlink: boundary("A", 8)',)
    assert [table.sequence_id for table in waits.after.tables] == ["A"]
    assert table(waits.after, "A").boundaries == (8, 16)
    assert waits.after.blocks == waits.before.blocks

    assert entries(at_8.after, "A") == {1: 4}
    assert (at_8.after.blocks[4].num_tokens, at_8.after.blocks[4].sealed, at_8.after.blocks[4].words) == (8, True, ())
    assert scratch(at_8.after, "A") == {3, 1}
    assert at_8.before.blocks[1].state is State.RESERVED

    assert table(b.after, "B").num_cached_tokens == 8
    assert entries(b.after, "B") == {1: 4}
    assert ref_counts(b.after, [4]) == [2]
    assert not scratch(b.after, "B") & {3, 1, 4}
    assert ref_counts(full[3].after, blocks(full[3].after, "B")) == [2, 2, 1, 1]

    assert (a_done.after.blocks[1].num_tokens, *states(a_done.after, [1, 4])) == (16, "CACHED", "HELD")
    assert entries(a_done.after, "B") == {1: 4}
    assert "Block 1 is cached; block 4 is still B's" in a_done.text

    assert {block.num_tokens for block in gone.after.blocks if block.state is State.CACHED} == {8, 16}
    assert gone.scene.title == "Both end: 2 states are left, and 6 blocks"

    assert table(c.after, "C").num_cached_tokens == 16
    assert entries(c.after, "C") == {3: 1}
    left_out = full[6].after.blocks[5]
    assert (left_out.words, left_out.state) == (("the", "wind", "is", "against"), State.CACHED)
    assert "has 20 tokens of it, but there is no state after 20" in c.text

    assert table(d.after, "D").num_cached_tokens == 8
    assert entries(d.after, "D") == {1: 4}


def test_fork() -> None:
    """Full blocks shared, tails copied, a fork of a fork, the parent gone first, and every block kept once."""
    a, computed, b, a_grown, b_grown, c, a_gone, gone, d = play("fork")

    assert blocks(a.after, "A") == [5, 6, 7]
    assert states(a.after, [1, 2, 3, 4]) == ["RESERVED"] * 4
    assert [entry.sealed for entry in table(computed.after, "A").entries] == [True, True, False]

    assert blocks(b.after, "B") == [5, 6, 1]
    assert ref_counts(b.after, [5, 6, 7, 1]) == [2, 2, 1, 1]
    assert (b.before.blocks[1].state, b.after.blocks[1].words) == (State.RESERVED, ("snow", "soft"))
    assert b.after.blocks[7] == b.before.blocks[7], "the parent's tail is its own"
    assert table(b.after, "B").num_computed_tokens == table(b.after, "A").num_computed_tokens == 9
    assert b.after.free_list == b.before.free_list[1:], "the reserve is filled up, and nothing else is granted"
    assert "copied it on the device into block 1" in b.text

    assert blocks(a_grown.after, "A") == [5, 6, 7, 2, 3]
    assert table(a_grown.after, "B") == table(a_grown.before, "B")
    assert blocks(b_grown.after, "B") == [5, 6, 1, 4]
    first, second = b_grown.after.blocks[7], b_grown.after.blocks[1]
    assert (first.words[0], first.words[1:] == second.words[1:]) == (second.words[0], False)
    assert first.sealed
    assert second.sealed

    assert blocks(c.after, "C") == [5, 6, 1, 8]
    assert ref_counts(c.after, [5, 6, 1, 4, 8]) == [3, 3, 2, 1, 1]
    ends = [table(c.after, name).entries[3].words for name in "BC"]
    assert ends[0][:3] == ends[1][:3]
    assert (ends[0][3], ends[1][3]) == ("falls", "drifts")

    assert ref_counts(a_gone.after, [5, 6, 1]) == [2, 2, 2]
    assert states(a_gone.after, [7, 2, 3]) == ["CACHED", "CACHED", "FREE"]
    assert [blocks(a_gone.after, name) for name in "BC"] == [blocks(c.after, name) for name in "BC"]

    assert (gone.after.counts.cached, gone.after.counts.held, gone.after.num_evicted) == (5, 0, 0)
    assert "5 full blocks of three answers are cached, the prompt's 2 among them" in gone.text
    assert "it would be 9" in gone.text

    assert blocks(d.after, "D")[:3] == [5, 6, 1]
    assert table(d.after, "D").num_cached_tokens == 12


@pytest.mark.parametrize("name", CASES)
def test_nothing_in_use_is_ever_evicted(name: str) -> None:
    """What is held stays as it is from step to step, unless its sequence ends."""
    for group in range(len(CASES[name].layout.groups)):
        for step in play(name, group):
            for old, new in zip(step.before.blocks, step.after.blocks, strict=True):
                if old.state is State.HELD and new.state is State.HELD:
                    assert old.generation == new.generation
                    assert new.words[: len(old.words)] == old.words
