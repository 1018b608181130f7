"""Benchmarks: kvpool against named peers, measured in the same run. `make bench`; docs/BENCHMARKS.md explains the figures."""
