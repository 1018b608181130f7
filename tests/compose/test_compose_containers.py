"""The containers, started in order, confined, small, reachable from this machine only; then what the cluster in them does.

The tests run in this order on one cluster; each leaves it whole.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvpool.client import Client, Completion, FinishReason, KvpoolError
from kvpool.client.health import ask_health
from kvpool.v1 import cache_pb2
from kvpool.worker_service.native.cpu import cpu_info
from tests.compose.containers import MANAGER, NETWORK, SERVICES, WORKERS, Containers, Ended, address, container
from tests.compose.project import NAME, TAG, leftovers
from tests.scrape import Scrape
from tests.until import eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(1200),
]

MAX_MANAGER_IMAGE_BYTES = 250_000_000
WRITABLE = {MANAGER: "/var/lib/kvpool", "worker-0": "/var/cache/kvpool", "worker-1": "/var/cache/kvpool"}
COMPILERS = ("zig", "cc", "gcc", "g++", "c++", "clang", "ld", "make", "nvcc", "rustc", "tcc")


async def test_workers_start_when_the_manager_is_healthy(containers: Containers) -> None:
    """By the engine's own record of what happened when."""
    filters = ["--filter", f"label=com.docker.compose.project={NAME}", "--filter", "type=container"]
    lines = await containers.docker(
        "events", "--since", "30m", "--until", f"{time.time():.3f}", *filters, "--format", "{{json .}}"
    )
    # An engine that was stopped in an earlier run begins by starting that run's containers again.
    ours = {(await containers.inspect(service))["Id"] for service in (MANAGER, *WORKERS)}
    events = [event for event in map(json.loads, lines.splitlines()) if event["Actor"]["ID"] in ours]

    def first(service: str, action: str) -> int:
        return min(
            int(event["timeNano"])
            for event in events
            if event["Action"] == action and event["Actor"]["Attributes"]["com.docker.compose.service"] == service
        )

    for worker in WORKERS:
        assert first(MANAGER, "start") < first(MANAGER, "health_status: healthy") < first(worker, "start")


async def test_the_managers_image_is_small(containers: Containers) -> None:
    size = int(await containers.docker("image", "inspect", f"kvpool-manager:{TAG}", "--format", "{{.Size}}"))
    print(f"kvpool-manager: {size / 1e6:.1f} MB")
    assert size < MAX_MANAGER_IMAGE_BYTES


