"""kvpool from start to answers: `make demo`.

One cache manager and two CPU workers with SmolLM2-135M-Instruct. Two help desks, each with a long system prompt, answer
several visitors. Watch three things: the manager sends all visitors of one desk to the worker that already holds the desk's
prompt; that prompt is computed once and its blocks are shared while several visitors are answered at once; and the first
token comes much sooner for everybody but the first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvpool.cli.commands.block_map import render_block_map
from kvpool.cli.launch.children import Children
from kvpool.cli.launch.cluster import MANAGER_NAME, Cluster, ClusterFailed, ClusterSpec, free_port
from kvpool.cli.terminal import stdout_console
from kvpool.client import Client, Completion, KvpoolError
from kvpool.client.block_map import BlockMap, fetch_block_map

MAX_TOKENS = 40
WORKER_ARGUMENTS = ("--model", "smollm2", "--device", "cpu", "--num-blocks", "512", "--max-model-len", "2048")

MUSEUM = """You are the help desk of the Harbour Museum. You answer visitors in one or two short, friendly sentences, and only \
from what is written here. If the answer is not written here, say that you do not know and point to the front desk.

Opening hours: the museum is open from Tuesday to Sunday, from ten in the morning until six in the evening. On Thursdays it \
stays open until nine. It is closed on Mondays, on the first of January and on the twenty-fifth of December. The last entry is \
forty-five minutes before closing time.

Tickets: adults pay twelve euros, students and pensioners pay eight euros, children under fourteen enter free of charge. A \
family ticket for two adults and up to four children costs twenty euros. On the first Sunday of every month the entry is free \
for everybody. Tickets are sold at the front desk and in the harbour office across the square; cards and cash are accepted.

The halls: the ground floor shows ships under sail, with a full-size pilot cutter from 1887 that visitors may board. The first \
floor shows steam and iron, with the engine of the tugboat Hercules, which runs every day at three in the afternoon. The second \
floor shows life on board, with a galley, a sick bay and the cabin of a first officer. The tower holds the lamp of the old \
lighthouse and has a view over the whole harbour; it is reached by one hundred and thirty-two steps and has no lift.

Guided tours start at eleven and at two at the pilot cutter, take fifty minutes and cost three euros. Tours for school classes \
must be booked a week ahead. The audio guide speaks nine languages and is free.

Practical things: bags larger than a sheet of writing paper go into the lockers in the basement, which take a one-euro coin. \
Photography without flash is allowed everywhere. Dogs are welcome on the ground floor if they are on a lead. The cafe on the \
quay serves soup, cake and coffee until half past five. Wheelchairs can be borrowed at the front desk, and all floors except \
the tower can be reached by lift. Lost things are kept in the harbour office for three months."""

GARDEN = """You are the adviser of the Green Thumb garden club. You answer members in one or two short, plain sentences, and \
only from the notes below. If the notes do not say it, say so and suggest the next meeting.

Tomatoes: sow them indoors in the middle of March, in small pots on a bright window sill. Plant them outside in the middle of \
May, when the last night frosts are over, sixty centimetres apart, in full sun and sheltered from rain. Water the soil and \
never the leaves, every morning in dry weather. Break off the side shoots once a week. Harvest from July until the first cold \
nights of October.

Potatoes: put seed potatoes into egg boxes in March so that they sprout. Plant them ten centimetres deep in April, in rows \
seventy centimetres apart. Pile soil around the stems when they are as high as a hand. Early kinds are ready when they flower, \
late kinds when the leaves have turned yellow. Keep the harvest dark and cool, or it turns green and must not be eaten.

Beans: sow runner beans outside from the tenth of May on, six seeds around each pole, three centimetres deep. They need warm \
soil and a pole of two metres. Pick them every second day, because plants with old pods stop flowering. Never eat them raw.

Roses: plant bare roots in October or November, so deep that the graft is five centimetres under the soil. Prune them in spring \
when the forsythia is in flower, and cut above a bud that points outwards. Against greenfly, spray water with a little soft \
soap on three days in a row. Feed them in April and once more after the first flowers in June, and never after July.

Lawn: mow it once a week from April to October and never shorter than four centimetres. Let dry grass grow longer. Sow bare \
patches in September, keep them moist for three weeks and do not walk on them.

