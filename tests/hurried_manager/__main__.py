"""`python -m tests.hurried_manager SECONDS FLAGS…`: a manager that lets a stream of Watch keep its place for so long, not for ten
seconds, when all places are taken."""

from __future__ import annotations

import sys

from kvpool.cache_service.__main__ import main as manager_main
from kvpool.cache_service.watching import places


def main() -> int:
    """Run the manager; returns its exit status."""
    places.TURN_SECONDS = float(sys.argv.pop(1))  # type: ignore[misc]
    return manager_main()


if __name__ == "__main__":
    sys.exit(main())
