"""`kvpool top`: rates, the picture, one look without a terminal, and a live view on one."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from kvpool.cli.top import view
from kvpool.cli.top.rates import WINDOW_SECONDS, RateMeter, Rates
from kvpool.cli.top.top import Observer
from kvpool.cli.top.view import Picture, render
from kvpool.client import Client, ClientConfig
from kvpool.client.block_map import BlockMap
from kvpool.v1 import cache_pb2, common_pb2
from tests.cache_service.edge.conftest import channel, running, server, settings, stub
from tests.cache_service.edge.peer import BLOCK_SIZE, Worker, item, key, prompt, registration, tokens
from tests.cli.terminal_user import TerminalUser, at_terminal
from tests.client.commands import kvpool, run_kvpool
from tests.until import until

__all__ = ["channel", "server", "settings", "stub"]

# -- rates


def look(meter: RateMeter, at: float, session: int = 1, **totals: int) -> Rates | None:
    """The rates of a session after a look at its worker's totals."""
    worker = cache_pb2.WorkerDescription(worker_id="w", session=session, totals=cache_pb2.WorkerTotals(**totals))
    meter.add(cache_pb2.DescribeResponse(workers=[worker]), at)
    return meter.rates(session)


def test_rates_are_differences_by_time() -> None:
    meter = RateMeter()
    assert look(meter, 50.0, num_prompt_tokens=100, num_cached_tokens=90, num_generated_tokens=10) is None
    counts = {"num_prompt_tokens": 300, "num_cached_tokens": 140, "num_generated_tokens": 14, "num_evicted_blocks": 6}
    assert look(meter, 52.0, **counts) == Rates(prompt_tokens=100, generated_tokens=2, evicted_blocks=3, hit_rate=0.25)


def test_rates_are_of_the_last_seconds() -> None:
    meter = RateMeter()
    for second in range(20):
        rates = look(meter, float(second), num_prompt_tokens=min(second, 10) * 100)
        if rates is not None and (second <= 10 or second >= 10 + WINDOW_SECONDS):
            assert (rates.prompt_tokens, rates.hit_rate) == ((100, 0) if second <= 10 else (0, None))
    assert rates is not None
    assert len(meter._looks._looks) <= WINDOW_SECONDS + 2


def test_rates_of_rare_looks_are_of_the_last_two() -> None:
    meter = RateMeter()
    rates = [look(meter, 60.0 * number, num_generated_tokens=number**2 * 600) for number in range(4)]
    assert [each and each.generated_tokens for each in rates] == [None, 10, 30, 50]


def test_a_new_session_counts_anew() -> None:
    meter = RateMeter()
    look(meter, 1.0, 1, num_generated_tokens=1000)
    assert look(meter, 2.0, 2, num_generated_tokens=10) is None
    assert meter.rates(1) is None
    rates = look(meter, 3.0, 2, num_generated_tokens=30)
    assert rates is not None
    assert rates.generated_tokens == 20


# -- the picture


def worker_of(name: str, **counts: int) -> cache_pb2.WorkerDescription:
    worker = cache_pb2.WorkerDescription(worker_id=name, lease_remaining_ms=5400)
    worker.counts.add(tier=common_pb2.TIER_DEVICE, **counts)
    return worker


def picture_of(*workers: cache_pb2.WorkerDescription, **fields: Any) -> Picture:
    return Picture("m:1", cache_pb2.DescribeResponse(epoch=7, workers=workers), **fields)


def picture_with(num_requests: int, num_blocks: int = 0) -> Picture:
    requests = worker_of("w")
    requests.num_sequences = num_requests
    for index in range(num_requests):
        requests.sequences.add(key=common_pb2.SequenceKey(sequence_id=f"request-{index}"), num_tokens=10)
    picture = picture_of(worker_of("w", capacity=10, held=10), chosen="w", requests=requests)
    if num_blocks:
        # No two rows of cells alike, or the map would fold them.
        states = (cache_pb2.BLOCK_STATE_FREE, cache_pb2.BLOCK_STATE_CACHED)
        blocks = (cache_pb2.BlockDescription(block_id=block, state=states[block % 2]) for block in range(1, num_blocks))
        picture.block_map = BlockMap("w", 16, num_blocks, tuple(blocks))
    return picture


