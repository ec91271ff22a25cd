"""Measurements whose results are kept as JSON, with machine, versions and date, under `benchmarks/results`."""
