"""Which kvpool this is."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    """Of the installed package; "from source" where none is."""
    try:
        return metadata.version("kvpool")
    except metadata.PackageNotFoundError:
        return "from source"