def drawn(picture: Picture, width: int = 120, height: int | None = None, *, keys: bool = False) -> list[str]:
    console = Console(width=width, height=height or 25)
    with console.capture() as capture:
        console.print(render(picture, width, height, keys=keys))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_each_worker_has_its_state_and_a_bar_of_its_blocks() -> None:
    """One reserved block of a thousand is seen too; what is free, cached or withheld for lack of budget is not in use."""
    workers = [
        worker_of("a", capacity=1000, free=249, cached=250, held=500, reserved=1),
        worker_of("b", capacity=10, free=10),
        worker_of("c", capacity=10, held=10),
        worker_of("d", capacity=100, free=15, held=10, withheld=75),
    ]
    workers[1].draining = True
    workers[2].recovering = True
    lines = drawn(picture_of(*workers))
    assert "manager m:1, epoch 7" in lines[0]
    assert re.search(r"^a +serving +█{12}\+▒{6}·{5} +50% ", lines[2]), lines[2]
    assert re.search(r"^b +leaving +·{24} +0% ", lines[3]), lines[3]
    assert re.search(r"^c +reporting +█{24} +100% ", lines[4]), lines[4]
    assert re.search(r"^d .* 10% ", lines[5]), lines[5]
    assert re.search(r"^all +█+\+▒+·+ +47% ", lines[6]), lines[6]
    assert "5.4 s" in lines[2]


def test_what_does_not_fit_of_a_map_is_left_out_and_counted() -> None:
    owners = [common_pb2.SequenceKey(sequence_id=f"sequence-{index}") for index in range(40)]
    blocks = tuple(
        cache_pb2.BlockDescription(
            block_id=block, state=cache_pb2.BLOCK_STATE_HELD, ref_count=1, sealed=True, owners=[owners[block % 40]]
        )
        for block in range(1, 4000)
    )
    workers = [worker_of(f"w{index}", capacity=3999, held=3999) for index in range(3)]
    picture = picture_of(*workers, chosen="w0", block_map=BlockMap("w0", 16, 4000, blocks))
    for height in (24, 60):
        lines = drawn(picture, 80, height, keys=True)
        assert len(lines) <= height
        for words in ("more rows, from block", "more sequences", "sequence-1:", "q quit"):
            assert words in "\n".join(lines)


@pytest.mark.parametrize("width", [60, 80, 103, 104, 120, 200])
def test_names_and_rates_are_whole_in_every_usual_width(width: int) -> None:
    workers = [worker_of(name, capacity=10, free=5, held=5) for name in ("worker-0", "worker-1")]
    lines = drawn(picture_of(*workers), width)
    assert len(lines) == 5
    assert max(map(len, lines)) <= width
    if width >= 80:
        assert lines[2].startswith("worker-0  serving  ")
        assert "gen/s  hits" in lines[1]
    assert ("lease" in lines[1]) == (width >= 104)


def num_rows(lines: list[str]) -> int:
    return len([line for line in lines if line.startswith("request-")])