Compost: mix kitchen scraps with dry leaves, one part to one part, and turn the heap every six weeks. No meat, no cooked food \
and no sick plants. It is ready after nine months, when it is dark, loose and smells of a forest floor.

The club meets on the second Wednesday of each month at seven in the evening, in the barn behind the church."""


@dataclass
class Chat:
    """One visitor at one desk."""

    desk: str
    system: str
    question: str
    worker_id: str = "…"
    text: str = ""
    completion: Completion | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)


CHATS = {
    "museum": (
        MUSEUM,
        [
            "When is the museum open?",
            "When do guided tours start?",
            "How long are lost things kept?",
            "What does the cafe serve?",
        ],
    ),
    "garden": (
        GARDEN,
        [
            "When do I sow tomatoes?",
            "When does the club meet?",
            "When are tomatoes harvested?",
            "What goes into the compost?",
        ],
    ),
}


class Screen:
    """Shows finished answers, and running ones as they grow below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._running: list[Chat] = []
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=12, transient=True)

    def __enter__(self) -> Screen:
        # A pipe cannot be redrawn, so it gets finished answers only.
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def add(self, chat: Chat) -> None:
        """Show the chat's text as it grows."""
        self._running.append(chat)

    def finish(self, chat: Chat) -> None:
        """The answer is complete."""
        self._running.remove(chat)
        if self._live.is_started:
            self._live.refresh()
        self._console.print(_answer(chat))

    def drop(self, chats: Iterable[Chat]) -> None:
        """Remove chats that will not finish."""
        self._running = [chat for chat in self._running if chat not in chats]

    def _render(self) -> Group:
        return Group(*(_answer(chat) for chat in self._running))


def _answer(chat: Chat) -> Text:
    head = Text.assemble((f"{chat.desk:<7}", "cyan"), (f"{chat.worker_id:<9}", "magenta"), (chat.question, "bold"))
    return Text.assemble(head, "\n  ", (" ".join(chat.text.split()) or "…", ""))


async def answer(client: Client, chat: Chat, screen: Screen) -> None:
    """One chat, streamed."""
    messages = [{"role": "system", "content": chat.system}, {"role": "user", "content": chat.question}]
    screen.add(chat)
    async with client.chat(messages, max_tokens=MAX_TOKENS) as stream:
        async for chunk in stream:
            chat.text += chunk.text
            chat.worker_id = chunk.worker_id
            if chunk.token_ids:
                chat.started.set()
        chat.completion = await stream.collect()
    chat.started.set()
    screen.finish(chat)


async def run_desk(client: Client, chats: Sequence[Chat], screen: Screen) -> None:
    """The first visitor comes alone, so that the system prompt is computed once; the others come together and share it."""
    await answer(client, chats[0], screen)
    async with asyncio.TaskGroup() as group:
        for chat in chats[1:]:
            group.create_task(answer(client, chat, screen))


async def watch_sharing(client: Client, workers: Sequence[str], chats: Sequence[Chat]) -> list[BlockMap]:
    """The block maps while many visitors are being answered."""
    await asyncio.gather(*(chat.started.wait() for chat in chats))
    return [await fetch_block_map(client, worker_id) for worker_id in workers]


async def run_chats(client: Client, workers: Sequence[str], console: Console) -> tuple[list[Chat], list[BlockMap]]:
    """All visitors of both desks."""
    desks = [[Chat(desk, system, question) for question in questions] for desk, (system, questions) in CHATS.items()]
    chats = [chat for desk in desks for chat in desk]
    with Screen(console) as screen:
        try:
            async with asyncio.TaskGroup() as group:
                maps = group.create_task(watch_sharing(client, workers, chats))
                for index, desk in enumerate(desks):
                    group.create_task(run_desk(client, desk, screen))
                    # The next desk opens when this one is busy, so that the manager prefers the other worker.
                    if index + 1 < len(desks):
                        await desk[0].started.wait()
        finally:
            screen.drop(chats)
        return chats, maps.result()


