"""A cluster whose every name is an attack on the terminal: no command obeys it, none ends in a traceback."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, cast

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from kvpool.cli.app import app
from kvpool.cli.commands.ray import show_services
from kvpool.cli.commands.up import say_ready
from kvpool.cli.launch.cluster import ClusterSpec
from kvpool.cli.launch.log import PrefixedLog
from kvpool.cli.terminal import print_answer
from kvpool.client.errors import InvalidRequest
from kvpool.v1 import cache_pb2, common_pb2, worker_pb2
from tests.cli.conftest import Run
from tests.cli.test_cli_health import ask, service
from tests.client.commands import run_kvpool
from tests.client.fakes import Context, FakeManager, FakeModel, FakeWorker, answer, error_status, serving
from tests.client.words import CAT, SAT, THE

NASTY = "[/x] [bold]\x1b]0;PWN\x07\x1b[2J\x9b31m\u202egnp\u2028\n\r\x7f:smile:"
BECOME_ANOTHER_PROCESS = {"manager", "worker", "gateway", "walkthrough"}
"""Commands that call nobody: they become a process whose output is its log."""


def nasty_status(code: int) -> status_pb2.Status:
    details = error_details_pb2.BadRequest()
    details.field_violations.add(field=f"field {NASTY}", description=f"description {NASTY}")
    return error_status(code, "BAD_FIELD", f"message {NASTY}", details)


class NastyWorker(FakeWorker):
    """A worker that serves, under a bad name."""

    def __init__(self, name: str, *answers: Sequence[object], model: FakeModel | None = None) -> None:
        model = model or FakeModel(name=f"model {NASTY}", fingerprint=f"fp {NASTY}")
        super().__init__(f"{name} {NASTY}", *answers, model=model)

    def description(self) -> cache_pb2.WorkerDescription:
        description = super().description()
        for attempt in (1, 2):
            sequence = description.sequences.add(num_tokens=9, num_computed_tokens=3, num_blocks=2)
            sequence.key.CopyFrom(common_pb2.SequenceKey(sequence_id=f"sequence {NASTY}", attempt=attempt))
        description.num_sequences = 2
        return description


class Listed(NastyWorker):
    """One that is only in the manager's list: its address is no address."""

    def description(self) -> cache_pb2.WorkerDescription:
        self.address = f"address {NASTY}"
        return super().description()


class NastyHealth(health_pb2_grpc.HealthServicer):
    """Refuses with such a message."""

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        await context.abort(grpc.StatusCode.INTERNAL, f"health {NASTY}")
        raise AssertionError


@asynccontextmanager
async def nasty_cluster(*answers: Sequence[object], model: FakeModel | None = None) -> AsyncIterator[FakeManager]:
    worker = NastyWorker("worker", *answers, model=model)
    async with serving(worker):
        manager = FakeManager([worker, Listed("listed", model=model)])
        owner = common_pb2.SequenceKey(sequence_id=f"owner {NASTY}", attempt=1)
        manager.blocks = [
            cache_pb2.BlockDescription(block_id=1, state=cache_pb2.BLOCK_STATE_HELD, ref_count=1, owners=[owner])
        ]
        manager.explanation = cache_pb2.ExplainResponse(
            num_workers=1,
            workers=[
                cache_pb2.WorkerExplanation(
                    worker_id=f"worker {NASTY}",
                    miss=cache_pb2.Miss(
                        cause=cache_pb2.MISS_CAUSE_EVICTED, evicted_for=owner, other_worker_id=f"other {NASTY}"
                    ),
                )
            ],
        )
        manager.violations = [
            cache_pb2.Violation(law=NASTY, worker_id=NASTY, block_id=3, sequence=owner, message=NASTY)
        ]
        async with serving(manager):
            yield manager


def assert_harmless(*outputs: str) -> str:
    together = "".join(outputs)
    bad = {character for character in together if character != "\n" and not character.isprintable()}
    assert not bad, (bad, together)
    assert "Traceback" not in together
    assert "PWN" in together, together  # what is shown is the name
    assert "😄" not in together
    return together


ANSWERS = [
    pytest.param(answer(THE, CAT, SAT), id="answers"),
    pytest.param([nasty_status(code_pb2.INVALID_ARGUMENT)], id="refuses"),
    pytest.param([nasty_status(code_pb2.UNAVAILABLE)], id="is unavailable"),
    pytest.param([nasty_status(code_pb2.INTERNAL)], id="fails"),
    pytest.param(
        [worker_pb2.GenerateResponse(finish_reason=cast(worker_pb2.FinishReason, 99))], id="breaks the protocol"
    ),
]
COMMANDS: dict[str, list[list[str]]] = {
    "status": [["status"], ["status", "--json"]],
    "top": [["top", "--json", "--interval", "0.1"],
            ["top", "--once", "--interval", "0.1"],
            ["top", "--once", "--interval", "0.1", "--worker", f"listed {NASTY}"],
            ["top", "--once", "--interval", "0.1", "--worker", f"other {NASTY}"]],
    "blocks": [["blocks"], ["blocks", "--json"], ["blocks", "--worker", "unknown"]],
    "check": [["check"], ["check", "--json"]],
    "drain": [["drain", f"worker {NASTY}"], ["drain", f"worker {NASTY}", "--no-wait"], ["drain", f"unknown {NASTY}"]],
    "explain": [["explain", "the cat"], ["explain", "the cat", "--json"], ["explain", "x", "--worker", f"unknown {NASTY}"]],
    "bench": [["bench", "serve", "--requests", "2", "--own-tokens", "4", "--prefix-tokens", "0", "--generated-tokens", "3",
               "--no-warm-up"], ["bench", "serve", "--model", "unknown", "--requests", "1"]],
}  # fmt: skip


