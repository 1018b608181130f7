"""docs/PROTOCOL.md says what the code does: its vectors, its tables, and every call that it shows with its reply."""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from google.rpc import code_pb2

from kvpool.cache_service import status as manager_status
from kvpool.cache_service.core import allocation, updates
from kvpool.cache_service.core.hashing import block_hash, root_bytes, xxh64
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    AppendItem,
    ContentRun,
    Granted,
    Limits,
    PoolConfig,
    Registration,
    ReportPart,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    Uplink,
)
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.session import Session
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.v1 import cache_pb2, worker_pb2
from kvpool.worker_service import status as worker_status
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from tests.docs.blocks import ROOT, Block, blocks

DOCUMENT = ROOT / "docs" / "PROTOCOL.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
ANYTHING = "…"
"""Stands for a value that differs from run to run."""


def section(title: str) -> str:
    """What stands below a heading, up to the next one of the same or a higher level."""
    (level,) = re.findall(rf"^(#+) {re.escape(title)}$", TEXT, re.MULTILINE)
    return re.split(rf"^#{{1,{len(level)}}} ", TEXT.split(f"{level} {title}\n")[1], flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Cells of all rows of the tables in a text, without headings."""
    found = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    table = [[cell.strip() for cell in row.split("|")] for row in found]
    rules = [index for index, row in enumerate(table) if set("".join(row)) == {"-"}]
    return [row for index, row in enumerate(table) if index not in rules and index + 1 not in rules]


def reasons_in(text: str) -> set[str]:
    """Names of reasons in a text."""
    return {word for word in re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", text) if word in Reason.__members__}


# -- block_hash


def vectors() -> list[dict[str, Any]]:
    (block,) = [block for block in blocks(DOCUMENT) if block.language == "json" and '"root_hash"' in block.text]
    found: list[dict[str, Any]] = json.loads(block.text)
    return found


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: f"{vector['fingerprint']}-{vector['size']}")
def test_a_vector_is_what_the_manager_computes(vector: dict[str, Any]) -> None:
    root = Root(vector["fingerprint"], vector["adapter"], vector["salt"], bytes.fromhex(vector["digest"]))
    size = vector["size"]
    name = xxh64(root_bytes(root, size))
    assert f"{name:016x}" == vector["root_hash"]
    names = []
    for begin in range(0, len(vector["tokens"]) // size * size, size):
        name = block_hash(xxh64, name, struct.pack(f"<{size}I", *vector["tokens"][begin : begin + size]))
        names.append(f"{name:016x}")
    assert names == vector["block_hashes"]


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: f"{vector['fingerprint']}-{vector['size']}")
def test_a_vector_follows_from_the_words_of_the_document_alone(vector: dict[str, Any]) -> None:
    """Nothing of this project is used: a reader needs xxh64 and the section."""

    def u32(number: int) -> bytes:
        return number.to_bytes(4, "little")

    def field(value: bytes) -> bytes:
        return u32(len(value)) + value

    strings = [vector[name].encode("utf-8") for name in ("fingerprint", "adapter", "salt")]
    encoded = b"".join(map(field, [*strings, bytes.fromhex(vector["digest"]), u32(vector["size"])]))
    if vector == vectors()[0]:
        (shown,) = re.findall(r"`([0-9a-f]{8}(?: [0-9a-f]+)+)`", section("`block_hash`"))
        assert encoded == bytes.fromhex(shown)
    parent = xxhash.xxh64(encoded, seed=0).intdigest()
    assert f"{parent:016x}" == vector["root_hash"]
    tokens, hashes = list(vector["tokens"]), []
    while len(tokens) >= vector["size"]:
        block, tokens = tokens[: vector["size"]], tokens[vector["size"] :]
        parent = xxhash.xxh64(parent.to_bytes(8, "little") + b"".join(map(u32, block)), seed=0).intdigest()
        hashes.append(f"{parent:016x}")
    assert hashes == vector["block_hashes"]


def test_the_table_of_vectors_is_the_list_of_vectors() -> None:
    def shortened(items: list[str], longest: int) -> str:
        return " ".join(items) if len(items) <= longest else f"{items[0]} … {items[-1]}"

    found = rows(section("`block_hash`"))
    assert found == [
        [
            vector["fingerprint"],
            vector["adapter"],
            vector["salt"],
            shortened(re.findall("..", vector["digest"]), 4),
            str(vector["size"]),
            shortened(list(map(str, vector["tokens"])), 9),
            vector["root_hash"],
            " ".join(vector["block_hashes"]),
        ]
        for vector in vectors()
    ]


# -- nothing is left out, and nothing is invented


def test_every_call_of_both_services_is_described() -> None:
    described = set(re.findall(r"\*\*`(\w+)`\*\*", TEXT))
    services = [
        cache_pb2.DESCRIPTOR.services_by_name["CacheService"],
        worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
    ]
    assert described == {method.name for service in services for method in service.methods}


def test_every_state_of_a_block_is_described() -> None:
    names = {name.removeprefix("BLOCK_STATE_") for name in cache_pb2.BlockState.DESCRIPTOR.values_by_name}
    assert {state.strip("`") for state, *_ in rows(section("Blocks"))} == names - {"UNSPECIFIED", "COPYING"}
    assert {name for name in names if f"`{name}`" in section("Blocks")} == names


def test_every_downlink_entry_is_described() -> None:
    entries = cache_pb2.DownlinkEntry.DESCRIPTOR.oneofs_by_name["entry"].fields
    assert [entry.name for entry in entries if f"`{entry.name}`" not in TEXT] == []


def kinds_of(status: Any) -> set[str]:
    """The details of a status by their names, without the ErrorInfo that all have."""
    return {detail.type_url.rpartition(".")[2] for detail in status.details} - {"ErrorInfo"}


def test_the_table_of_reasons_is_the_managers() -> None:
    expected = {reason.value: manager_status.of_refusal(Refusal(reason, "", position=1)) for reason in Reason}
    expected["RECOVERING"] = manager_status.of_unavailable(manager_status.Unavailable())
    expected["INTERNAL"] = manager_status.of_bug()
    found = {reason: status for reason, status, _ in rows(section("Reasons"))}
    assert found.keys() == expected.keys()
    for reason, status in expected.items():
        code, *details = re.findall(r"[A-Z]\w+", found[reason])
        assert (code, set(details)) == (code_pb2.Code.Name(status.code), kinds_of(status)), reason
    with_position = {reason for reason, text in found.items() if "`position`" in text}
    assert with_position == {"GAP", "TOKENS_DIFFER"}


def test_the_table_of_reasons_of_workers_is_theirs() -> None:
    found = {name: status for names, status, _ in rows(section("WorkerService")) for name in names.split(", ")}
    kinds = set(ErrorKind) - {ErrorKind.REFUSED}  # the manager's own status is passed on in its place
    assert found.keys() == {kind.value for kind in kinds}
    for kind in kinds:
        status = worker_status.of_error(EngineError(kind, ""))
        code, *details = re.findall(r"[A-Z]\w+", found[kind.value])
        assert (code, set(details)) == (code_pb2.Code.Name(status.code), kinds_of(status)), kind


@pytest.mark.parametrize(
    ("call", "source", "beside"),
    [
        ("Register", CacheManager.register, set()),
        ("KeepAlive", CacheManager.keep_alive, set()),
        ("Allocate", allocation.allocate, {"STALE_SESSION", "WRONG_KEY", "STALE_CALL", "NOT_TRIED"}),
        ("Append", updates.append, {"STALE_SESSION", "WRONG_KEY", "STALE_CALL", "NOT_TRIED"}),
        ("Deregister", CacheManager.deregister, set()),
        ("Drain", CacheManager.drain, set()),
        ("Report", CacheManager.report, {"BAD_FIELD"}),
    ],
)
def test_the_errors_of_a_call_are_those_that_its_code_names(
    call: str, source: Callable[..., object], beside: set[str]
) -> None:
    (paragraph,) = [text for text in TEXT.split("\n\n") if text.startswith(f"**`{call}`**")]
    behind = TEXT.split(paragraph)[1].split("\n\n**`")[0]  # Append's errors stand behind its table
    listed = reasons_in((paragraph + behind).split("*Errors:*")[1].split("\n\n")[0])
    assert source.__doc__ is not None
    assert listed == reasons_in(source.__doc__.partition("Raises")[2]) | beside


def test_the_limits_are_the_managers() -> None:
    limits = Limits()
    for number in (
        limits.max_workers,
        limits.max_sequences_per_session,
        limits.max_tokens_per_sequence,
        limits.max_items_per_call,
        limits.max_blocks_per_pool,
        limits.max_block_size,
        limits.max_numbers_skipped,
    ):
        assert f"{number:,}" in TEXT
    assert f"at most {limits.max_contents_per_report_part:,} in one" in " ".join(TEXT.split())
    assert f"128 bytes; other names and `address` {limits.max_name_bytes}" in " ".join(TEXT.split())
    assert limits.max_id_bytes == 128
    assert MAX_MESSAGE_BYTES == 16 << 20


# -- the manager's view of a sequence, tried in the core itself

NOW = 0.0
TOKENS = struct.pack("<6I", *range(6))
NAME = "s"


class Desk:
    """A core with one worker, and a second for the larger attempt."""

    def __init__(self) -> None:
        self.manager = CacheManager(1)
        self._call_no = 0
        self._session = self._register("here")
        self._other = self._register("elsewhere")

    def _register(self, worker_id: str) -> int:
        pool = PoolConfig(block_size=4, num_blocks=9)
        return self.manager.register(Registration(worker_id, 1, 1, "a:1", "", "m", pool), NOW).session

    def _uplink(self, session: int) -> Uplink:
        self._call_no += 1
        return Uplink(session, self._call_no)

    def allocate(self, round: int, attempt: int = 1, *, elsewhere: bool = False) -> str:
        """The reason of the refusal; empty if it was granted."""
        item = AllocateItem(SequenceKey(NAME, attempt, round), Root("m"), TOKENS, no_wait=True)
        session = self._other if elsewhere else self._session
        (outcome,), _ = self.manager.allocate(self._uplink(session), [item])
        return outcome.reason.value if isinstance(outcome, Refusal) else ""

    def append(self, round: int) -> str:
        item = AppendItem(SequenceUpdate(SequenceKey(NAME, 1, round), num_computed_tokens=4))
        (outcome,), _ = self.manager.append(self._uplink(self._session), [item])
        return outcome.reason.value if isinstance(outcome, Refusal) else ""

    def free(self, round: int) -> str:
        update = SequenceUpdate(SequenceKey(NAME, 1, round), num_computed_tokens=5)
        self.manager.free(self._uplink(self._session), [update])
        return ""

    @property
    def state(self) -> str:
        for sequence in self.manager.sessions[0].sequences.values():
            if sequence.key.attempt == 1:
                return "fenced" if sequence.fenced else "live"
        return "absent"

    @property
    def num_cached(self) -> int:
        return self.manager.sessions[0].pool.counts().cached


def prepare(row: str) -> tuple[Desk, int]:
    """A core in the state that a row of the table names, and the round that its calls carry."""
    desk = Desk()
    if "absent" not in row:
        assert desk.allocate(1) == ""
    if "fenced" in row:
        assert desk.allocate(0, attempt=2, elsewhere=True) == ""
    return desk, 2 if "larger" in row else 0 if "smaller" in row else 1


def the_managers_view() -> list[tuple[str, list[str]]]:
    first = section("Sequences").split("*The engine's view:*")[0]
    return [(row, cells) for row, *cells in rows(first)]


def test_the_view_has_all_states() -> None:
    assert [re.findall(r"\w+", row)[0] for row, _ in the_managers_view()] == [
        "absent",
        "live",
        "live",
        "live",
        "fenced",
    ]


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize(("row", "cells"), the_managers_view())
def test_a_cell_of_the_managers_view_is_true(row: str, cells: list[str], column: int) -> None:
    desk, round = prepare(row)
    before = desk.state
    found = (desk.allocate, desk.append, desk.free)[column](round)
    cell = cells[column]
    assert {found} - {""} == reasons_in(cell)
    arrows = re.findall(r"→ (\w+)", cell)
    assert desk.state == (arrows[0] if arrows else before)
    if column == 2:
        assert (desk.num_cached > 0) == ("merged" in cell and "nothing merged" not in cell)
    assert desk.manager.check().violations == []


@pytest.mark.parametrize(("row", "cells"), [view for view in the_managers_view() if view[1][3]])
def test_what_a_larger_attempt_does_is_true(row: str, cells: list[str]) -> None:
    desk, _ = prepare(row)
    assert desk.allocate(0, attempt=2, elsewhere=True) == ""
    if "→ fenced" in cells[3]:
        assert desk.state == "fenced"
        assert (
            len(desk.manager.keep_alive(desk.manager.sessions[0].number, 0, desk.manager.sessions[0].load, NOW).entries)
            == 1
        )
    else:
        assert {desk.allocate(1)} == reasons_in(cells[3])


def test_the_example_of_a_lost_reply_is_true() -> None:
    """Calls 7, 8 and 9 of the section on the link."""
    manager = CacheManager(1)
    pool = PoolConfig(block_size=4, num_blocks=9)
    session = manager.register(Registration("w", 1, 1, "a:1", "", "m", pool), NOW).session
    key = SequenceKey("a", 1, 0)
    tokens = struct.pack("<13I", *range(13))
    # Blocks 1 and 2 go to another sequence, so that the numbers are those of the example.
    others = [AllocateItem(SequenceKey("o", 1, 0), Root("m"), tokens[-32:])]
    manager.allocate(Uplink(session, 5), others)
    (granted,), _ = manager.allocate(Uplink(session, 6), [AllocateItem(key, Root("m"), tokens[:32], 9)])
    assert isinstance(granted, Granted)
    assert granted.blocks == (3, 4)

    def append(call_no: int, num_tokens: int, want_blocks: int, bound: Any = ()) -> Any:
        update = SequenceUpdate(key, 0, tokens[: 4 * (num_tokens + 1)], num_tokens, tuple(bound))
        return manager.append(Uplink(session, call_no), [AppendItem(update, want_blocks)])[0][0]

    lost, heard = append(7, 8, 3), append(8, 8, 3)
    assert lost == heard
    assert heard.num_sealed_tokens == 8
    assert [entry[:2] for entry in heard.new_entries] == [(2, 5)]
    with pytest.raises(Refusal) as refused:
        append(7, 8, 3)
    assert refused.value.reason is Reason.STALE_CALL
    last = append(9, 12, 4, heard.new_entries)
    assert (last.num_sealed_tokens, [entry[:2] for entry in last.new_entries]) == (12, [(3, 6)])


# -- further claims, tried in the core


class Link:
    """A core with one worker of 8 blocks of 4 tokens, and that worker's numbered calls."""

    def __init__(self) -> None:
        self.manager = CacheManager(1, lease_seconds=6)
        self.session = self.register()
        self._call_no = 0

    def register(self) -> int:
        pool = PoolConfig(block_size=4, num_blocks=9)
        return self.manager.register(Registration("w", 1, 1, "a:1", "", "m", pool), NOW).session

    def uplink(self, wish: int | None = None, returned: Any = ()) -> Uplink:
        self._call_no += 1
        return Uplink(self.session, self._call_no, 0, wish, tuple(returned))

    def grant(self, name: str, num_tokens: int, first: int = 0, *, wish: int | None = None) -> Granted:
        tokens = struct.pack(f"<{num_tokens}I", *range(first, first + num_tokens))
        item = AllocateItem(SequenceKey(name, 1, 0), Root("m"), tokens, no_wait=True)
        (outcome,), _ = self.manager.allocate(self.uplink(wish), [item])
        assert isinstance(outcome, Granted), outcome
        return outcome

    def append(self, name: str, num_computed: int, want_blocks: int, bound: Any = ()) -> Any:
        update = SequenceUpdate(SequenceKey(name, 1, 0), num_computed_tokens=num_computed, bound=tuple(bound))
        return self.manager.append(self.uplink(), [AppendItem(update, want_blocks)])[0][0]

    def counts(self) -> tuple[int, int, int, int]:
        counts = self.manager.sessions[0].pool.counts()
        return counts.free, counts.cached, counts.held, counts.reserved

    def grants(self) -> list[Any]:
        session = self.manager.sessions[0]
        return [entry.entry for entry in self.manager.keep_alive(session.number, 0, session.load, NOW).entries]


def test_no_blocks_refuses_the_report_too_and_without_the_wish_it_is_taken() -> None:
    link = Link()
    link.grant("a", 8)
    link.grant("b", 24, first=100)
    refused = link.append("a", 8, 3)
    assert refused.reason is Reason.NO_BLOCKS
    assert link.manager.sessions[0].sequences["a", 1].num_sealed == 0
    taken = link.append("a", 8, 0)
    assert (taken.num_sealed_tokens, taken.new_entries) == (8, ())
    assert link.append("a", 8, 9).reason is Reason.NEVER_FITS


def test_entries_are_told_until_they_are_named() -> None:
    link = Link()
    link.grant("a", 8)
    first = link.append("a", 8, 4).new_entries
    assert [entry.table_index for entry in first] == [2, 3]
    assert link.append("a", 8, 4).new_entries == first == link.append("a", 8, 1).new_entries
    assert link.append("a", 8, 4, first[:1]).new_entries == first[1:]
    assert link.append("a", 8, 4, first).new_entries == ()


def test_only_keep_alive_renews_the_lease() -> None:
    link = Link()
    link.grant("a", 4)
    expired: list[Session] = []
    for tick in range(13):
        assert not expired
        link.append("a", 0, 0)
        expired = link.manager.tick(tick / 2)
    assert [session.number for session in expired] == [link.session]


def test_the_reserve_is_filled_before_the_items_of_allocate_and_surplus_comes_again_with_the_old_wish() -> None:
    link = Link()
    table = link.grant("a", 4, wish=3)
    (grant,) = link.grants()
    assert (grant.blocks, table.blocks) == ((1, 2, 3), (4,))
    surplus = [ReservedBlock(block, grant.generation) for block in grant.blocks]
    link.manager.append(link.uplink(returned=surplus), [])
    assert link.counts() == (4, 0, 1, 3)
    assert len(link.grants()) == 2
    link.manager.append(
        link.uplink(0, [ReservedBlock(b, link.grants()[1].generation) for b in link.grants()[1].blocks]), []
    )
    assert link.counts() == (7, 0, 1, 0)
    link.manager.append(link.uplink(100), [])
    assert link.counts() == (0, 0, 1, 7)


def test_a_block_goes_through_its_states_as_the_table_says() -> None:
    """A hit keeps its generation; a grant gives a larger one; what is sealed is cached, what is not is free."""
    link = Link()
    first = link.grant("a", 6)
    link.append("a", 6, 0)
    link.manager.free(link.uplink(), [SequenceUpdate(SequenceKey("a", 1, 0))])
    assert link.counts() == (7, 1, 0, 0)
    again = link.grant("b", 6)
    assert (again.blocks[0], again.generations[0]) == (first.blocks[0], first.generations[0])
    assert again.num_cached_tokens == 4
    assert again.generations[1] > first.generations[1]
    link.manager.free(link.uplink(), [SequenceUpdate(SequenceKey("b", 1, 0))])
    everything = link.grant("c", 32, first=500)
    assert dict(zip(everything.blocks, everything.generations, strict=True))[first.blocks[0]] > first.generations[0]
    assert link.manager.sessions[0].pool.num_evicted == 1


def test_a_report_is_taken_in_as_the_document_says() -> None:
    """Nothing is served before the last part; a part repeated does nothing; a gap names the part; a lie ends the session."""
    manager = CacheManager(2)
    pool = PoolConfig(block_size=4, num_blocks=9)
    hello = Registration("w", 1, 1, "a:1", "", "m", pool, holds_state=True)
    session = manager.register(hello, NOW).session
    tokens = struct.pack("<8I", *range(8))
    generation = 1 << 40 | 7  # of the life before
    content = ContentRun(0, Root("m"), tokens, (3, 5), (generation, generation))
    item = AllocateItem(SequenceKey("a", 1, 0), Root("m"), tokens + tokens, no_wait=True)

    def refused(call: Callable[[], object]) -> Refusal:
        with pytest.raises(Refusal) as caught:
            call()
        return caught.value

    def report(call_no: int, part: int, *contents: ContentRun, last: bool = False) -> Any:
        return manager.report(Uplink(session, call_no), ReportPart(part, last, contents))

    assert refused(lambda: report(1, 1)).position == 0
    report(2, 0, content)
    assert refused(lambda: manager.allocate(Uplink(session, 3), [item])).reason is Reason.RECOVERING
    assert manager.route(Root("m"), tokens + tokens) == []
    report(4, 0, content)
    report(5, 1, last=True)
    report(6, 1, last=True)
    (granted,), _ = manager.allocate(Uplink(session, 7), [item])
    assert isinstance(granted, Granted)
    assert (granted.num_cached_tokens, granted.blocks[:2]) == (8, (3, 5))
    assert granted.generations[:2] == (generation, generation)
    assert manager.check().violations == []

    session = manager.register(hello._replace(register_no=2), NOW).session
    assert refused(lambda: report(1, 0, content, content)).reason is Reason.BAD_REPORT
    assert manager.sessions == ()


# -- the calls from the shell


def shell_blocks() -> list[Block]:
    (begin,) = [index for index, block in enumerate(blocks(DOCUMENT)) if "kvpool manager" in block.text]
    return blocks(DOCUMENT)[begin:]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


@pytest.fixture
def here(port: int) -> Callable[[str], str]:
    """A command as it can be run here: this port, and the programs of this environment."""

    def substituted(text: str) -> str:
        return text.replace("50061", str(port)).replace(".venv/bin/", f"{Path(sys.executable).parent}/")

    return substituted


@pytest.fixture
def manager(here: Callable[[str], str], port: int, tmp_path: Path) -> Iterator[None]:
    """The manager that the document starts."""
    command = here(shell_blocks()[0].text)
    assert command.count("\n") == 1
    environment = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    process = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=ROOT, stderr=subprocess.PIPE, env=environment)
    try:
        end = time.monotonic() + 60
        while True:
            assert process.poll() is None, process.communicate()[1]
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < end, "the manager does not listen"
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.communicate()


