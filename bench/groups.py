"""What a second group costs the manager's core: time on the reference trace, and memory of a prefix tree node.

python -m bench.groups [--runs N] [--blocks N] [--json]

The trace is that of bench.manager_core, replayed in turn for a worker with one group and one with two, whose pools have the same
size and grant the same blocks; CPU time of the thread. Memory is what Python allocates
for cached blocks, with all that belongs to a node (its tokens, its name, the records of its blocks).
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tracemalloc
from array import array
from typing import Any, Final

from bench.recorder import Recorder
from bench.replay import FINGERPRINT, OurReplay, registration
from bench.report import command_line, facts, progress
from bench.trace import Trace
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import AllocateItem, Granted, Root, SequenceKey, SequenceUpdate, Uplink
from kvpool.cache_service.core.prefix_tree import Node

BLOCK_SIZE: Final = 16
CHAIN_BLOCKS: Final = 36
GROUPS: Final = (1, 2)


def times(num_runs: int) -> dict[str, Any]:
    """Seconds of each replay, by number of groups, and the ratio of two groups to one over pairs of runs."""
    recorder = Recorder(Trace())
    recorder.run()
    replays = [OurReplay(recorder.recording, num_groups=num_groups) for num_groups in GROUPS]
    seconds: list[list[float]] = [[], []]
    for number in range(num_runs):
        progress(f"replay {number + 1} of {num_runs}")
        for index in (0, 1) if number % 2 else (1, 0):
            seconds[index].append(replays[index].run())
            replays[index].check()
    ratios = [two / one for one, two in zip(*seconds, strict=True)]
    return {
        "seconds": dict(zip(map(str, GROUPS), seconds, strict=True)),
        "ratio_of_least": min(seconds[1]) / min(seconds[0]),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def bytes_of_a_node(num_groups: int, num_blocks: int) -> float:
    """What Python allocates for this number of cached blocks in each group, over the number of nodes."""
    manager = CacheManager(1)
    session = manager.register(registration("w", BLOCK_SIZE, num_blocks + 1, num_groups), 0.0).session
    gc.collect()
    tracemalloc.start()
    call_no = 0
    for number in range(num_blocks // CHAIN_BLOCKS):
        tokens = array("I", range(number, number + CHAIN_BLOCKS * BLOCK_SIZE)).tobytes()
        key = SequenceKey(str(number), 1, 0)
        item = AllocateItem(key, Root(FINGERPRINT), tokens, max_new_tokens=1)
        (outcome,), _ = manager.allocate(Uplink(session, call_no + 1), [item])
        assert isinstance(outcome, Granted)
        manager.free(Uplink(session, call_no + 2), [SequenceUpdate(key, 0, b"", CHAIN_BLOCKS * BLOCK_SIZE)])
        call_no += 2
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return allocated / manager.num_prefix_nodes


def main() -> None:
    parser = command_line(__doc__, runs=9)
    parser.add_argument("--blocks", type=int, default=100_000, help="in each group's pool (default %(default)s)")
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "time": times(arguments.runs),
        "bytes_per_node": {str(num_groups): bytes_of_a_node(num_groups, arguments.blocks) for num_groups in GROUPS},
        "bytes_of_the_object": sys.getsizeof(Node(None, b"", 0)),
        "facts": facts("kvpool"),
    }
    if arguments.json:
        print(json.dumps(found))
        return
    one, two = (min(found["time"]["seconds"][str(num_groups)]) for num_groups in GROUPS)
    low, high = found["time"]["ratio_quartiles"]
    ratio = f"{found['time']['ratio']:.2f} ({low:.2f} to {high:.2f})"
    print(f"one group {1000 * one:.1f} ms, two groups {1000 * two:.1f} ms; median of pairs {ratio}")
    alone = found["bytes_of_the_object"]
    memory = found["bytes_per_node"]
    print(f"bytes of a node: one group {memory['1']:.0f}, two groups {memory['2']:.0f}; the object alone {alone}")


if __name__ == "__main__":
    main()
