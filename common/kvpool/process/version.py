"""The version of kvpool."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    """Return the version of the installed package; "from source" if none is installed."""
    try:
        return metadata.version("kvpool")
    except metadata.PackageNotFoundError:
        return "from source"