async def test_the_managers_image_has_no_torch(containers: Containers) -> None:
    """The worker's has, or the question would prove nothing."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    assert (await containers.inside(MANAGER, "python", "-c", program)).status == 0
    assert (await containers.inside("worker-0", "python", "-c", program)).status == 1
    # Nor anywhere outside of Python's path. Our own worker's code, which would use it, comes with the package.
    for name in ("torch", "torch-*", "libtorch*", "libc10*"):
        assert "torch" not in (await containers.inside(MANAGER, "find", "/", "-xdev", "-iname", name)).output
    assert "libtorch" in (await containers.inside("worker-0", "find", "/opt", "-iname", "libtorch*")).output


@pytest.mark.parametrize("service", SERVICES)
async def test_no_image_has_a_compiler(service: str, containers: Containers) -> None:
    """By name on the path, and by what a compiler brings along, wherever it is."""
    for compiler in COMPILERS:
        assert (await containers.inside(service, "sh", "-c", f"command -v {compiler}")).status != 0, compiler
    found = await containers.inside(
        service, "find", "/usr", "/opt", "-name", "cc1*", "-o", "-name", "crtbegin.o", "-o", "-name", "ziglang*"
    )
    assert found == (0, "")


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_worker_runs_the_step_that_its_image_carries(worker: str, containers: Containers) -> None:
    """It cannot compile one. What it computes is compared with transformers in test_compose_service.py."""
    if not cpu_info.flags() & {"avx2", "asimd"}:
        pytest.skip("the image carries steps for x86-64 with AVX2 and for aarch64; this CPU is another")
    (runtime,) = set(re.findall(r"runtime: (.*?)[;)]", await containers.log(worker)))
    assert re.fullmatch(r"native \([\w-]+, float32, built for [\w+-]+, 1 threads", runtime), runtime


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_is_an_ordinary_user_without_privileges(service: str, containers: Containers) -> None:
    assert (await containers.inside(service, "id", "-u")).output.strip() == "10001"
    status = (await containers.inside(service, "cat", "/proc/1/status")).output
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert {name: int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {
        "CapEff": 0,
        "CapPrm": 0,
        "CapBnd": 0,
    }
    assert fields["NoNewPrivs"] == "1"


@pytest.mark.parametrize("service", SERVICES)
async def test_only_the_volumes_can_be_written(service: str, containers: Containers) -> None:
    for folder in ("/", "/etc", "/opt/venv", "/usr/local", "/var/lib", "/var/cache"):
        refused = await containers.inside(service, "touch", f"{folder}/probe")
        assert refused.status != 0, folder
        # Also root could not: it is not only a question of whose the folders are.
        by_root = await containers.try_(
            "docker", "exec", "--user", "0", f"{NAME}-{service}-1", "touch", f"{folder}/probe"
        )
        assert "Read-only file system" in by_root.output, folder
    for folder in (WRITABLE[service], "/tmp"):
        assert await containers.inside(service, "sh", "-c", f"touch {folder}/probe && rm {folder}/probe") == (0, "")


@pytest.mark.parametrize("service", SERVICES)
async def test_ports_are_open_on_loopback_only(service: str, containers: Containers) -> None:
    ports = (await containers.inspect(service))["NetworkSettings"]["Ports"]
    bindings = [
        f"{binding['HostIp']}:{binding['HostPort']}" for published in ports.values() for binding in published or ()
    ]
    assert bindings == [address(service)]


async def test_metrics_are_told_inside_the_network(containers: Containers) -> None:
    """To whoever asks from another container, as a Prometheus there would."""
    for service in SERVICES:
        url = f"http://{service}:9500/metrics"
        code = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=30).read().decode())"
        ended = await containers.inside("worker-0", "python", "-c", code)
        assert ended.status == 0, ended.output
        name = "kvpool_manager_epoch" if service == MANAGER else "kvpool_worker_session_open"
        assert Scrape(ended.output).value(name) >= 1


# -- it generates, shares prefixes, shows its blocks, and outlives what happens to it


QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
"""What transformers' generate says in float32; tests/cluster/test_smollm2_cluster.py compares it token by token."""
BLOCK_SIZE = 16
SYSTEM = (
    "Office {number} of the harbour. Every ship that enters is written down with its name, its flag, its cargo and the hour of "
    "its arrival; whoever asks is told so much and no more, politely, in one sentence, and never anything that is not in the book."
)


async def kvpool(containers: Containers, *arguments: str) -> Ended:
    """The command line of this checkout, outside the containers."""
    return await containers.try_(
        sys.executable, "-m", "kvpool.cli", arguments[0], "--manager", address(MANAGER), *arguments[1:]
    )


async def answers(containers: Containers) -> str:
    """The cluster answers a new request as it should; returns which worker did."""
    async with containers.client() as client:
        answer = await client.chat([{"role": "user", "content": QUESTION}], max_tokens=32).collect()
    assert (answer.text, answer.finish_reason) == (ANSWER, FinishReason.STOP)
    return answer.worker_id


async def prompts_for(client: Client, worker: str, count: int) -> list[str]:
    """New prompts that Route would give to this worker: where nothing is cached, the first block decides."""
    model = await client.model()
    found: list[str] = []
    while len(found) < count:
        prompt = (
            f"Ship number {secrets.randbits(64)} came in on a quiet morning, and the harbour master wrote down that"
        )
        if (await client.route(model.encode_prompt(prompt))).workers[0].worker_id == worker:
            found.append(prompt)
    return found


@asynccontextmanager
async def streams_on_both(client: Client, max_tokens: int) -> AsyncIterator[list[asyncio.Task[Completion]]]:
    """Streams that run on both workers when the context begins."""
    prompts = [prompt for worker in WORKERS for prompt in await prompts_for(client, worker, 3)]
    tasks = [
        asyncio.create_task(client.generate(prompt, max_tokens=max_tokens, ignore_eos=True).collect())
        for prompt in prompts
    ]

    async def running_on_both() -> bool:
        workers = (await client.describe()).workers
        return sum(any(counts.held for counts in worker.counts) for worker in workers) == len(WORKERS)

    try:
        await eventually(running_on_both, "streams run on both workers", 60)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def whole(ended: list[Completion | BaseException], max_tokens: int) -> Counter[str]:
    """How many streams each worker brought to their end; the others ended with an error that says so."""
    for one in ended:
        if isinstance(one, BaseException):
            assert isinstance(one, KvpoolError), repr(one)
        else:
            assert len(one.token_ids) == max_tokens
    return Counter(one.worker_id for one in ended if isinstance(one, Completion))


async def test_the_model_says_what_it_should(containers: Containers) -> None:
    await answers(containers)


