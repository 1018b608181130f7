"""All tests and measurements that need a GPU, in one command.

python -m scripts.gpu [facts] [check] [step] [serve] [--out FOLDER] [--seconds N] [--wheels FOLDER] [--device NAME] [--tiny]

Writes FOLDER/PART.json for each part. Exit status 0: complete, and nothing failed; 1: a failure, or time ran out; 2: it could not
start.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .carried import NoWheels, install
from .project import ROOT
from .setup import Setup

_DEFAULT_SECONDS = 470.0
"""A little less than eight minutes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    given = _parser().parse_args(arguments)
    # SIGTERM, e.g. of `timeout`, must end all child processes too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    out = given.out.absolute()
    wheels = None if given.wheels is None else given.wheels.absolute()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="kvpool-gpu-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if wheels is not None:
            try:
                install(wheels, folder / "site")
            except NoWheels as error:
                return _cannot_begin(str(error))
        device = given.device or ("cpu" if given.tiny else "cuda:0")
        return _run(Setup(device, given.tiny, folder), given.parts, given.seconds, out)


def _run(setup: Setup, parts: Sequence[str], seconds: float, out: Path) -> int:
    try:
        from .parts import PARTS, NoDevice, Run, run_parts

        unknown = [part for part in parts if part not in PARTS]
        if unknown:
            return _cannot_begin(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
        reports = run_parts(Run(setup, parts or PARTS, seconds, out), _say)
    except ModuleNotFoundError as error:
        return _cannot_begin(
            f"{sys.executable} has no {error.name}: give --wheels, or run it in .venv (`make gpu` does)"
        )
    except NoDevice as error:
        return _cannot_begin(
            f"{error}. On a GPU machine run `make gpu` with its own Python and the copied wheels: PYTHON=python3 WHEELS=.whl. "
            "Without a GPU, --tiny runs the same code on a CPU."
        )
    for report in reports:
        print(*report.lines(), sep="\n", flush=True)
    return 0 if all(report.is_good for report in reports) else 1


def _cannot_begin(why: str) -> int:
    print(f"make gpu: {why}", file=sys.stderr)
    return 2


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="facts, check, step, serve; default: all")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-results"),
        metavar="FOLDER",
        help="for the JSON files (default gpu-results)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=_DEFAULT_SECONDS,
        help=f"for facts and check together, and for step and serve together (default {_DEFAULT_SECONDS:g})",
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="install these into a temporary folder first, without a network"
    )
    parser.add_argument("--device", help="cuda:0, cuda:1, … (default cuda:0, with --tiny cpu)")
    parser.add_argument("--tiny", action="store_true", help="the smallest models and a few cases, to test the command")
    return parser


if __name__ == "__main__":
    sys.exit(main())
