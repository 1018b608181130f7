"""A test of a backend that does not serve here: neither passed nor failed."""

from __future__ import annotations

from typing import NoReturn

import pytest

REFUSED = "refused: "
"""How the reason of such a skip begins; `make gpu` counts these on their own."""


def refused(reason: object) -> NoReturn:
    """End the test as one whose subject would be refused, for this reason, by a worker too."""
    pytest.skip(f"{REFUSED}{reason}")
