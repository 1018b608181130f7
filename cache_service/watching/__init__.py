"""Serves Watch, which sends changes to viewers as they happen."""
