"""The command line `kvpool`. This module imports nothing, so that processes that need a part of it, e.g. on Ray, start faster."""