async def test_both_workers_say_the_same_cold_and_cached(containers: Containers) -> None:
    """Greedy, token by token; from the cache it is no different."""
    prompt = SYSTEM.format(number=0) + " The first ship of the year was"
    first, second = [await containers.tokens_from(worker, prompt, 24) for worker in WORKERS]
    assert len(first) == 24
    assert first == second
    for _ in range(2):
        answer = await containers.complete(prompt, max_tokens=24, ignore_eos=True)
        assert list(answer.token_ids) == first
    assert answer.num_cached_tokens >= BLOCK_SIZE


async def test_prefixes_are_shared_and_found_on_the_worker_that_has_them(containers: Containers) -> None:
    """Several prefixes spread over both workers; what begins with one of them goes where it is, and is not computed again."""
    async with containers.client() as client:
        model = await client.model()
        homes = {}
        for number in range(1, 9):
            beginning = SYSTEM.format(number=number)
            first = await client.generate(f"{beginning} Who came on Monday?", max_tokens=2).collect()
            assert first.num_cached_tokens < BLOCK_SIZE * 2
            homes[number] = first.worker_id
        assert set(homes.values()) == set(WORKERS)
        for number, home in homes.items():
            prompt = f"{SYSTEM.format(number=number)} Which ship left on Friday?"
            await containers.until_idle()
            best = (await client.route(model.encode_prompt(prompt))).workers[0]
            second = await client.generate(prompt, max_tokens=2).collect()
            shared = len(model.encode_prompt(SYSTEM.format(number=number))) // BLOCK_SIZE * BLOCK_SIZE
            assert best.worker_id == second.worker_id == home
            assert shared - BLOCK_SIZE <= best.num_cached_tokens == second.num_cached_tokens
            assert second.num_cached_tokens >= BLOCK_SIZE * 2


async def test_the_block_map_shows_what_is_cached(containers: Containers) -> None:
    """Block by block it adds up to the counts, and the command line draws it."""
    await containers.until_clean()
    async with containers.client() as client:
        for worker in WORKERS:
            (found,) = (await client.describe(worker_id=worker, first_block=0, max_blocks=4096)).workers
            states = Counter(block.state for block in found.blocks)
            (counts,) = found.counts
            assert states[cache_pb2.BLOCK_STATE_CACHED] == counts.cached > 0
            assert states[cache_pb2.BLOCK_STATE_FREE] == counts.free > 0
            assert all(block.block_hash for block in found.blocks if block.state == cache_pb2.BLOCK_STATE_CACHED)
    drawn = await kvpool(containers, "blocks")
    assert drawn.status == 0
    assert all(worker in drawn.output for worker in WORKERS)


async def test_the_command_line_works_outside_and_as_a_container(containers: Containers) -> None:
    for ended in (
        await kvpool(containers, "check"),
        Ended(0, await containers.compose("run", "--rm", "client", "check")),
    ):
        assert ended.status == 0
        assert "every law holds" in ended.output
    assert (await kvpool(containers, "status", "--json")).status == 0
    generated = await containers.compose(
        "run", "--rm", "client", "generate", "Once upon a time", "--max-tokens", "4", "--json"
    )
    (line,) = [line for line in generated.splitlines() if line.startswith("{")]
    assert json.loads(line)["worker_id"] in WORKERS
    for service in SERVICES:
        assert (await containers.try_(sys.executable, "-m", "kvpool.cli", "health", address(service))).status == 0


