"""docs/LEARN.md is true: what it refers to exists, its figures follow from their formulas, its commands print what it shows."""

from __future__ import annotations

import ast
import functools
import os
import re

import pytest

from kvpool.cache_service.core import integrity
from kvpool.cache_service.core.block_pool import BlockPool, State
from kvpool.cache_service.core.budget import Account, Budget
from kvpool.cache_service.core.hashing import xxh64
from kvpool.cache_service.core.messages import ReservedBlock, Root
from kvpool.cache_service.core.prefix_tree import Node, PrefixTree
from kvpool.walkthrough import state, window
from kvpool.walkthrough.layouts import FULL_AND_STATE, FULL_AND_WINDOW
from kvpool.walkthrough.worker import Worker
from kvpool.worker_service.cache.groups.state import grid_tokens
from kvpool.worker_service.cache.groups.window import ring_blocks, span
from kvpool.worker_service.cache.reserve import spare_target
from kvpool.worker_service.model.forward.kv_plan import KVCachePlan, show_bytes
from kvpool.worker_service.settings import WorkerSettings
from tests.cache_service.core.desk import Desk
from tests.docs.blocks import ROOT, here
from tests.docs.programs import run_here, run_in_shell
from tests.worker_service.windowed import Worker as CacheWorker

TEXT = (ROOT / "docs" / "LEARN.md").read_text()
FLAT = " ".join(TEXT.split())
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# -- references

REFERENCES = sorted(set(re.findall(r"`([\w/]+/[\w/]*\w+\.py)(?:: ([\w.]+))?`", TEXT)))


