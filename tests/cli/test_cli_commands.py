"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2

from kvpool.cli.launch.cluster import free_port
from kvpool.cli.terminal import client_config
from kvpool.command import main as program
from kvpool.process.address import DEFAULT_PORT
from kvpool.process.services import SERVICES
from kvpool.process.settings import SettingsProblem
from kvpool.process.version import installed_version
from kvpool.v1 import cache_pb2, worker_pb2
from kvpool.walkthrough.__main__ import STORIES
from tests.cli.conftest import Run
from tests.cli.test_cli_health import STATUS, service
from tests.client.commands import became, exit_status, run_kvpool, start_kvpool
from tests.client.fakes import HANG, SESSION, FakeWorker, answer, error_status, fake_cluster, usage
from tests.client.words import SAT, THE
from tests.python_program import ROOT, run_python

# -- generate


async def test_generate_json_prints_one_object(run: Run) -> None:
    async with fake_cluster(FakeWorker("w", answer(THE, SAT, num_cached=4))) as manager:
        ran = await run("generate", "the", "--json", on=manager)
    found = json.loads(ran.out)
    assert (ran.status, ran.err) == (0, "")
    assert found.pop("time_to_first_token_ms") > 0
    assert found == {
        "text": " the sat",
        "token_ids": [THE, SAT],
        "finish_reason": "stop",
        "num_prompt_tokens": 4,
        "num_cached_tokens": 4,
        "worker_id": "w",
        "num_attempts": 1,
        "num_preemptions": 0,
        "times": None,
    }


async def test_every_answer_flag_reaches_the_worker_and_stdout_is_the_text_alone(run: Run) -> None:
    worker = FakeWorker("w")
    shared = [
        "--min-p", "0.25", "--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--frequency-penalty", "0.75",
        "--logit-bias", "7=-2.5", "--logit-bias", "0=100", "--priority", "-3", "--tenant", "blue",
    ]  # fmt: skip
    own = [
        "--stop-token-id", "5", "--stop-token-id", "6", "--stop", "x", "--stop", "y", "--min-tokens", "3", "--max-tokens", "5",
        "--seed", "9", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.5", "--ignore-eos", "--echo",
    ]  # fmt: skip
    async with fake_cluster(worker) as manager:
        for arguments in (["generate", *shared, *own], ["chat", *shared]):
            assert await run(*arguments, "the", on=manager) == (0, " the cat sat\n", "")
    for request in worker.requests:
        sampling = request.sampling
        assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 0.75)
        assert dict(sampling.logit_bias) == {7: -2.5, 0: 100.0}
        assert (request.priority, request.tenant) == (-3, "blue")
    stop = worker.requests[0].stop
    assert (list(stop.stop_token_ids), list(stop.stop_strings), stop.ignore_eos) == ([5, 6], ["x", "y"], True)
    assert (stop.min_tokens, stop.max_tokens) == (3, 5)
    sampling = worker.requests[0].sampling
    assert (sampling.seed, sampling.temperature, sampling.top_k, sampling.top_p) == (9, 0.5, 4, 0.5)
    assert (worker.requests[0].echo, worker.requests[1].echo) == (True, False)


def two_texts(score: float | None = None) -> list[Any]:
    """Two answers, the second of which is shorter."""
    messages = []
    for index, (token_ids, text) in enumerate((([THE, SAT], " the sat"), ([THE], " the"))):
        message = worker_pb2.GenerateResponse(
            index=index, token_ids=token_ids, text=text, usage=usage(), finish_reason=worker_pb2.FINISH_REASON_STOP
        )
        if score is not None:
            message.score = score - index
        messages.append(message)
    return messages


async def test_several_answers_are_printed_one_after_the_other(run: Run) -> None:
    worker = FakeWorker("w", two_texts())
    async with fake_cluster(worker) as manager:
        ran = await run("generate", "the", "--n", "2", "--seed", "4", on=manager)
        assert ran == (0, "[1 of 2]\n the sat\n[2 of 2]\n the\n", "")
        ran = await run("generate", "the", "--n", "2", "--json", on=manager)
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [(line["text"], line["token_ids"]) for line in lines] == [(" the sat", [THE, SAT]), (" the", [THE])]
    assert not any("score" in line for line in lines)
    assert [request.n for request in worker.requests] == [2, 2]


