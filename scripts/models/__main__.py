"""python -m scripts.models [--write] [TYPE …]: try each causal type of the installed transformers over the paged KV.

--write writes the result to docs/MODELS.md (all types only). Exit status 1 if a type is accepted and computes a wrong result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from . import document
from .outcome import Outcome, Result
from .processes import try_all

_NUM_PROCESSES = 2
_LIMIT_S = 180.0


def main() -> int:
    """Returns the exit status."""
    from .subjects import all_composite_types, all_published, all_seq2seq_types, all_types

    parser = argparse.ArgumentParser(prog="python -m scripts.models", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="only these")
    parser.add_argument("--write", action="store_true", help="write docs/MODELS.md")
    parser.add_argument("--processes", type=int, default=_NUM_PROCESSES)
    arguments = parser.parse_args()
    kinds = [*all_types(), *all_seq2seq_types(), *all_composite_types(), *all_published()]
    unknown = sorted(set(arguments.types) - set(kinds))
    if unknown or (arguments.write and arguments.types):
        print(f"no such type: {', '.join(unknown)}" if unknown else "--write needs all types", file=sys.stderr)
        return 2
    outcomes = _try(arguments.types or kinds, arguments.processes)
    if arguments.write:
        from .trial import TOLERANCE

        document.write(outcomes, TOLERANCE)
        print(f"written: {document.PATH}")
    return int(any(outcome.result is Result.WRONG for outcome in outcomes))


def _try(kinds: list[str], num_processes: int) -> list[Outcome]:
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in try_all(kinds, num_processes, _LIMIT_S):
        outcomes.append(outcome)
        place = f"{len(outcomes)}/{len(kinds)}"
        remark = (outcome.native or outcome.reason)[:110]
        print(
            f"{place:>8} {outcome.kind:26} {outcome.result.value:15} {outcome.seconds:5.1f} s  {remark}",
            flush=True,
        )
    counts = Counter(outcome.result.value for outcome in outcomes)
    summary = ", ".join(f"{count} {result}" for result, count in counts.most_common())
    print(f"{summary}; {time.monotonic() - started:.0f} s")
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