def _names(tree: ast.AST, prefix: str = "") -> set[str]:
    """Dotted names of what a module defines: functions, classes, their methods, fields and attributes set on self."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(prefix + node.name)
            found |= {
                prefix + inner.attr
                for inner in ast.walk(node)
                if prefix and isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
            }
        elif isinstance(node, ast.ClassDef):
            found.add(prefix + node.name)
            found |= _names(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(prefix + node.target.id)
    return found


@pytest.mark.parametrize(("path", "name"), REFERENCES)
def test_what_is_referred_to_exists(path: str, name: str) -> None:
    source = (ROOT / path).read_text()
    assert not name or name in _names(ast.parse(source))


def test_every_python_name_with_a_file_is_written_so_that_it_is_checked() -> None:
    """`path.py: name`, with the whole path: nothing escapes the test above by being written otherwise."""
    loose = [
        quoted
        for quoted in re.findall(r"`([^`\n]*\.py[^`\n]*)`", TEXT)
        if not re.fullmatch(r"path\.py(: name)?", quoted)
    ]
    assert [quoted for quoted in loose if tuple([*quoted.split(": "), ""][:2]) not in REFERENCES] == []
    assert len(REFERENCES) > 30


# -- figures

LLAMA_3_8B = 2 * 32 * 8 * 128 * 2
"""Bytes of KV per token in fp16."""
SMOLLM2 = 2 * 30 * 3 * 64 * 2
LLAMA_3_70B = 2 * 80 * 8 * 128 * 2
BLOCK = WorkerSettings.model_fields["block_size"].default
PLAN = KVCachePlan.one_group(256 * MIB // (BLOCK * SMOLLM2), BLOCK, SMOLLM2)
UNSHARED, SHARED = 64 * 640 // BLOCK, 512 // BLOCK + 64 * 128 // BLOCK
"""Blocks of 64 requests of the reference trace."""
STATE, KV_OF_A_TOKEN = 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2), 12 * 2 * 2 * 256 * 2
"""Bytes of a state of Qwen3-Next, and of the KV of a token in its other layers."""
RING, RING_IN_DECODES = ring_blocks(512, 512, BLOCK), span(512, BLOCK) + 1
RESERVE_SECONDS = WorkerSettings.model_fields["reserve_seconds"].default


@pytest.mark.parametrize(
    "claim",
    [
        f"= {LLAMA_3_8B:,} bytes = {LLAMA_3_8B // KIB} KiB per token",
        f"4,096 × {LLAMA_3_8B // KIB} KiB = {4096 * LLAMA_3_8B // MIB} MiB",
        f"eight such conversations {8 * 4096 * LLAMA_3_8B // GIB} GiB",
        f"= {SMOLLM2:,} bytes, {SMOLLM2 / KIB} KiB per token",
        f"⌈50 / {BLOCK}⌉ = {-(-50 // BLOCK)} blocks, {-(-50 // BLOCK) * BLOCK} slots",
        f"{-(-50 // BLOCK) * BLOCK * LLAMA_3_8B // MIB} MiB, instead of 2,048 slots",
        f"of {2048 * LLAMA_3_8B // MIB} MiB, it used {50 * LLAMA_3_8B / MIB} MiB",
        f"used {50 / 2048:.1%} of them".replace("%", " %"),
        f"{ {32: 'thirty-two'}[2048 // (4 * BLOCK)] } such requests fit where one did",
        # n² / 2⁶⁵ for a million and a billion names
        f"A million blocks: {1e6**2 / 2**65 * 1e8:.0f} in a hundred million. A billion, over the life of a cluster: "
        f"{1e9**2 / 2**65 * 100:.0f} %",
        f"the last block, {4 * BLOCK - 50} slots here, {BLOCK - 1} at most",
        f"table[p ÷ {BLOCK}] × {BLOCK} + p mod {BLOCK}",
        f"position 49 is in block {[7, 2, 9, 4][49 // BLOCK]}, slot {[7, 2, 9, 4][49 // BLOCK] * BLOCK + 49 % BLOCK}",
        f"| {BLOCK * LLAMA_3_8B // MIB} MiB for Llama-3-8B in fp16 |",
        f"640 × {RESERVE_SECONDS:.0f} s ÷ {BLOCK} = {spare_target(64, 10**6, 640, RESERVE_SECONDS, BLOCK)} blocks",
        f"= {LLAMA_3_70B:,} bytes, {LLAMA_3_70B // KIB} KiB; a block is {BLOCK * LLAMA_3_70B // MIB} MiB, "
        f"so {40 * GIB // (BLOCK * LLAMA_3_70B):,} blocks",
        f"{BLOCK} × {SMOLLM2:,} = {PLAN.only_pool.bytes_per_block:,} bytes, and 256 MiB holds {PLAN.only_pool.num_blocks} of them",
        f"takes {512 // BLOCK} blocks, and {PLAN.only_pool.capacity} ÷ {512 // BLOCK} = {PLAN.concurrency(512):.2f}",
        f"[{PLAN.only_pool.num_blocks}, {BLOCK}, 3, 64] in bfloat16, twice for each of 30 layers: 60 tensors of "
        f"{PLAN.total_bytes // 60:,} bytes, {show_bytes(PLAN.total_bytes)}",
        f"| 1,000 × 576 = {1000 * 576:,} | 512 + 1,000 × 64 = {512 + 1000 * 64:,} | {576_000 / 64_512:.1f} times less |",
        f"999 × 512 = {999 * 512:,} of {1000 * 512:,}",
        f"| 64 × {640 // BLOCK} = {UNSHARED:,} | {512 // BLOCK} + 64 × {128 // BLOCK} = {SHARED} | "
        f"{UNSHARED / SHARED:.1f} times less |",
        f"a sequence has {RING} such blocks while its prompt is computed and {RING_IN_DECODES} while it decodes",
        f"takes {(8192 // BLOCK + 5 * RING) / (6 * 8192 // BLOCK):.0%} of what".replace("%", " %"),
        f"the last ⌈(w − 1)/{BLOCK}⌉ = {span(512, BLOCK)}",
        f"(32 × 128 × 128 × 4 + 8,192 × 4 × 2) = {STATE:,} bytes",
        f"12 layers × 2 × 2 × 256 × 2 = {KV_OF_A_TOKEN:,} bytes per token",
        f"the KV of {STATE // KV_OF_A_TOKEN:,} tokens",
        f"at multiples of {grid_tokens(BLOCK)} tokens",
        f"need {SHARED * BLOCK * LLAMA_3_8B // MIB:,} MiB instead of {UNSHARED * BLOCK * LLAMA_3_8B // GIB} GiB",
    ],
)
def test_a_figure_follows_from_its_formula(claim: str) -> None:
    assert claim in FLAT


def test_the_number_of_laws() -> None:
    assert integrity.__doc__ is not None
    laws = re.findall(r"^\* (\w[\w ]*):", integrity.__doc__, re.MULTILINE)
    assert (laws[0], len(laws)) == ("conservation", 1 + 15)
    assert "that and fifteen more laws" in FLAT


# -- the states of a block

TRANSITIONS = re.findall(r"^\| (free|cached|held|reserved) \| `(\w+)` \| (\w+) \|", TEXT, re.MULTILINE)


def _pool_with_a_block(state: str) -> BlockPool:
    """Block 1 is in that state, the only one; a held one is in one table and not sealed."""
    tree = PrefixTree(xxh64)
    pool = BlockPool(2, tree, tree.new_holder(), 0, Account(Budget(8, 32), 4))
    if state == "reserved":
        pool.take_reserved(1, 1)
    elif state != "free":
        pool.take_held(1, 1)
    if state == "cached":
        pool.seal(1, _node(pool))
        pool.release(1)
    assert pool.state(1) is State[state.upper()]
    return pool


def _node(pool: BlockPool) -> Node:
    return pool._tree.intern(pool._tree.intern_root(Root("m"), 4), bytes(16))


def _writes_state(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) in ("self._state", "states", "self._ref_count", "ref_counts")
    )


def test_the_diagram_and_the_table_name_every_call_that_changes_a_state() -> None:
    """Those are the methods of BlockPool that write `_state` or `_ref_count`, also by a shorter name, and those that call `_take`,
    which is the inside of both."""
    source = (ROOT / "cache_service" / "core" / "block_pool.py").read_text()
    [pool] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "BlockPool"]
    writers = {
        method.name
        for method in pool.body
        if isinstance(method, ast.FunctionDef) and method.name not in ("__init__", "_take")
        for node in ast.walk(method)
        if _writes_state(node) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "self._take")
    }
    assert {call for _, call, _ in TRANSITIONS} == writers
    diagram = TEXT[TEXT.index("on the free list   ") : TEXT.index("| from | call | to |")]
    told_of_reports = {"restore_cached", "restore_held", "restore_reserved"}
    assert set(re.findall(r"\b(take_\w+|unreserve|bind|pin|release|empty)\b", diagram)) == writers - told_of_reports


@pytest.mark.parametrize(("before", "call", "after"), TRANSITIONS)
def test_a_transition_happens(before: str, call: str, after: str) -> None:
    pool = _pool_with_a_block(before)
    if (before, call) == ("held", "release") and after != "free":
        pool.seal(1, _node(pool))
        if after == "held":
            pool.pin(1)
    if call == "restore_cached":
        pool.restore_cached([(1, 2, _node(pool))])
    elif call == "restore_held":
        pool.restore_held([ReservedBlock(1, 2)])
    elif call.startswith("restore_"):
        getattr(pool, call)(1, 2)
    elif call.startswith("take_"):
        getattr(pool, call)(1, 2)
        assert pool.num_evicted == (before == "cached")
    elif call == "unreserve":
        pool.unreserve(1, pool.generation(1))
    else:
        getattr(pool, call)(1)
    assert pool.state(1) is State[after.upper()]


def test_the_life_that_is_told() -> None:
    worker = Desk(num_blocks=17, block_size=16)
    first = [*range(50)]
    worker.grant("first", first)
    table = worker.table("first")
    assert len(table) == 4
    worker.report("first")
    second = worker.grant("second", [*range(40), *range(100, 120)])
    assert second.num_cached_tokens == 32
    assert list(second.tables[0].blocks[:2]) == table[:2]
    assert len(second.tables[0].blocks) == 4
    pool = worker.session.pools[0]
    assert [pool.ref_count(block) for block in table] == [2, 2, 1, 1]
    worker.free("first")
    assert [pool.state(block) for block in table] == [State.HELD, State.HELD, State.CACHED, State.FREE]
    assert worker.free_list()[0] == table[3]
    worker.free("second")
    assert worker.free_list()[-2:] == [table[1], table[0]]


# -- commands

_SHOWN = re.findall(r"```sh\n([^`]*)```\n\n```text\n([^`]*)```", TEXT)
"""Those whose output is shown; test_commands runs the others."""


@functools.cache
def _run(commands: str) -> str:
    """Run a block as a reader does; each prints the same every time."""
    printed = run_here(commands, os.environ)
    return run_in_shell(f"set -e\n{here(commands)}") if printed is None else printed


def test_all_commands_are_of_this_checkout() -> None:
    for command in re.findall(r"```sh\n([^`]*)```", TEXT):
        for line in re.sub(r"'[^']*'", "''", command).splitlines():
            assert line.startswith((".venv/bin/kvpool ", ".venv/bin/python ")), line


@pytest.mark.parametrize(("command", "shown"), _SHOWN)
def test_a_command_prints_what_is_shown(command: str, shown: str) -> None:
    output = _run(command)
    # An ellipsis begins what is shown where the lines before it depend on the machine.
    assert output.endswith(shown[2:]) if shown.startswith("…\n") else output == shown


def test_the_fifth_exercise() -> None:
    [(command, shown)] = [pair for pair in _SHOWN if "0xFFFF" in pair[0]]
    changed = command.replace("return xxh64(data) & 0xFFFF", "return 0")
    assert changed != command
    before, after = shown.splitlines(), _run(changed).splitlines()
    assert after[0] != before[0]
    assert after[1:] == before[1:]


@pytest.mark.parametrize(
    ("story", "shown"),
    [
        ("eviction", r"eviction 4/.*→ table \[13, 14, 15, 16, 4, 3\].*eviction 5/.*→ table \[1, 2, 8, 7\], 8 tokens.*"),
        ("eviction", r"eviction 6/.*NO_BLOCKS: needed 3 blocks;.* 2\s+evictable.*Changed +nothing"),
        ("prefix", r"A3.*, 16 tokens\) → table \[1, 2, 3, 9\], 12 tokens "),
        ("window", r"window 3/.*block 1 as table\[4\].*block 6 as table\[5\].*block 7 as table\[6\]"),
        ("window", r"window 3/.*Group 1.*Changed +3–4 held → cached\n"),
        ("window", r"window 5/.*block 5 as window\[4\], block 1 as window\[5\],.* 24 tokens cached"),
        ("window", r"window 7/.*allocate\(\"B\".* 0 tokens cached, boundaries 8, 16"),
        ("window", r"window 9/.*allocate\(\"C\".* 8\s+tokens\s+cached"),
        ("fork", r"fork 3/.*2 blocks shared, .*block 1 as table\[2\].*4–5 ref_count 1 → 2"),
        ("fork", r"fork 6/.*fork\(\"C\" of \"B\".*4–5 ref_count 2 → 3"),
        ("fork", r"fork 7/.*free\(\"A\".*3 held → free;  4–5 ref_count 3 → 2"),
        ("fork", r"fork 9/.* 12 tokens cached"),
        ("state", r"state 2/.*wait for 'A' up to position 8; downlink: boundary\(\"A\", 8\)"),
        ("state", r"state 4/.*allocate\(\"B\".*block 2 as state\[1\],.* 8 tokens cached"),
        ("state", r"state 7/.*The first group has 20 tokens.*allocate\(\"C\".* 16 tokens cached"),
    ],
)
def test_the_walkthroughs_show_what_the_text_says_of_them(story: str, shown: str) -> None:
    assert re.search(shown, _run(f".venv/bin/kvpool walkthrough {story}"), re.DOTALL)


def test_the_eighth_exercise() -> None:
    worker = Worker(FULL_AND_WINDOW)
    worker.allocate("A", window._A, max_new_tokens=12)
    worker.compute("A")
    worker.compute("A", window._A_GENERATED)
    worker.free("A")
    windows = worker.session.pools[1]
    assert [block for block in range(1, 9) if windows.is_cached(block)] == [1, 3, 4, 5]
    worker.allocate("X", " ".join(f"w{number}" for number in range(52)))
    assert worker.pool.num_evicted == 3
    assert [block for block in (1, 3, 4, 5) if windows.is_cached(block)] == [3, 4]
    worker.free("X")
    turn = worker.allocate("A2", window._A_NEXT_TURN)
    assert (turn.num_cached_tokens, turn.named) == (12, (4, 3))


def test_the_ninth_exercise() -> None:
    worker = Worker(FULL_AND_STATE)
    worker.allocate("A", state._A)
    worker.compute("A")
    b = worker.allocate("B", state._B)
    assert (b.num_cached_tokens, b.boundaries) == (0, (8,))
    worker.compute("B")
    worker.free("A", "B")
    assert worker.allocate("D", state._D).num_cached_tokens == 8


@pytest.mark.parametrize(
    ("num_prompt", "num_copies", "held_at_first", "held_with_32"), [(40, 7, 10, 26), (48, 0, 11, 19)]
)
def test_the_tenth_exercise(num_prompt: int, num_copies: int, held_at_first: int, held_with_32: int) -> None:
    worker = CacheWorker((100,), (0,), chunk=512)
    first = worker.sequence("first", range(num_prompt), 40)
    first.num_forks_to_come = 7
    worker.call(first)
    worker.step(first)
    forks = [fork for number in range(7) if (fork := worker.cache.fork(first, f"answer {number}")) is not None]
    assert sum(len(fork.copies) for fork in forks) == num_copies
    answers = [first, *(fork.sequence for fork in forks)]
    assert len(answers) == 8

    def held_when_all_have(num_generated: int) -> int:
        for answer in answers:
            while len(answer.tokens) < num_prompt + num_generated:
                worker.step(answer)
        return len({block for answer in answers for block in answer.tables[0]})

    assert held_when_all_have(2) == held_at_first
    assert held_when_all_have(32) == held_with_32
    worker.check()