async def test_a_beam_search_has_its_flags_and_its_scores(run: Run) -> None:
    worker = FakeWorker("w", two_texts(score=-1.5))
    flags = ["--num-beams", "3", "--n", "2", "--length-penalty", "0.5", "--early-stopping", "never"]
    async with fake_cluster(worker) as manager:
        ran = await run("generate", "the", "--json", *flags, on=manager)
    assert [json.loads(line)["score"] for line in ran.out.splitlines()] == [-1.5, -2.5]
    search = worker.requests[0].beam_search
    assert (search.num_beams, search.length_penalty) == (3, 0.5)
    assert search.early_stopping == worker_pb2.EARLY_STOPPING_NEVER


async def test_logprobs_are_part_of_the_json_object(run: Run) -> None:
    message = worker_pb2.GenerateResponse(
        token_ids=[THE], text=" the", usage=usage(num_prompt=2), finish_reason=worker_pb2.FINISH_REASON_LENGTH
    )
    message.logprobs.add(logprob=-0.5, top_token_ids=[THE, SAT], top_logprobs=[-0.5, -1.5])
    message.prompt_logprobs.add()
    message.prompt_logprobs.add().logprobs.logprob = -2.0
    async with fake_cluster(FakeWorker("w", [message])) as manager:
        ran = await run("generate", "the", "--json", "--logprobs", "2", "--prompt-logprobs", "0", on=manager)
    found = json.loads(ran.out)
    top = [{"token_id": THE, "logprob": -0.5}, {"token_id": SAT, "logprob": -1.5}]
    assert found["logprobs"] == [{"logprob": -0.5, "top": top}]
    assert found["prompt_logprobs"] == [None, {"logprob": -2.0, "top": []}]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--logit-bias", "x=1"], "1042=-5.5"),
        (["--logit-bias", "5"], "1042=-5.5"),
        (["--logit-bias", "5=101"], "logit_bias must be a number in [-100, 100]"),
        (["--logprobs", "1"], "--json"),
        (["--early-stopping", "true"], "num_beams must be 2 or more"),
    ],
)
async def test_a_wrong_answer_flag_is_refused(flags: list[str], complaint: str, run: Run) -> None:
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager:
        ran = await run("generate", "the", *flags, on=manager)
    assert ran.status != 0
    assert complaint in ran.err
    assert not worker.requests


async def test_generate_reads_the_prompt_from_a_pipe() -> None:
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager:
        done = await run_kvpool("generate", "-", "--json", "--manager", manager.address, typed="the cat")
    assert json.loads(done.stdout)["worker_id"] == "w"
    assert list(worker.requests[0].token_ids.ids) == [1, 5, 6]


# -- chat


async def test_chat_remembers_what_was_answered_until_it_is_to_forget() -> None:
    too_long = error_status(code_pb2.INVALID_ARGUMENT, "NEVER_FITS", "too long")
    broken = error_status(code_pb2.INTERNAL, "INTERNAL", "a bug")
    worker = FakeWorker("w", answer(SAT), [too_long], [broken], answer(SAT))
    async with fake_cluster(worker) as manager:
        typed = "the\ncat\nmat\ncat\n/clear\ndog\n/exit\nmat\n"
        done = await run_kvpool("chat", typed=typed, KVPOOL_MANAGER=manager.address)
    assert (done.returncode, done.stdout.split()) == (0, ["sat", "sat", "sat"])
    errors = [line for line in done.stderr.splitlines() if line.startswith("kvpool: ")]
    assert len(errors) == 2
    assert "too long" in errors[0]
    assert "a bug" in errors[1]
    prompts = [list(request.token_ids.ids) for request in worker.requests]
    assert prompts[0] == [1, 3, 5, 4]
    assert prompts[3:] == [[1, 3, 5, 4, SAT, 3, 6, 4], [1, 3, 10, 4]]


