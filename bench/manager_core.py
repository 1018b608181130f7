"""The manager's core against vLLM's KVCacheManager, both in process, on the reference trace.

python -m bench.manager_core [--runs N] [--arrivals burst|steady|both] [--json]

1,000 requests, 64 at a time, 512 shared + 64 own prompt tokens and 64 generated ones, blocks of 16. Both managers do the same work
in one process, in turn; CPU time of their thread. `make bench KIND=peers` installs vLLM's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.calls import Recording
from bench.recorder import Recorder
from bench.report import Ratio, Series, command_line, progress
from bench.trace import Trace

ROOT: Final = Path(__file__).resolve().parent.parent
PEERS: Final = ROOT / ".venv-peers" / "bin" / "python"
ARRIVALS: Final = {"burst": None, "steady": 1}
"""How the first 64 requests arrive: all at once, or one per step."""
NUM_RECORDINGS: Final = 3


def record(trace: Trace) -> tuple[Recording, Series]:
    """A worker's calls during the trace, and the time of their whole path without sockets."""
    whole_way = Series("the whole path, without sockets")
    for _ in range(NUM_RECORDINGS):
        recorder = Recorder(trace)
        recorder.run()
        whole_way.seconds.append(recorder.seconds)
    return recorder.recording, whole_way


def replay(recording: Recording, runs: int) -> dict[str, Any]:
    """Time both managers, or kvpool's alone if the peer is not installed."""
    with_peer = PEERS.exists()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        recording.save(path)
        command = [
            str(PEERS) if with_peer else sys.executable,
            "-m",
            "bench.replay_runs",
            str(path),
            "--runs",
            str(runs),
        ]
        if not with_peer:
            command.append("--without-peer")
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(arrivals: str, runs: int) -> dict[str, Any]:
    """One trace: record, replay, compare."""
    trace = Trace(num_arrivals_per_step=ARRIVALS[arrivals])
    progress(f"{arrivals} arrivals: recording a worker's calls to the manager, {NUM_RECORDINGS} times")
    recording, whole_way = record(trace)
    progress(f"{arrivals} arrivals: replaying it in turn with the peer")
    measured = replay(recording, runs)
    ours = Series("kvpool core", measured["seconds"]["kvpool"])
    peer = Series("vLLM KVCacheManager", measured["seconds"]["vllm"])
    calls = {kind: recording.num_calls(kind) for kind in ("allocate", "append", "free")}
    return {
        "arrivals": arrivals,
        "ours": ours,
        "peer": peer if peer.seconds else None,
        "ratio": Ratio(ours, peer) if peer.seconds else None,
        "whole_way": whole_way,
        "calls": calls,
        "items": {kind: recording.num_items(kind) for kind in calls},
        "steps": measured["steps"],
        "cached_tokens": recording.num_cached_tokens,
        "decodes_that_waited_for_a_call": recording.num_reserve_waits,
        "facts": measured["facts"],
    }


def show(result: dict[str, Any]) -> None:
    """Print the figures."""
    calls, items = result["calls"], result["items"]
    said = ", ".join(f"{calls[kind]} {kind.capitalize()} ({items[kind]} sequences)" for kind in calls)
    print(f"\nReference trace, arrivals: {result['arrivals']}")
    print(f"  kvpool core              {result['ours']}")
    print(f"  vLLM KVCacheManager      {result['peer'] or 'not installed: make bench KIND=peers'}")
    print(f"  ratio                    {result['ratio'] or '-'}")
    print(f"  calls                    {said}")
    print(f"  steps                    kvpool {result['steps']['kvpool']}, vLLM {result['steps']['vllm']}")
    print(f"  tokens from the cache    {result['cached_tokens']:,} on both sides")
    print(f"  decodes that waited      {result['decodes_that_waited_for_a_call']}")
    print(f"  for information: worker's cache side + protobuf + core, no sockets: {result['whole_way']}")


def main() -> None:
    parser = command_line(__doc__, runs=7)
    parser.add_argument("--arrivals", choices=[*ARRIVALS, "both"], default="both")
    arguments = parser.parse_args()
    if not PEERS.exists():
        progress("vLLM is not installed: run `make bench KIND=peers`; measuring kvpool alone")
    chosen = list(ARRIVALS) if arguments.arrivals == "both" else [arguments.arrivals]
    results = [measure(arrivals, arguments.runs) for arrivals in chosen]
    if arguments.json:
        print(json.dumps({"traces": results}, default=lambda value: value.as_json()))
        return
    for result in results:
        show(result)


if __name__ == "__main__":
    main()
