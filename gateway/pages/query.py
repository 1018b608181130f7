"""Reads numbers in the address of a request."""

from __future__ import annotations

from starlette.requests import Request

from ..errors import invalid


def query_number(request: Request, name: str, default: int | None, *, least: int = 0, most: int) -> int:
    """Return the parameter of that name. Raises ApiError if it is no number from `least` to `most`, or is missing without a
    `default`."""
    given = request.query_params.get(name, "" if default is None else str(default))
    if given.isascii() and given.isdigit() and len(given) < 20 and least <= int(given) <= most:
        return int(given)
    raise invalid(name, f"{name}: needed {least} to {most}, got {given[:32]!r}")
