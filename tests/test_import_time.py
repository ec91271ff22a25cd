"""`import drivetrain` costs at most 1.2 × `import torch`: measured in fresh interpreters, interleaved."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.alone

PAIRS = 3
TIMED = "import time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"
TORCH = TIMED.format("import torch")
DRIVETRAIN = TIMED.format("import drivetrain")


def seconds(code: str) -> float:
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_the_import_costs_little_more_than_torch() -> None:
    programs = (TORCH, DRIVETRAIN)
    for code in programs:
        seconds(code)  # once for the disk's sake
    rounds = [[seconds(code) for code in programs] for _ in range(PAIRS)]
    # The least of each: whatever else the machine does can only add to a sample.
    torch, drivetrain = (min(column) for column in zip(*rounds, strict=True))
    assert drivetrain <= 1.2 * torch, rounds


def test_the_bare_import_loads_nothing_heavy() -> None:
    code = "import sys, drivetrain; print(sorted({'torch', 'pydantic', 'rich', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_is_not_there() -> None:
    code = "import drivetrain; drivetrain.Traner"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "has no attribute 'Traner'" in done.stderr