# -- what shows something of the cluster

WORKER_OBJECT = {
    "worker_id": "w", "session": f"{SESSION:#x}", "lease_remaining_ms": 0, "recovering": False, "draining": False, "model": "tiny",
    "block_size": 4, "num_blocks": 12, "free": 6, "cached": 2, "held": 2, "shared": 1, "reserved": 1, "running": 0, "waiting": 0,
    "hit_rate": None,
}  # fmt: skip


def cached_blocks(count: int) -> list[cache_pb2.BlockDescription]:
    state = cache_pb2.BLOCK_STATE_CACHED
    return [cache_pb2.BlockDescription(block_id=block_id, state=state) for block_id in range(1, count + 1)]


def manager_violation() -> cache_pb2.Violation:
    violation = cache_pb2.Violation(law="conservation", message="one [too] many", worker_id="w9", block_id=17)
    violation.sequence.sequence_id, violation.sequence.attempt, violation.sequence.round = "seq", 2, 1
    return violation


async def test_every_command_that_shows_something_has_json(run: Run) -> None:
    async with fake_cluster(FakeWorker("w")) as manager:
        worker = {**WORKER_OBJECT, "address": manager.workers[0].address}
        cluster = {"manager": manager.address, "epoch": 7, "num_prefix_nodes": 3}
        manager.blocks = cached_blocks(2)

        async def found(*command: str, status: int = 0) -> dict[str, Any]:
            ran = await run(*command, "--json", on=manager)
            assert (ran.status, ran.err) == (status, "")
            parsed: dict[str, Any] = json.loads(ran.out)
            return parsed

        assert await found("status") == {**cluster, "workers": [worker]}
        picture = await found("top", "--interval", "0.1")
        rates = picture["workers"][0]["rates"]
        assert rates["generated_tokens"] == 0
        workers = [{**worker, "rates": rates}]
        assert picture == {**cluster, "workers": workers, "requests_of": "w", "requests": []}
        (blocks,) = (await found("blocks"))["workers"]
        assert (blocks["worker_id"], [block["block_id"] for block in blocks["blocks"]]) == ("w", [1, 2])
        assert (blocks["blocks"][0]["state"], blocks["blocks"][0]["block_hash"]) == ("cached", None)
        assert (await found("check"))["violations"] == []
        manager.violations = [manager_violation()]
        (violation,) = (await found("check", status=1))["violations"]
        assert violation == {
            "law": "conservation",
            "worker_id": "w9",
            "block_id": 17,
            "sequence": "seq/2/1",
            "message": "one [too] many",
        }
        # The fakes have no health service.
        ran = await run("health", manager.address, "--json")
        health = json.loads(ran.out)
        assert (ran.status, health["address"], health["serving"]) == (1, manager.address, False)


async def test_check_fails_if_a_law_is_broken(run: Run) -> None:
    async with fake_cluster() as manager:
        ran = await run("check", on=manager)
        assert ran.status == 0
        assert "every law holds" in ran.out
        manager.violations = [manager_violation()]
        ran = await run("check", on=manager)
    assert ran.status == 1
    assert all(word in ran.out for word in ("conservation", "one [too] many", "w9", "17", "seq/2/1"))


async def test_status_without_workers_says_what_to_do(run: Run) -> None:
    async with fake_cluster() as manager:
        for manager.former_lease_ms, words in (0, "start one with `kvpool worker`"), (900, "its workers report in"):
            ran = await run("status", on=manager)
            assert ran.status == 0
            assert words in ran.out


