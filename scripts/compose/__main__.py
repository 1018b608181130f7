"""python -m scripts.compose check | test [arguments of pytest]"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    match arguments:
        case ["check"]:
            from .rules import check_files

            return check_files()
        case ["test", *pytest_arguments]:
            from .end_to_end import run

            return run(pytest_arguments)
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
