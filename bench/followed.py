"""What it costs the manager's core that somebody follows its contents, on the reference trace.

python -m bench.followed [--runs N] [--json]

The replay of bench.manager_core, in one process and in turn: nobody follows, and somebody does. CPU time of the thread, without
the cyclic collector, as in the manager's process. `reading` is what one follower adds at the edge: all events taken from the
journal and encoded, in messages of 256. (bench.before_after compares with a commit that had no journal.)
"""

from __future__ import annotations

import gc
import json
import time
from typing import Any, Final

from bench.manager_core import ARRIVALS
from bench.recorder import Recorder
from bench.replay import OurReplay
from bench.report import Ratio, Series, command_line, facts, progress
from bench.trace import Trace
from kvpool.cache_service.core.contents import Contents
from kvpool.cache_service.watching.contents_codec import encode

NUM_EVENTS: Final = 1 << 20
"""That the journal keeps: more than there are, because they are read after the run."""
MESSAGE_EVENTS: Final = 256


def read(contents: Contents) -> float:
    """Take and encode all events; returns the seconds."""
    began = time.thread_time()
    number = 0
    while events := contents.since(number, MESSAGE_EVENTS):
        encode(1, events).SerializeToString()
        number = events[-1].number
    seconds = time.thread_time() - began
    assert number == contents.last_number, "the journal is too small for the trace"
    return seconds


def measure(arrivals: str, runs: int) -> dict[str, Any]:
    """One trace, in turn."""
    recorder = Recorder(Trace(num_arrivals_per_step=ARRIVALS[arrivals]))
    recorder.run()
    alone, followed = OurReplay(recorder.recording), OurReplay(recorder.recording, num_events=NUM_EVENTS)
    nobody, somebody, reading = Series("nobody follows"), Series("somebody follows"), Series("reading")
    gc.collect()
    gc.disable()  # as the manager's process does
    for run in range(runs + 1):
        sides = [(alone, nobody), (followed, somebody)]
        for replay, series in sides if run % 2 else reversed(sides):
            seconds = replay.run()
            replay.check()
            if run:  # the first one warms up
                series.seconds.append(seconds)
        assert followed.manager.contents is not None
        if run:
            reading.seconds.append(read(followed.manager.contents))
    assert followed.manager.contents is not None
    return {
        "arrivals": arrivals,
        "nobody": nobody,
        "somebody": somebody,
        "ratio": Ratio(nobody, somebody),
        "reading": reading,
        "events": followed.manager.contents.last_number,
    }


def main() -> None:
    arguments = command_line(__doc__, runs=15).parse_args()
    found = []
    for arrivals in ARRIVALS:
        progress(f"{arrivals} arrivals: {arguments.runs} runs of each")
        found.append(measure(arrivals, arguments.runs))
    if arguments.json:
        print(json.dumps({"traces": found, "facts": facts("grpcio")}, default=lambda value: value.as_json()))
        return
    for one in found:
        print(f"\nReference trace, arrivals: {one['arrivals']}, {one['events']:,} events")
        print(f"  nobody follows           {one['nobody']}")
        print(f"  somebody follows         {one['somebody']}")
        print(f"  somebody over nobody     {one['ratio']}")
        print(f"  reading, by one follower {one['reading']}")


if __name__ == "__main__":
    main()