async def test_blocks_draws_every_worker_or_the_one_asked_for(run: Run) -> None:
    async with fake_cluster(FakeWorker("w1"), FakeWorker("w2")) as manager:
        manager.blocks = cached_blocks(11)
        ran = await run("blocks", on=manager)
        assert (ran.status, ran.out.count("∅▒▒▒▒▒▒▒▒▒▒▒")) == (0, 2)
        assert "\x1b" not in ran.out
        ran = await run("blocks", "--worker", "w2", on=manager)
        assert ran.status == 0
        assert "w1" not in ran.out
        ran = await run("blocks", "--worker", "w3", on=manager)
        assert ran.status == 1
        assert "there are: w1, w2" in ran.err


async def test_signs_that_the_encoding_lacks_are_replaced() -> None:
    async with fake_cluster(FakeWorker("w")) as manager:
        manager.blocks = cached_blocks(11)
        done = await run_kvpool("blocks", "--manager", manager.address, PYTHONIOENCODING="ascii")
    assert "0%%%%%%%%%%%" in done.stdout


# -- which manager


async def test_a_worker_s_port_as_manager_is_recognised(run: Run) -> None:
    async with service(worker=STATUS.NOT_SERVING) as address:
        ran = await run("status", on=address)
    assert ran.status == 1
    assert f"{address} is the port of a worker, not of the manager" in ran.err
    async with fake_cluster(FakeWorker("w")) as manager:
        ran = await run("status", on=manager.workers[0].address)
    assert ran.status == 1
    assert "the address of another service" in ran.err


@pytest.mark.usefixtures("no_manager_comes")
async def test_a_host_that_does_not_resolve_is_named(run: Run) -> None:
    ran = await run("check", on="no.such.host.invalid:50051")
    assert ran.status == 1
    assert "the host name 'no.such.host.invalid' of the manager does not resolve" in ran.err


@pytest.mark.usefixtures("no_manager_comes")
@pytest.mark.parametrize(
    "command", ["generate the", "chat the", "chat", "status", "status --json", "blocks", "check", "top --once"]
)
async def test_a_missing_manager_is_one_helpful_line(command: str, run: Run) -> None:
    address = f"127.0.0.1:{free_port()}"
    ran = await run(*command.split(), on=address)
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert address in ran.err
    assert "kvpool up" in ran.err


@pytest.mark.parametrize("command", [["generate", "the", "--json"], ["chat", "the"], ["status", "--json"], ["check"]])
async def test_a_manager_on_another_machine_is_used_with_one_warning(command: list[str], run: Run) -> None:
    """Nothing is encrypted; who types the address is warned, and served. On this machine there is nothing to warn of."""
    async with fake_cluster(FakeWorker("w")) as manager:
        remote = manager.address.replace("127.0.0.1", "0.0.0.0")
        ran = await run(*command, on=remote)
        assert (ran.status, ran.err.count("\n")) == (0, 1)
        assert remote in ran.err
        assert "not encrypted" in ran.err
        assert "not encrypted" not in ran.out
        for local in (manager.address, manager.address.replace("127.0.0.1", "localhost")):
            ran = await run(*command, on=local)
            assert (ran.status, ran.err) == (0, "")


# -- errors and signals


async def test_a_refusal_is_one_line_with_the_figures(run: Run) -> None:
    refused = error_status(code_pb2.INVALID_ARGUMENT, "NEVER_FITS", "needs 900 blocks,\nthere are 11")
    async with fake_cluster(FakeWorker("w", [refused])) as manager:
        ran = await run("generate", "the", "--json", on=manager)
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "needs 900 blocks, there are 11" in ran.err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
async def test_a_signal_ends_the_command_and_its_call_quietly(number: signal.Signals, status: int) -> None:
    worker = FakeWorker("w", [answer(THE)[0], HANG])
    async with fake_cluster(worker) as manager:
        process = await start_kvpool("generate", "the", "--manager", manager.address)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.read(4), 30) == b" the"
        process.send_signal(number)
        _, err = await asyncio.wait_for(process.communicate(), 30)
        await asyncio.wait_for(worker.cancelled.wait(), 30)
    assert process.returncode == status
    assert b"Traceback" not in err


