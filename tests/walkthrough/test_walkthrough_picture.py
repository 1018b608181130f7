"""The picture of a step: it says what the core says, at every width."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from kvpool.walkthrough.__main__ import STORIES
from kvpool.walkthrough.layouts import Kind
from kvpool.walkthrough.picture import draw_legend, draw_step
from kvpool.walkthrough.recording import record
from kvpool.walkthrough.snapshot import BlockView, GroupView, TableView, changed_blocks

RECORDED = {name: record(story) for name, story in STORIES.items()}


def draw(name: str, index: int, width: int = 120) -> list[str]:
    """The lines, without colours."""
    return [line.plain for line in draw_step(STORIES[name], RECORDED[name], index, width)]


@pytest.mark.parametrize("width", [60, 79, 80, 100, 119, 120, 200])
@pytest.mark.parametrize("name", STORIES)
def test_every_block_is_in_the_map_at_every_width(name: str, width: int) -> None:
    for index, step in enumerate(RECORDED[name]):
        lines = draw(name, index, width)
        assert all(len(line) <= min(width, 120) for line in lines)
        for before, after, part in zip(step.before.groups, step.after.groups, _group_parts(lines), strict=True):
            tiles = _tiles(part)
            assert list(tiles) == list(range(1, len(after.blocks)))
            for block in after.blocks[1:]:
                is_changed = block.block in changed_blocks(before, after)
                state = ("scratch", 0) if block.is_scratch else (block.state, block.ref_count)
                assert tiles[block.block] == (block.generation, *state, is_changed)


def _group_parts(lines: list[str]) -> list[list[str]]:
    """The lines from the block map of each group on."""
    begins = [number for number, line in enumerate(lines) if line.startswith("Blocks  ")]
    return [lines[begin:end] for begin, end in pairwise([*begins, len(lines)])]


def _tiles(lines: list[str]) -> dict[int, tuple[int, str, int, bool]]:
    """Generation, state, ref_count and change mark by block id, read off the map."""
    found = {}
    for heads, bodies in pairwise(lines):
        for head, body in zip(heads.split("│")[1:], bodies.split("│")[1:], strict=False):
            match = re.fullmatch(r"([* ])(\d+)( +g(\d+))? *", head)
            if match and "│" in bodies:
                state, _, ref_count = body.strip().partition("×")
                found[int(match[2])] = int(match[4] or 0), state.strip(), int(ref_count or 0), match[1] == "*"
    return found


@pytest.mark.parametrize("name", STORIES)
def test_tables_and_free_list_are_those_of_the_core(name: str) -> None:
    for index, step in enumerate(RECORDED[name]):
        for group, part in zip(step.after.groups, _group_parts(draw(name, index)), strict=True):
            text = " ".join(" ".join(part).split()).replace("*", "")
            for table in group.tables:
                assert _shown(group, table) in text
            shown = text.partition("head → ")[2].partition("← tail")[0].partition("empty")[0]
            assert [int(block) for block in re.findall(r"(\d+)(?:\[[^]]*\])? ", shown)] == list(group.free_list)
            cached = [block.block for block in group.blocks if block.state == "cached"]
            assert sorted(int(block) for block in re.findall(r"(\d+)\[", shown)) == cached


def _shown(group: GroupView, table: TableView) -> str:
    """What the picture has to show of a live sequence."""
    entries = []
    for index, number in table.entries.items():
        block = group.blocks[number]
        words = " ".join(block.words if group.kind is Kind.STATE else [*block.words, *"·" * (4 - len(block.words))])
        place = "" if group.kind is Kind.FULL else f"{index}:"
        entries.append(f"{place}{number}{f'[{words}]' if block.sealed else f'({words})'}")
    shown = " ".join([group.kind.label, table.sequence, *entries])
    if group.kind is Kind.FULL:
        return f"{shown} {table.num_tokens} tokens"
    shown += "".join(f" {part}" for part in ("scratch", *table.scratch))
    return f"{shown} to be named after {', '.join(map(str, table.boundaries))} tokens" if table.boundaries else shown


def test_groups_are_told_apart() -> None:
    assert [line for line in draw("window", 0) if line.startswith("Group ")] == [
        "Group 0      layers that see the whole text",
        "Group 1      layers that see the last 8 tokens",
    ]
    assert [line for line in draw("state", 0) if line.startswith("Group ")][1].endswith("multiples of 8 tokens")
    assert not [line for line in draw("pool", 0) if line.startswith("Group ")]


@pytest.mark.parametrize(
    ("name", "signs"),
    [
        ("prefix", ["*", "×2", "g3", "[…]", "(…)", "·"]),
        ("window", ["*", "×2", "g3", "[…]", "(…)", "·", "3:", "scratch"]),
    ],
)
def test_the_legend_fits_every_width(name: str, signs: list[str]) -> None:
    for width in (60, 80, 120):
        lines = [line.plain for line in draw_legend(STORIES[name], width)]
        assert all(len(line) <= width for line in lines)
        assert all(sign in " ".join(lines) for sign in signs)


def _view(**aspects: object) -> BlockView:
    return BlockView(1, "free", 0, 0, False, (), ())._replace(**aspects)  # type: ignore[arg-type]


def _group(block: BlockView) -> GroupView:
    return RECORDED["prefix"][0].before.groups[0]._replace(blocks=(block,))


FREE: dict[str, object] = {"generation": 2}
HELD: dict[str, object] = {**FREE, "state": "held", "ref_count": 1}
CACHED: dict[str, object] = {**FREE, "state": "cached", "sealed": True, "words": ("a",)}
SEALED: dict[str, object] = {**HELD, "sealed": True, "words": ("a",)}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({}, HELD, "free → held"),
        (CACHED, SEALED, "hit, cached → held"),
        (CACHED, {"state": "reserved", "generation": 3}, "evicted, cached → reserved"),
        (HELD, {**HELD, "sealed": True}, "sealed"),
        ({**HELD, "ref_count": 2}, HELD, "ref_count 2 → 1"),
        ({**HELD, "words": ("a",)}, {**HELD, "words": ("a", "b")}, "more words"),
        ({**HELD, "is_scratch": True}, SEALED, "sealed, scratch → held"),
        (CACHED, FREE, "emptied, cached → free"),
    ],
)
def test_a_change_is_told_in_words(old: dict[str, object], new: dict[str, object], words: str) -> None:
    before, after = _group(_view(**old)), _group(_view(**new))
    assert changed_blocks(before, after) == {1: words}
    assert changed_blocks(before, before) == {}
