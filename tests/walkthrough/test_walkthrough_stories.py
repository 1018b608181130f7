"""Each step of a story shows its calls and keeps every law, and what its sentences count is counted.

What each story says and shows, step by step, is compared in tests/gateway/test_page_files.py: the page serves it as files.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvpool.cache_service.core.integrity import Audit
from kvpool.cache_service.core.manager import CacheManager
from kvpool.walkthrough import recording
from kvpool.walkthrough.__main__ import STORIES
from kvpool.walkthrough.recording import record


@pytest.mark.parametrize("name", STORIES)
def test_every_step_shows_its_calls_and_keeps_every_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit runs after each one; a step starts from what the one before it left; gN is the number of a call of the step."""
    audits = []
    check = CacheManager.check

    def counted(manager: CacheManager) -> Audit:
        audits.append(check(manager))
        return audits[-1]

    monkeypatch.setattr(CacheManager, "check", counted)
    steps = record(STORIES[name])
    capacities = [kind.make_group().num_blocks - 1 for kind in STORIES[name].layout]
    assert [audit.num_blocks for audit in audits] == [sum(capacities)] * len(steps)
    num_calls = 0
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
        assert granted <= set(range(num_calls + 1, num_calls + 1 + len(step.calls)))
        num_calls += len(step.calls)
    for first, capacity in zip(steps[0].before.groups, capacities, strict=True):
        assert (first.counts.capacity, first.counts.free, len(first.blocks)) == (capacity, capacity, capacity + 1)
        assert first.free_list == tuple(range(1, capacity + 1))


@pytest.mark.parametrize("name", STORIES)
def test_figures_in_sentences_come_from_the_core(name: str) -> None:
    """In the source of a story, no digit stands in a sentence outside braces, except in names and for the null block."""
    source = Path(recording.__file__).with_name(f"{name}.py").read_text()
    texts = [
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Yield) and node.value is not None
    ]
    assert len(texts) == len(record(STORIES[name]))
    for text in texts:
        typed_in = "".join(
            str(part.value)
            for part in ast.walk(text)
            if isinstance(part, ast.Constant) and part not in _in_braces(text)
        )
        assert not re.search(r"\d", re.sub(r"xxh64|\bA[23]\b|Block 0 is the\s+null\s+block", "", typed_in))


def _in_braces(text: ast.expr) -> list[ast.AST]:
    return [inner for part in ast.walk(text) if isinstance(part, ast.FormattedValue) for inner in ast.walk(part.value)]


@pytest.mark.parametrize("path", ["README.md", "docs/LEARN.md", "docs/PAGE.md"])
def test_the_documents_name_all_stories(path: str) -> None:
    text = (Path(__file__).parents[2] / path).read_text(encoding="utf-8")
    assert ", ".join(STORIES) in " ".join(text.split())
