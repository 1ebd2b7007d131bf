"""Benchmarks of the ops against their peers, in one process and one run: `python -m bench attention --help`."""
