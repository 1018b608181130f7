"""docs/PROTOCOL.md says what the code does: its vectors, its tables, and every call that it shows with its reply."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import xxhash
from google.rpc import code_pb2

from kvpool.cache_service import status as manager_status
from kvpool.cache_service.core import allocation, forks, updates
from kvpool.cache_service.core.hashing import block_hash, root_bytes, xxh64
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Appended, Granted, Limits, Root, SequenceKey, Uplink
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.session import Session
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.v1 import cache_pb2, worker_pb2
from kvpool.worker_service import status as worker_status
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from tests.cache_service.core.desk import Desk
from tests.docs.blocks import Block, blocks
from tests.docs.protocol_shell import DOCUMENT, TEXT, ProtocolShell, section

ANYTHING = "…"
"""Stands for a value that differs from run to run."""


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
def test_a_vector_is_what_the_manager_computes_and_what_the_words_say(vector: dict[str, Any]) -> None:
    """By the words of the document alone, a reader needs xxh64 and the section; nothing of this project is used."""

    def u32(number: int) -> bytes:
        return number.to_bytes(4, "little")

    def field(value: bytes) -> bytes:
        return u32(len(value)) + value

    strings = [vector[name].encode("utf-8") for name in ("fingerprint", "adapter", "salt")]
    encoded = b"".join(map(field, [*strings, bytes.fromhex(vector["digest"]), u32(vector["size"])]))
    if vector == vectors()[0]:
        (shown,) = re.findall(r"`([0-9a-f]{8}(?: [0-9a-f]+)+)`", section("`block_hash`"))
        assert encoded == bytes.fromhex(shown)
    root = Root(vector["fingerprint"], vector["adapter"], vector["salt"], bytes.fromhex(vector["digest"]))
    assert encoded == root_bytes(root, vector["size"])
    parent = xxhash.xxh64(encoded, seed=0).intdigest()
    assert f"{parent:016x}" == vector["root_hash"]
    tokens, hashes = list(vector["tokens"]), []
    while len(tokens) >= vector["size"]:
        block, tokens = b"".join(map(u32, tokens[: vector["size"]])), tokens[vector["size"] :]
        name = xxhash.xxh64(parent.to_bytes(8, "little") + block, seed=0).intdigest()
        assert name == block_hash(xxh64, parent, block)
        hashes.append(f"{name:016x}")
        parent = name
    assert hashes == vector["block_hashes"]


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
    expected["RECOVERING"] = manager_status.of_unavailable(manager_status.ManagerUnavailable())
    expected["STANDBY"] = manager_status.of_standby()
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
        ("Fork", forks.fork, {"STALE_SESSION", "WRONG_KEY", "STALE_CALL"}),
        ("Deregister", CacheManager.deregister, set()),
        ("Drain", CacheManager.drain, set()),
        ("Report", CacheManager.report, {"BAD_FIELD"}),
    ],
)
def test_the_errors_of_a_call_are_those_that_its_code_names(
    call: str, source: Callable[..., object], beside: set[str]
) -> None:
    (paragraph,) = [text for text in TEXT.split("\n\n") if text.startswith(f"**`{call}`**")]
    behind = TEXT.split(paragraph)[1].split("\n\n**`")[0]  # Report's errors stand behind its stages
    listed = reasons_in((paragraph + behind).split("*Errors:*")[1].split("\n\n")[0])
    if call in ("Allocate", "Append", "Fork", "Report"):
        listed |= reasons_in(section("Calls of a worker").split("*Errors of the whole call:*")[1].split("\n\n")[0])
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
    contents, elsewhere = limits.max_contents_per_report_part, limits.max_blocks_per_report_part
    assert f"at most {contents:,} contents, and {elsewhere:,} blocks elsewhere" in " ".join(TEXT.split())
    assert f"128 bytes; other names and `address` {limits.max_name_bytes}" in " ".join(TEXT.split())
    assert limits.max_id_bytes == 128
    assert MAX_MESSAGE_BYTES == 16 << 20


# -- the manager's view of a sequence, tried in the core itself


def sequence_key(round: int, attempt: int = 1) -> SequenceKey:
    return SequenceKey("s", attempt, round)


def allocate(desk: Desk, round: int, attempt: int = 1) -> object:
    return desk.allocate(sequence_key(round, attempt), range(6), no_wait=True)


def append(desk: Desk, round: int) -> object:
    desk.tokens[sequence_key(round)] = list(range(6))
    return desk.report(sequence_key(round), 4)


def free(desk: Desk, round: int) -> object:
    return desk.free(sequence_key(round), 5)


def reasons_of(outcome: object) -> set[str]:
    return {outcome.reason.value} if isinstance(outcome, Refusal) else set()


def state_of(desk: Desk) -> str:
    sequence = desk.session.sequences.get(("s", 1))
    return "absent" if sequence is None else "fenced" if sequence.fenced else "live"


def prepare(row: str) -> tuple[Desk, Desk, int]:
    """Two workers of a core in the state that a row of the table names, and the round that the calls of the first one carry."""
    desk = Desk(9, worker_id="here")
    other = Desk(9, worker_id="other", lockstep=desk.lockstep)
    if "absent" not in row:
        assert isinstance(allocate(desk, 1), Granted)
    if "fenced" in row:
        assert isinstance(allocate(other, 0, attempt=2), Granted)
    return desk, other, 2 if "larger" in row else 0 if "smaller" in row else 1


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
    desk, _, round = prepare(row)
    before = state_of(desk)
    outcome = (allocate, append, free)[column](desk, round)
    cell = cells[column]
    assert reasons_of(outcome) == reasons_in(cell)
    assert state_of(desk) == next(iter(re.findall(r"→ (\w+)", cell)), before)
    if column == 2:
        assert (desk.counts.cached > 0) == ("merged" in cell and "nothing merged" not in cell)


@pytest.mark.parametrize(("row", "cells"), [view for view in the_managers_view() if view[1][3]])
def test_what_a_larger_attempt_does_is_true(row: str, cells: list[str]) -> None:
    desk, other, _ = prepare(row)
    assert isinstance(allocate(other, 0, attempt=2), Granted)
    if "→ fenced" in cells[3]:
        assert state_of(desk) == "fenced"
        session = desk.session
        assert len(desk.manager.keep_alive(session.number, 0, session.load, 0.0).entries) == 1
    else:
        assert reasons_of(allocate(desk, 1)) == reasons_in(cells[3])


def test_the_example_of_a_lost_reply_is_true() -> None:
    """Calls 7, 8 and 9 of the section on the link."""
    desk = Desk(9)
    desk.grant("another", range(20, 28))  # so that the blocks have the numbers of the example
    assert desk.grant("a", range(8)).tables[0].blocks == (3, 4)
    desk.call_no = 6
    lost = desk.report("a", 8, new_tokens=[8], want_blocks=3)
    desk.tokens[SequenceKey("a", 1, 0)] = list(range(8))  # call 8 sends the token again
    heard = desk.report("a", 8, new_tokens=[8], want_blocks=3)
    assert isinstance(heard, Appended)
    assert lost == heard
    assert heard.num_sealed_tokens == 8
    assert [entry[:2] for entry in heard.new_entries[0]] == [(2, 5)]
    with pytest.raises(Refusal) as refused:
        desk.manager.append(Uplink(desk.number, 7), [])
    assert refused.value.reason is Reason.STALE_CALL
    last = desk.report("a", 12, new_tokens=[9, 10, 11, 12], bound=heard.new_entries[0], want_blocks=4)
    assert isinstance(last, Appended)
    assert (desk.call_no, last.num_sealed_tokens, [entry[:2] for entry in last.new_entries[0]]) == (9, 12, [(3, 6)])


# -- further claims, tried in the core


def test_only_keep_alive_renews_the_lease() -> None:
    desk = Desk(9)
    desk.grant("a", range(4))
    expired: list[Session] = []
    for tick in range(13):
        assert not expired
        desk.manager.append(desk.uplink(), [])
        expired = desk.manager.tick(tick / 2)
    assert [session.number for session in expired] == [desk.number]


# -- the shell commands

EXCHANGES = [
    (Block("sh", call), Block("json", reply))
    for call, reply in re.findall(r"^```sh\n((?:(?!```).*\n)*)```\n```json\n((?:(?!```).*\n)*)```$", TEXT, re.MULTILINE)
]


def assert_matches(found: Any, shown: Any, where: str) -> None:
    """A reply equals the one in the document, except where that has an ellipsis."""
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


def test_every_call_from_the_shell_gets_the_reply_that_is_shown(protocol_shell: ProtocolShell) -> None:
    separator = "-- next --"
    output = protocol_shell.run(f"\necho '{separator}'\n".join(call.text for call, _ in EXCHANGES))
    found = output.split(f"{separator}\n")
    assert len(found) == len(EXCHANGES) > 20
    for printed, (call, reply) in zip(found, EXCHANGES, strict=True):
        assert_matches(json.loads(printed), json.loads(reply.text), call.text)


def test_the_session_has_ten_calls() -> None:
    numbered = re.findall(r"^\*\*(\d+)\. (\w+)\*\*", section("A session in ten calls"), re.MULTILINE)
    assert [int(number) for number, _ in numbered] == list(range(1, 11))
    calls = [re.findall(r"\bcache (\w+) ", call.text) for call, _ in EXCHANGES[1:11]]
    assert calls == [[name] for _, name in numbered]


def test_the_stubs_compile_in_python_and_call_the_manager(protocol_shell: ProtocolShell) -> None:
    commands, printed = protocol_shell.commands("Python")
    assert protocol_shell.run(commands) == printed