async def test_the_gateway_answers_over_http_without_torch(containers: Containers) -> None:
    """On the machine's loopback, and it reaches the workers at the machine's ports."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    assert (await containers.inside("gateway", "python", "-c", program)).status == 0
    async with httpx.AsyncClient(base_url=f"http://{address('gateway')}", timeout=60) as client:
        assert (await client.get("/health")).json() == {"status": "ok", "workers": 2}
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = await client.post("/v1/chat/completions", json={"messages": question, "temperature": 0})
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        assert "kvpool" in (await client.get("/")).text


async def test_a_worker_that_is_stopped_lets_its_streams_end(containers: Containers) -> None:
    """docker compose stop: what runs on it may end first, new requests are served by the other, and it comes back."""
    stopped, other = WORKERS
    async with containers.client() as client:
        async with streams_on_both(client, 40) as tasks:
            stopping = asyncio.create_task(containers.compose("stop", stopped))
            await eventually(lambda: refuses(stopped), f"{stopped} says that it stops", 30)
            assert await answers(containers) == other
            ended = whole(await asyncio.gather(*tasks, return_exceptions=True), 40)
            await stopping
        assert sum(ended.values()) == len(tasks), f"streams were cut off: {ended}"
        assert ended[stopped] > 0
    state = (await containers.inspect(stopped))["State"]
    assert (state["Status"], state["ExitCode"], state["OOMKilled"]) == ("exited", 0, False)
    assert await answers(containers) == other
    await containers.compose("start", stopped)
    await containers.until_serving(*SERVICES)
    assert await served_by_all(containers)
    await containers.until_clean()


async def test_a_manager_that_is_killed_begins_a_new_epoch(containers: Containers) -> None:
    """SIGKILL in the middle of streams. Its state is in a volume, so what it stamped before is never stamped again."""
    before = (await containers.describe()).epoch
    async with containers.client() as client, streams_on_both(client, 200) as tasks:
        await containers.compose("kill", MANAGER)
        assert (await containers.inspect(MANAGER))["State"]["ExitCode"] == 137
        await containers.compose("start", MANAGER)
        whole(await asyncio.gather(*tasks, return_exceptions=True), 200)
    await containers.until_serving(*SERVICES)
    epochs = await containers.epochs()
    assert epochs[-1] > before, epochs
    assert await served_by_all(containers)
    await containers.until_clean()


async def test_a_worker_that_crashes_comes_back_by_itself(containers: Containers) -> None:
    """Its process ends with an error inside the container, and the engine starts the container again."""
    crashed, other = WORKERS[1], WORKERS[0]
    async with containers.client() as client, streams_on_both(client, 200) as tasks:
        killed = await containers.inside(crashed, "python", "-c", KILL_THE_WORKER)
        assert killed.status == 0, killed.output
        whole(await asyncio.gather(*tasks, return_exceptions=True), 200)
        assert await answers(containers) in WORKERS

    async def restarted() -> bool:
        return int((await containers.inspect(crashed))["RestartCount"]) > 0

    await eventually(restarted, f"the engine starts {crashed} again", 60)
    await containers.until_serving(*SERVICES)
    assert await served_by_all(containers)
    assert (await containers.inspect(other))["RestartCount"] == 0
    await containers.until_clean()


async def test_a_worker_without_a_network_is_missed_and_comes_back(containers: Containers) -> None:
    """Its streams do not hang, the other serves, and once connected again it registers and serves."""
    lost, other = WORKERS
    async with containers.client() as client, streams_on_both(client, 200) as tasks:
        await containers.docker("network", "disconnect", NETWORK, container(lost))
        assert await answers(containers) == other
        ended = whole(await asyncio.gather(*tasks, return_exceptions=True), 200)
        assert ended[lost] == 0
        assert ended[other] > 0
    await containers.until_gone(lost)
    assert await answers(containers) == other
    # Compose had given it its service's name, which other containers know it by.
    await containers.docker("network", "connect", "--alias", lost, NETWORK, container(lost))
    await containers.until_serving(*SERVICES)
    assert await served_by_all(containers)
    assert (await containers.inspect(lost))["RestartCount"] == 0


async def test_check_is_clean_at_the_end(containers: Containers) -> None:
    await containers.until_clean()
    ended = await kvpool(containers, "check")
    assert ended.status == 0, ended.output
    assert "every law holds" in ended.output


async def test_down_ends_everything_with_status_0_and_leaves_nothing(containers: Containers) -> None:
    await containers.compose("stop")
    for service in SERVICES:
        state = (await containers.inspect(service))["State"]
        assert (state["Status"], state["ExitCode"]) == ("exited", 0), service
        assert "stopped" in (await containers.log(service, 5))
    await containers.compose("--profile", "client", "down", "--volumes")
    assert leftovers("container", "volume", "network") == []


KILL_THE_WORKER = """
import os, signal
from pathlib import Path
for process in Path("/proc").iterdir():
    if process.name.isdecimal() and b"kvpool.worker_service" in (process / "cmdline").read_bytes().split(b"\\0")[:4]:
        if process.name != "1":
            os.kill(int(process.name), signal.SIGKILL)
            break
else:
    raise SystemExit("no worker here")
"""


async def refuses(service: str) -> bool:
    """Whether a service no longer says that it serves."""
    return not (await asyncio.to_thread(ask_health, address(service))).serving


async def served_by_all(containers: Containers) -> bool:
    """Each worker, asked itself, still says what the other says."""
    one, two = [await containers.tokens_from(worker, QUESTION, 8) for worker in WORKERS]
    assert one == two
    return len(one) == 8