@pytest.mark.parametrize("command", [command for commands in COMMANDS.values() for command in commands], ids=" ".join)
async def test_no_command_obeys_a_name(command: list[str], run: Run) -> None:
    async with nasty_cluster() as manager:
        ran = await run(*command, on=manager)
    assert_harmless(ran.out, ran.err)


@pytest.mark.parametrize("steps", ANSWERS)
@pytest.mark.parametrize(
    "command", [["generate", "the"], ["generate", "the", "--json"], ["chat", "the"], COMMANDS["bench"][0]]
)
async def test_no_command_obeys_an_error(command: list[str], steps: Sequence[object], run: Run) -> None:
    async with nasty_cluster(steps) as manager:
        ran = await run(*command, on=manager)
    together = assert_harmless(ran.out, ran.err, "PWN")
    if ran.status:
        assert "PWN" in together.removesuffix("PWN")


@pytest.mark.parametrize("command", ["generate", "chat"])
async def test_the_names_of_models_are_shown(command: str, run: Run) -> None:
    async with nasty_cluster() as manager:
        ran = await run(command, "x", "--model", "unknown", on=manager)
    assert ran.status == 1
    assert "served are" in assert_harmless(ran.out, ran.err)


async def test_a_template_that_refuses_is_shown(run: Run) -> None:
    model = FakeModel(name=NASTY)
    model.files[worker_pb2.MODEL_FILE_CHAT_TEMPLATE] = b"{{ raise_exception(messages[0].content) }}"
    async with nasty_cluster(model=model) as manager:
        ran = await run("chat", NASTY, on=manager)
    assert ran.status == 1
    assert "refused" in assert_harmless(ran.out, ran.err)


async def test_a_conversation_shows_names_and_errors() -> None:
    async with nasty_cluster(answer(SAT), [nasty_status(code_pb2.INVALID_ARGUMENT)]) as manager:
        process = await run_kvpool("chat", "--manager", manager.address, typed="the\ncat\n")
    assert process.returncode == 0
    assert "prompt tokens" in assert_harmless(process.stdout, process.stderr)
    assert "kvpool: " in process.stderr


@pytest.mark.parametrize("command", ["kvpool health", "kvpool-health"])
async def test_health_shows_what_a_service_says(command: str, run: Run) -> None:
    async with service(NastyHealth()) as address:
        ran = await ask(run, command, address)
    assert ran.status == 1
    assert_harmless(ran.out, ran.err)


def test_every_command_is_tried() -> None:
    names = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    assert names == COMMANDS.keys() | {"generate", "chat", "health", "up", "ray"} | BECOME_ANOTHER_PROCESS


def console() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=120, highlight=False), stream


def test_ray_shows_what_its_nodes_say() -> None:
    shown, stream = console()
    place = {"host": None, "address": None, "pid": None}
    service = {"name": NASTY, "state": NASTY, "host": NASTY, "address": NASTY, "pid": 1}
    show_services(shown, NASTY, [service, {"name": "worker-0", "state": "runs", **place}])
    show_services(shown, NASTY, [])
    assert "worker-0" in assert_harmless(stream.getvalue())


def test_up_shows_the_names_of_its_workers() -> None:
    worker = NastyWorker("worker").description()
    worker.address = NASTY
    printing, stream = console()
    say_ready([worker], ClusterSpec(), {}, PrefixedLog(printing))
    assert_harmless(stream.getvalue())


@pytest.mark.parametrize("terminal", [False, True])
def test_up_shows_the_lines_of_its_processes(terminal: bool) -> None:
    stream = io.StringIO()
    colours: Literal["standard"] | None = "standard" if terminal else None
    log = PrefixedLog(Console(file=stream, width=120, force_terminal=terminal, color_system=colours))
    log("worker-0", f"\x1b[31mred\x1b[0m {NASTY} \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ [/x] \x08\x0b")
    shown = stream.getvalue()
    if terminal:
        assert "\x1b[31mred" in shown
        shown = re.sub("\x1b\\[[0-9;]*m", "", shown)
    assert_harmless(shown)
    assert "red" in shown


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_is_given_no_control_characters_of_an_answer(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    text = f"one\n\ttwo {NASTY}"
    print_answer(text)
    shown = capsys.readouterr().out
    if is_terminal:
        assert shown.startswith("one\n\ttwo [/x] ")
        assert_harmless(shown.replace("\t", ""))
    else:
        assert shown == text


def test_exceptions_are_one_harmless_line() -> None:
    error = InvalidRequest(f"message {NASTY}", violations=(f"field: {NASTY}",))
    for text in (str(error), error.message, repr(error), *error.violations):
        assert "\n" not in assert_harmless(text)
