"""Benchmarks: run by hand, never as tests. `python -m tests.benchmarks.step --help`."""
