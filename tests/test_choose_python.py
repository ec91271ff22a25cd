"""The virtual environment is made with a better built Python, where there is one and none was asked for."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OWN = "/usr/local/bin/python3"


@pytest.fixture
def faster_than(monkeypatch: pytest.MonkeyPatch) -> Any:
    return runpy.run_path(str(ROOT / "scripts" / "choose_python.py"))["faster_than"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for minor in (11, 12, 13):
        program = tmp_path / f"python3.{minor}"
        program.touch(mode=0o755)
    return tmp_path


def chosen(faster_than: Any, minor: int, folders: list[str], seconds: dict[str, list[float | None]]) -> str | None:
    """The name of the Python that is chosen, where each measurement gives what is said here."""
    faster_than.__globals__["measured"] = lambda path: seconds[Path(path).name].pop(0)
    found = faster_than(OWN, minor, folders)
    return found and Path(found).name


def test_the_best_of_three_decides(faster_than: Any, folder: Path) -> None:
    seconds: dict[str, list[float | None]] = {"python3": [1.9, 1.0, 1.1], "python3.11": [1.5, 1.4, 0.8]}
    assert chosen(faster_than, 11, [str(folder)], seconds) == "python3.11"


def test_the_tested_version_comes_first(faster_than: Any, folder: Path) -> None:
    seconds: dict[str, list[float | None]] = {
        "python3": [1.0] * 3,
        "python3.11": [0.8] * 3,
        "python3.12": [0.7] * 3,
    }
    assert chosen(faster_than, 12, [str(folder)], seconds) == "python3.11"


@pytest.mark.parametrize("other", [0.95, 1.3, None], ids=["little faster", "slower", "no virtual environments"])
def test_otherwise_it_is_python3(faster_than: Any, folder: Path, other: float | None) -> None:
    seconds: dict[str, list[float | None]] = {"python3": [1.0] * 3, "python3.11": [other] * 3}
    assert chosen(faster_than, 11, [str(folder)], seconds) is None


def test_python3_alone_is_not_measured(faster_than: Any, tmp_path: Path) -> None:
    (tmp_path / "python3.11").symlink_to(sys.executable)
    faster_than.__globals__["measured"] = None
    assert faster_than(sys.executable, 11, [str(tmp_path), "/nowhere"]) is None


def test_a_python_that_does_not_run_is_none(faster_than: Any, folder: Path) -> None:
    measured = faster_than.__globals__["measured"]
    assert measured(str(folder / "python3.11")) is None
    assert measured("/nowhere/python3.11") is None
    assert measured(sys.executable) > 0


def printed(folder: Path, *words: str, **environment: str) -> list[str]:
    """What `make install` would do in a copy of the Makefile, without doing it."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHON", "MAKEFLAGS"}} | environment
    done = subprocess.run(["make", "-n", *words, "install"], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "-m venv" in line]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_what_make_takes(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "choose_python.py"
    script.write_text("open('asked', 'a').write('x'); print('/better/python3.11')")
    asked = tmp_path / "asked"
    assert "/better/python3.11 -m venv" in printed(tmp_path)[0]
    assert asked.read_text() == "x"  # once, though several lines need it

    assert "mine -m venv" in printed(tmp_path, "PYTHON=mine")[0]
    assert "mine -m venv" in printed(tmp_path, PYTHON="mine")[0]
    script.write_text("no Python")
    assert "|| python3 -m venv" in printed(tmp_path)[0]

    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    script.unlink()
    assert "|| .venv/bin/python -m venv" in printed(tmp_path)[0]
    assert asked.read_text() == "x"  # the environment keeps the Python that it was made with
