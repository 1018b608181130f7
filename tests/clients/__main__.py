"""`python -m tests.clients [NAME …] [ARGUMENT …]`: clients of OpenAI's API, each in its own environment, before a real cluster.

Makes the environments one at a time and runs the tests with pytest, which takes all arguments from the first on that begins with
a hyphen. Ends with status 1 and the reason if an environment cannot be made: a client that was not tried must not look green.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.clients.environments import NAMES, PINS, NoEnvironment, folder_of, make
from tests.clients.table import VARIABLE


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    named = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    unknown = sorted(set(named) - set(NAMES))
    if unknown:
        print(f"no client {unknown[0]!r}: there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    for name in named or NAMES:
        print(f"{folder_of(name).name}: {name}'s environment", flush=True)
        try:
            make(folder_of(name), PINS / f"{name}.txt")
        except NoEnvironment as error:
            print(f"{name} cannot be tested.\n{error}", file=sys.stderr)
            return 1
    command = [sys.executable, "-m", "pytest", str(Path(__file__).parent), *words[len(named) :]]
    return subprocess.run(command, env={**os.environ, VARIABLE: " ".join(named or NAMES)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