@pytest.mark.parametrize(
    ("num_requests", "num_blocks"), [(0, 0), (0, 1000), (1, 17), (5, 0), (5, 1000), (100, 0), (100, 17), (100, 1000)]
)
def test_workers_come_first_then_requests_then_blocks(num_requests: int, num_blocks: int) -> None:
    """Never more lines than there are. Requests leave the map half of what is below the workers, if that is enough for it; what
    it does not need is theirs."""
    picture = picture_with(num_requests, num_blocks)
    for height in (*range(4, 20), 24, 39, 60, 200):
        lines = drawn(picture, 100, height, keys=True)
        assert len(lines) <= height
        assert lines[2].startswith("w ")
        assert "q quit" in lines[-1]
        room = height - 4
        text = "\n".join(lines)
        assert ("requests of w" in text) == (room >= 2)
        has_map = "blocks of 16 tokens" in text
        if room // 2 - 1 >= 6:
            assert has_map == bool(num_blocks)
            assert num_rows(lines) >= min(num_requests, room // 2 - 4)
        if not has_map:
            assert num_rows(lines) == (num_requests if room >= 3 + num_requests else max(0, room - 4))
        if num_rows(lines) < num_requests and room >= 5:
            assert f"… and {num_requests - num_rows(lines)} more" in lines
            assert len(lines) == height
    assert num_rows(lines) == num_requests
    assert has_map == bool(num_blocks)


def test_on_a_low_terminal_requests_put_the_map_out_and_few_of_them_do_not() -> None:
    for num_requests, has_map in ((100, False), (1, True), (0, True)):
        lines = drawn(picture_with(num_requests, 4000), 100, 16, keys=True)
        assert num_rows(lines) == min(num_requests, 8)
        assert ("blocks of 16 tokens" in "\n".join(lines)) == has_map


def test_without_a_terminal_the_first_twenty_requests_are_printed() -> None:
    lines = drawn(picture_with(25, 100))
    assert num_rows(lines) == 20
    assert "… and 5 more" in lines
    assert "w: 100 blocks of 16 tokens" in lines


def test_the_map_of_a_large_pool_is_not_drawn_again_for_each_request_that_comes_or_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes half a second; only one that does not fit any more, or has much more room, is."""
    heights: list[int | None] = []

    def draw(block_map: BlockMap, width: int, height: int | None) -> Text:
        heights.append(height)
        return Text("the map")

    monkeypatch.setattr(view, "render_block_map", draw)
    picture = picture_with(0, 100)
    for num_requests in (2, 3, 4, 5, 4, 3, 2, 5):
        picture.requests = picture_with(num_requests).requests
        assert "the map" in drawn(picture, 100, 40)
    assert len(heights) == 4
    picture.requests = None
    for width, height, num_drawn in ((100, 40, 4), (100, 80, 5), (90, 80, 6)):
        drawn(picture, width, height)
        assert len(heights) == num_drawn
    picture.block_map = picture_with(0, 100).block_map
    drawn(picture, 90, 80)
    assert len(heights) == 7


def test_a_chosen_worker_that_has_gone_is_shown_as_such() -> None:
    picture = picture_of(worker_of("a", capacity=10, free=10), chosen="b")
    assert drawn(picture)[-1] == "b is not there; ↑ ↓ chooses another worker"
    assert "b is not there" in drawn(picture, height=8, keys=True)[-2]
    assert "is not there" not in "\n".join(drawn(picture_of(chosen="b")))


def test_a_manager_that_is_away_is_shown_next_to_its_last_answer() -> None:
    lines = drawn(picture_of(worker_of("a", capacity=10, free=10), away="no answer for 7 s"))
    assert lines[1] == "no answer for 7 s"
    assert "a  " in lines[3]
    assert drawn(Picture("m:1", away="no answer yet: nobody there"))[1:] == ["no answer yet: nobody there"]
    assert "no live worker" in drawn(picture_of())[1]


# -- against a real manager


@pytest.fixture
async def workers(stub: Any) -> tuple[Worker, Worker]:
    """Two: on the first, sequence "a" holds four blocks of which "b" shares two, and it says that three run and two wait."""
    first, second = Worker(stub, registration("first", num_blocks=1025)), Worker(stub, registration("second"))
    for worker in (first, second):
        await worker.register()
    await first.allocate(item("a", prompt(3 * BLOCK_SIZE + 1)))
    await first.append(
        cache_pb2.SequenceUpdate(key=key("a"), start=3 * BLOCK_SIZE + 1, num_computed_tokens=3 * BLOCK_SIZE)
    )
    await first.allocate(item("b", prompt(2 * BLOCK_SIZE + 1)))
    await stub.KeepAlive(
        cache_pb2.KeepAliveRequest(
            session=first.session,
            session_key=first.session_key,
            load=common_pb2.WorkerLoad(num_running=3, num_waiting=2),
        )
    )
    return first, second


@pytest.fixture
def manager(server: ManagerServer) -> str:
    return f"127.0.0.1:{server.port}"


def row(output: str, name: str) -> list[str]:
    """The cells of a worker's line."""
    (line,) = (line for line in output.splitlines() if line.startswith(f"{name} "))
    return line.split()


async def test_once_shows_workers_with_their_rates_and_the_requests_and_blocks_of_the_chosen_one(
    server: ManagerServer, manager: str, workers: tuple[Worker, Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the two looks at the first worker "a" has 400 tokens more, and "b" none; names do nothing."""
    first, second = workers
    name = "\x1b[2J[red]c"
    await second.allocate(item("b", prompt(2 * BLOCK_SIZE + 1), attempt=2), item(name, prompt(2, first=100)))
    looking = asyncio.create_task(
        kvpool("top", "--once", "--worker", "first", "--interval", "0.5", "--manager", manager)
    )
    # At the workers, and at the requests of one.
    await until(lambda: server._servicer.counts.calls["Describe", "OK"] >= 2 or looking.done())
    await first.append(cache_pb2.SequenceUpdate(key=key("a"), start=3 * BLOCK_SIZE + 1, tokens=tokens(*range(400))))
    assert await looking == 0
    output = capsys.readouterr().out
    assert "3 requests running, 2 waiting" in output
    worker, state, _, used, run, wait, prompt_rate, generated_rate, hits, evictions, *lease = row(output, "first")
    assert (worker, state, used, run, wait, prompt_rate, hits, evictions) == (
        "first", "serving", "0%", "3", "2", "0", "–", "0",
    )  # fmt: skip
    assert 0 < int(generated_rate.replace(",", "")) <= 800
    assert float(lease[0]) > 500
    assert row(output, "second")[4:6] == ["0", "0"]

    assert "requests of first: 2 hold blocks, the oldest first; 2 wait for a turn" in output
    (_, state, known, computed, cached, rate, blocks, attempt, round_) = row(output, "a")
    assert (state, known, computed, cached, blocks, attempt, round_) == ("prefilling", "413", "3%", "0", "4", "1", "0")
    assert 0 < int(rate.replace(",", "")) <= 800
    assert row(output, "b") == ["b", "fenced", "9", "89%", "8", "0", "3", "1", "0"]

    assert "first: 1,025 blocks of 4 tokens" in output
    assert "A a: 4 blocks" in output
    assert "B b: 3 blocks" in output
    assert "0 ∅22" in output  # two blocks that both have, after the null block

    assert await kvpool("top", "--once", "--interval", "0.1", "--worker", "second", "--manager", manager) == 0
    output = capsys.readouterr().out
    assert "requests of second: 2 hold blocks, the oldest first\n" in output
    assert row(output, "b") == ["b", "prefilling", "9", "0%", "0", "0", "3", "2", "0"]
    assert row(output, r"\x1b[2J[red]c") == [r"\x1b[2J[red]c", "decoding", "2", "0%", "0", "0", "1", "1", "0"]
    assert "\x1b" not in output


async def test_an_observer_counts_requests_anew_when_another_look_begins(
    manager: str, workers: tuple[Worker, Worker]
) -> None:
    """With every choice: what would be compared may be far apart, or a moment."""
    first, second = workers
    await second.allocate(item("c", prompt(9)))
    config = ClientConfig(manager=manager)
    async with Client(config=config) as client:
        observer = Observer(client, config.manager, None)
        picture = observer.picture
        await observer.look_at_requests()
        assert picture.requests is None  # nobody is chosen yet
        await observer.look(30.0)
        assert observer.wants_requests.is_set()

        async def rates() -> dict[str, float | None]:
            await observer.look_at_requests()
            assert picture.requests is not None
            assert picture.requests.worker_id == picture.chosen
            return {name[1]: rate for name, rate in picture.request_rates.items()}

        assert await rates() == {"a": None, "b": None}
        await first.append(cache_pb2.SequenceUpdate(key=key("a"), start=3 * BLOCK_SIZE + 1, tokens=tokens(1, 2)))
        found = await rates()
        assert (found.pop("a") or 0) > 0
        assert found == {"b": 0}
        observer.toggle_map()
        assert (await rates())["b"] == 0
        observer.choose(1)
        assert picture.requests is None
        assert await rates() == {"c": None}
        observer.choose(1)
        assert await rates() == {"a": None, "b": None}
        observer.toggle_requests()
        await observer.look_at_requests()
        assert picture.requests is None
        observer.toggle_requests()
        assert await rates() == {"a": None, "b": None}
        # A key that is pressed while the answer is on its way: it is for nobody any more.
        looking = asyncio.create_task(observer.look_at_requests())
        await asyncio.sleep(0)
        observer.choose(1)
        await looking
        assert picture.requests is None
        # A worker that leaves takes its requests along.
        assert await rates() == {"c": None}
        await second.deregister()
        await observer.look_at_requests()
        assert picture.requests is None
        await observer.look(30.0)
        assert picture.misses_chosen
        observer.choose(1)
        assert await rates() == {"a": None, "b": None}


async def test_without_a_terminal_it_looks_once(manager: str, workers: tuple[Worker, Worker]) -> None:
    """So that `kvpool top | head` and cron do what is meant. The requests are those of the first worker."""
    done = await run_kvpool("top", "--interval", "0.1", "--manager", manager)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert row(done.stdout, "second")[1] == "serving"
    assert "requests of first: 2 hold blocks" in done.stdout


async def test_once_names_a_worker_that_is_not_there(
    manager: str, workers: tuple[Worker, Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    assert await kvpool("top", "--once", "--worker", "third", "--manager", manager) == 1
    assert "no live worker 'third'" in capsys.readouterr().err


# -- on a terminal


def top_at_terminal(manager: str) -> AbstractContextManager[TerminalUser]:
    code = f'from kvpool.cli.app import main; main(["top", "--interval", "0.1", "--manager", "{manager}"])'
    return at_terminal("-c", code)


def see(user: TerminalUser, is_there: Callable[[str], bool]) -> str:
    """Read until the last picture is as wanted, and all of it has come."""
    return user.see(lambda screen: "q quit" in screen and is_there(screen))


async def test_keys_choose_the_worker_and_the_terminal_is_left_as_it_was(
    manager: str, workers: tuple[Worker, Worker]
) -> None:
    def use() -> None:
        with top_at_terminal(manager) as user:
            before = user.settings()
            screen = see(user, lambda screen: "first: 1,025 blocks" in screen)
            assert "A a: 4 blocks" in screen
            user.press(b"\x1b[B")
            see(user, lambda screen: "second: 17 blocks" in screen)
            user.press(b"k")
            see(user, lambda screen: "first: 1,025 blocks" in screen)
            user.press(b"b")
            see(user, lambda screen: "blocks of" not in screen and "second" in screen)
            screen = see(user, lambda screen: "requests of first: 2 hold blocks" in screen)
            assert re.search(r"^a +decoding +13 +92% ", screen, re.MULTILINE), screen
            user.press(b"r")
            see(user, lambda screen: "requests of" not in screen and "second" in screen)
            user.press(b"jr")
            see(user, lambda screen: "requests of second: none holds blocks" in screen)
            user.press(b"k")
            see(user, lambda screen: "requests of first: 2 hold blocks" in screen)
            user.press(b"\x1b[C?")  # means nothing
            user.press(b"q")
            assert user.end() == 0
            assert user.settings() == before
            assert user.output.rstrip().endswith(b"\x1b[?25h\x1b[?1049l")

    await asyncio.to_thread(use)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
async def test_the_terminal_is_left_as_it_was_whatever_ends_it(
    manager: str, workers: tuple[Worker, Worker], number: signal.Signals, status: int
) -> None:
    def use() -> None:
        with top_at_terminal(manager) as user:
            before = user.settings()
            see(user, lambda screen: "first: 1,025 blocks" in screen)
            if number == signal.SIGINT:
                user.press(b"\x03")
            else:
                user.process.send_signal(number)
            assert user.end() == status
            assert user.settings() == before
            assert b"\x1b[?25h\x1b[?1049l" in user.output
            assert b"Traceback" not in user.output

    await asyncio.to_thread(use)


async def test_it_waits_for_a_manager_and_says_when_it_is_away(settings: ManagerSettings) -> None:
    async with running(settings) as first:
        settings = settings.model_copy(update={"port": first.port})
    with top_at_terminal(f"127.0.0.1:{settings.port}") as user:
        await asyncio.to_thread(see, user, lambda screen: "no answer yet" in screen)
        async with running(settings):
            await asyncio.to_thread(see, user, lambda screen: "no live worker" in screen)
        await asyncio.to_thread(see, user, lambda screen: "no answer for" in screen)
        async with running(settings):
            await asyncio.to_thread(see, user, lambda screen: "no live worker" in screen and "no answer" not in screen)
        user.press(b"q")
        assert user.end() == 0
