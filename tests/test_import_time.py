"""`import drivetrain` costs at most 1.2 × `import torch`: measured in fresh interpreters."""

import gc
import os
import subprocess
import sys

import pytest

import drivetrain
import drivetrain.core.hook

TIMED = "import time; begin = time.process_time(); {}; print(time.process_time() - begin)"  # not of other processes
TORCH = TIMED.format("import torch")
DRIVETRAIN = TIMED.format("import drivetrain")


def seconds(code: str) -> float:
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_the_import_costs_little_more_than_torch() -> None:
    assert seconds(DRIVETRAIN) <= 1.2 * seconds(TORCH)


def test_the_bare_import_loads_nothing_heavy() -> None:
    code = "import sys, drivetrain; print(sorted({'torch', 'pydantic', 'rich', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("first", "given", "expected"), [("drivetrain", "", "1000"), ("drivetrain", "10", "10"), ("torch", "", "None")]
)
def test_torch_that_is_imported_later_keeps_its_free_memory(first: str, given: str, expected: str) -> None:
    """Torch for Arm reads it when it is loaded, and never again. What a user has set stays."""
    environ = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}
    environ |= {"MIMALLOC_PURGE_DELAY": given} if given else {}
    code = f"import {first}, os, drivetrain; print(os.environ.get('MIMALLOC_PURGE_DELAY'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == expected


def test_a_name_that_is_not_there() -> None:
    code = "import drivetrain; drivetrain.Traner"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "has no attribute 'Traner'" in done.stderr


@pytest.mark.usefixtures("nothing_frozen")
def test_names_of_a_module_that_is_loaded_leave_the_garbage_collector_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("freeze"))
    assert drivetrain._load("drivetrain.core.hook") is sys.modules["drivetrain.core.hook"]
    assert frozen == []
