"""Interleaved runs of both managers on one recorded trace; prints their seconds as JSON. For bench.manager_core.

python -m bench.replay_runs RECORDING --runs N [--without-peer]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path

from bench.calls import Recording
from bench.replay import OurReplay, VllmReplay
from bench.report import facts, progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--without-peer", action="store_true")
    arguments = parser.parse_args()
    recording = Recording.load(arguments.recording)
    ours = OurReplay(recording)
    peer = None if arguments.without_peer else VllmReplay(recording.trace)
    # As vLLM's own engine does after its start: imported objects are excluded from collections, which stay enabled.
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {"kvpool": [], "vllm": []}
    for run in range(arguments.runs + 1):
        our_seconds = ours.run()
        ours.check()
        peer_seconds = 0.0 if peer is None else peer.run()
        if peer is not None and peer.num_cached_tokens != recording.num_cached_tokens:
            raise SystemExit(
                f"not the same work: {peer.num_cached_tokens} and {recording.num_cached_tokens} tokens cached"
            )
        what = "warm-up" if not run else f"run {run} of {arguments.runs}"
        progress(
            f"{what}: kvpool {our_seconds * 1000:.0f} ms" + (f", vLLM {peer_seconds * 1000:.0f} ms" if peer else "")
        )
        if run:
            seconds["kvpool"].append(our_seconds)
            if peer:
                seconds["vllm"].append(peer_seconds)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "steps": {"kvpool": recording.num_steps, "vllm": peer.num_steps if peer else None},
                "facts": facts("vllm", "torch", "xxhash"),
            }
        ),
        flush=True,
    )
    # Triton, which the peer imports, prints pages of warnings about its own bindings at exit.
    os._exit(0)


if __name__ == "__main__":
    main()
