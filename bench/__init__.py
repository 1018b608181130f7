"""Benchmarks: our figures against named peers, measured in the same run. `make bench`; docs/BENCHMARKS.md tells what they mean."""
