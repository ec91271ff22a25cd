"""Measurements whose results are kept as JSON, with machine, versions and date, under `benchmarks/results`."""

import os

# `import drivetrain` would set it for loops by hand, too, which are in the same process or started by it. This is the
# value of mimalloc itself: loops and trainers of others are measured as they are without drivetrain.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10")