def print_table(chats: Sequence[Chat], console: Console) -> None:
    """The worker of each visitor, and the cached tokens of the prompt."""
    table = Table(
        box=None, pad_edge=False, title="who was served how (prompt and cached in tokens)", title_justify="left"
    )
    for column in ("desk", "question", "worker"):
        table.add_column(column)
    for column in ("prompt", "cached", "first token"):
        table.add_column(column, justify="right")
    num_prompt = num_cached = 0
    for chat in chats:
        completion = chat.completion
        assert completion is not None
        num_prompt += completion.num_prompt_tokens
        num_cached += completion.num_cached_tokens
        table.add_row(
            chat.desk,
            escape(chat.question),
            completion.worker_id,
            str(completion.num_prompt_tokens),
            str(completion.num_cached_tokens),
            f"{completion.time_to_first_token_ms:,.0f} ms",
        )
    console.print()
    console.print(table)
    console.print(
        f"{num_cached:,} of {num_prompt:,} prompt tokens ({num_cached / num_prompt:.0%}) were served from the cache."
    )


async def demo(console: Console) -> int:
    """Run the demo, with all its processes; returns the exit status."""
    log: deque[str] = deque(maxlen=40)
    exit_status = 0
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as state_dir:
        spec = ClusterSpec(
            num_workers=2,
            port=free_port(),
            state_dir=Path(state_dir),
            worker_arguments=WORKER_ARGUMENTS,
        )
        async with Children(
            lambda name, line: log.append(f"{name:<9}| {Text.from_ansi(line).plain}"), last=MANAGER_NAME
        ) as children:
            try:
                await run_demo(children, spec, log, console)
            except* KvpoolError as errors:
                console.print("\n".join(log), style="dim", markup=False, highlight=False)
                for error in errors.exceptions:
                    console.print(f"the demo failed: {error}", style="red", markup=False)
                exit_status = 1
            finally:
                console.print("stopping the manager and both workers")
    return exit_status


async def run_demo(children: Children, spec: ClusterSpec, log: Sequence[str], console: Console) -> None:
    """Start, chat, show. KvpoolError if a service fails."""
    started = time.monotonic()
    starting = "starting one manager and two workers"
    if not console.is_terminal:
        console.print(starting)
    with console.status(starting) as status:

        def show(progress: str) -> None:
            last = log[-1] if log else ""
            status.update(escape(f"{progress} ({time.monotonic() - started:.0f} s)\n  {last}"))

        workers = await Cluster(spec, children).start(show)
    console.print(
        f"one manager ({spec.address}) and {len(workers)} workers are ready after {time.monotonic() - started:.0f} s;\n"
        "now two desks answer their visitors, with a model of 135 million parameters: expect its speed, not its wisdom\n"
    )
    failure = asyncio.create_task(children.wait_for_exit())
    try:
        async with Client(spec.address) as client:
            chatting = asyncio.create_task(show_sharing(client, [worker.worker_id for worker in workers], console))
            await asyncio.wait({failure, chatting}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                chatting.cancel()
                await asyncio.gather(chatting, return_exceptions=True)
                raise ClusterFailed(f"{failure.result()}; its log above says why", reason="CHILD_ENDED")
            await chatting
    finally:
        failure.cancel()


async def show_sharing(client: Client, workers: Sequence[str], console: Console) -> None:
    """The chats, then the figures, then the blocks."""
    chats, maps = await run_chats(client, workers, console)
    print_table(chats, console)
    console.print("\nthe blocks of both workers while their visitors were being answered:\n")
    for block_map in maps:
        console.print(render_block_map(block_map, console.width))
        console.print()
    # A worker frees an answer's blocks after its last token.
    described = await client.describe()
    while any(worker.counts[0].held for worker in described.workers):
        await asyncio.sleep(0.1)
        described = await client.describe()
    for worker in sorted(described.workers, key=lambda worker: worker.worker_id):
        counts = worker.counts[0]
        console.print(
            f"{worker.worker_id} now: {counts.held} blocks held, {counts.cached} cached for the next visitors"
        )
    audit = await client.check()
    console.print(f"audit of {audit.num_blocks_checked:,} blocks: {len(audit.violations)} violations")


async def main() -> int:
    task = asyncio.current_task()
    assert task is not None
    # Like Ctrl-C: unwind all contexts, so that no process keeps running.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await demo(stdout_console())


if __name__ == "__main__":
    status = 130
    try:
        status = asyncio.run(main())
    except* (KeyboardInterrupt, asyncio.CancelledError):
        pass
    except* BrokenPipeError:
        # The reader of the output has left (| head): say nothing, and keep Python from writing an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