def assert_matches(found: Any, shown: Any, where: str) -> None:
    """What came back is what the document shows, but for what stands for anything."""
    if shown == ANYTHING:
        return
    assert type(found) is type(shown), where
    if isinstance(shown, dict):
        assert found.keys() == shown.keys(), where
        for key in shown:
            assert_matches(found[key], shown[key], f"{where}.{key}")
    elif isinstance(shown, list):
        assert len(found) == len(shown), where
        for index, (one, other) in enumerate(zip(found, shown, strict=True)):
            assert_matches(one, other, f"{where}[{index}]")
    else:
        assert found == shown, where


@pytest.mark.usefixtures("manager")
def test_every_call_from_the_shell_gets_the_reply_that_is_shown(here: Callable[[str], str], tmp_path: Path) -> None:
    shown = shell_blocks()[1:]
    calls, replies = shown[::2], shown[1::2]
    assert [block.language for block in shown] == ["sh", "json"] * len(calls)
    separator = "-- next --"
    script = f"\necho '{separator}'\n".join(here(call.text) for call in calls)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = done.stdout.split(f"{separator}\n")
    assert len(found) == len(calls), done.stderr
    for call, output, reply in zip(calls, found, replies, strict=True):
        assert_matches(json.loads(output), json.loads(reply.text), call.text)
    assert len(calls) > 10