async def test_ctrl_c_ends_an_answer_and_not_the_conversation() -> None:
    worker = FakeWorker("w", [answer(THE)[0], HANG], answer(SAT))
    async with fake_cluster(worker) as manager:
        process = await start_kvpool("chat", "--manager", manager.address)
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.write(b"the cat\n")
        assert await asyncio.wait_for(process.stdout.read(4), 30) == b" the"
        process.send_signal(2)
        await asyncio.wait_for(worker.cancelled.wait(), 30)
        out, err = await asyncio.wait_for(process.communicate(b"dog\n"), 30)
    assert (process.returncode, out) == (0, b"\n sat\n")
    assert b"Traceback" not in err
    assert list(worker.requests[1].token_ids.ids) == [1, 3, 10, 4]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize(
    "program", ["kvpool.command", "kvpool.cache_service.__main__", "kvpool.worker_service.__main__"]
)
def test_a_signal_while_a_program_is_imported_ends_it_quietly(
    program: str, number: signal.Signals, status: int
) -> None:
    script = f"""
import importlib, os, sys

class Signal:
    def find_spec(self, name, path=None, target=None):
        if name in ("grpc", "pydantic"):
            os.kill(os.getpid(), {int(number)})

sys.meta_path.insert(0, Signal())
importlib.import_module({program!r}).main()
"""
    done = run_python("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


# -- the program


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("arguments", [[], ["--help"], ["--port", "1", "--", "x"]])
def test_the_command_of_a_service_becomes_it(
    service: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program does so before it imports the other commands, which takes half a second. In their list it is the same."""
    monkeypatch.setattr(sys, "argv", ["kvpool", service, *arguments])
    monkeypatch.setitem(sys.modules, "kvpool.cli.app", None)  # an import would fail
    command = became(program)
    assert command == [sys.executable, "-m", SERVICES[service], *arguments]
    assert became(lambda: exit_status([service, *arguments])) == command


async def test_the_help_lists_the_stories_of_the_walkthrough_and_the_version_is_that_of_the_package(run: Run) -> None:
    ran = await run("--help")
    text = " ".join(ran.out.replace("│", "").split())
    assert "walkthrough See the manager's core at work" in text
    assert ", ".join(STORIES) in text
    assert await run("--version") == (0, f"kvpool {installed_version()}\n", "")


def test_the_manager_s_port_is_written_once() -> None:
    """And in client/health.py, which images run without the rest of kvpool."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("cache_service", "worker_service", "client", "common/kvpool/process")
        for path in (ROOT / folder).rglob("*.py")
        if str(DEFAULT_PORT) in Path(path).read_text(encoding="utf-8")
    }
    assert found == {"common/kvpool/process/address.py", "client/health.py"}


# -- what they are told by variables and by a file


def test_every_setting_of_the_file_reaches_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_MANAGER", raising=False)
    path = tmp_path / "kvpool.toml"
    path.write_text('[client]\nmanager = "127.0.0.1:9"\ntimeout = 7.5\nmax_attempts = 3\ncontinuation = false\n')
    monkeypatch.setenv("KVPOOL_CONFIG", str(path))
    config = client_config(None)
    assert (config.manager, config.timeout, config.max_attempts, config.continuation) == ("127.0.0.1:9", 7.5, 3, False)
    assert config.max_model_bytes == 64 << 20
    monkeypatch.setenv("KVPOOL_CLIENT_MAX_MODEL_BYTES", "1000")
    assert client_config(None).max_model_bytes == 1000
    monkeypatch.setenv("KVPOOL_CLIENT_TIMEOUT", "8")
    monkeypatch.setenv("KVPOOL_MANAGER", "127.0.0.1:10")
    config = client_config(None)
    assert (config.manager, config.timeout) == ("127.0.0.1:10", 8.0)
    assert client_config("127.0.0.1:11").manager == "127.0.0.1:11"


def test_what_makes_no_sense_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_CLIENT_MAX_ATTEMPTS", "0")
    with pytest.raises(SettingsProblem, match="KVPOOL_CLIENT_MAX_ATTEMPTS: "):
        client_config(None)
