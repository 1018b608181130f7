"""The command line `kvpool`."""

from .app import main

__all__ = ["main"]
