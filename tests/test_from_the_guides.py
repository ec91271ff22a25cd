"""What docs/from-the-guides.md promises: every command of its tables exists, and those that need no GPU run."""

import os
import re
import shlex
from pathlib import Path

import pytest

from drivetrain.cli import COMMANDS, flag_parser
from tests import warm_python

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\|(?P<there>[^|]+)\| `(?P<here>[^`]+)` \|$", re.MULTILINE)
ROWS = [
    (row["there"].strip(), row["here"]) for row in ROW.finditer((ROOT / "docs/from-the-guides.md").read_text("utf-8"))
]
TARGETS_OF_USERS = ("train.py", "FILE")
SHORT = ("drivetrain check", "drivetrain train image-pairs --max_steps 2")
TRAINS = ("train", "benchmark", "plan")


def parsed(here: str) -> None:
    words = shlex.split(here)
    if words[0] == "drivetrain":
        parser = flag_parser(words[1], COMMANDS[words[1]].load())
        found = parser.parse(words[2:])
        assert found.problems == []
        assert parser.missing_positionals(found) == []
    else:
        assert (ROOT / (words[1] if words[0] == "python" else words[0])).is_file()


@pytest.mark.parametrize("here", [here for _, here in ROWS])
def test_the_command_exists(here: str) -> None:
    parsed(here)


def command(here: str, folder: Path) -> list[str]:
    """The command at its smallest, with everything it writes in a folder."""
    words = shlex.split(here)
    if words[0] == "python":
        size = ["--data", "digits", "--max-steps", "3", "--output-dir", str(folder)]
        epochs = [] if "--epochs" in words else ["--epochs", "1"]
        mode = [] if "--gpu-mode" in words else ["--gpu-mode", "cpu"]
        return [str(ROOT / words[1]), *words[2:], *size, *epochs, *mode]
    extra = []
    if words[1] in TRAINS:
        extra = ["--gpu-mode", "cpu"] if words[1] != "plan" else []
        extra += ["--output-dir", str(folder)]
        extra += ["--debug"] if words[1] == "train" and "--debug" not in words else []
    return ["-m", "drivetrain", *words[1:], *extra]


def run(here: str, folder: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = warm_python.run(command(here, folder), timeout=280, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


RUNNABLE = [here for there, here in ROWS if "needs a GPU" not in there and not here.endswith(TARGETS_OF_USERS)]


@pytest.mark.parametrize("here", [here for here in RUNNABLE if here.startswith(SHORT)])
def test_the_command_runs(here: str, tmp_path: Path) -> None:
    run(here, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("here", [here for here in RUNNABLE if not here.startswith(SHORT)])
def test_every_command_runs(here: str, tmp_path: Path) -> None:
    run(here, tmp_path)


def test_there_are_rows() -> None:
    assert len(ROWS) > 30
