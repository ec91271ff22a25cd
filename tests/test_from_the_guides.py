"""What docs/guide/from-the-guides.md promises: every command of its tables exists, and those that need no GPU run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.cli import COMMANDS, flag_parser
from tests import warm_python
from tests.config.test_dialects import ACCELERATE, BLOCK, GPU_CONFIG, MULTI_GPU
from tests.launch.test_launchers_integration import SCRIPT

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/guide/from-the-guides.md").read_text("utf-8")
ROW = re.compile(r"^\|(?P<there>[^|]+)\| `(?P<here>[^`]+)` \|$", re.MULTILINE)
ROWS = [(row["there"].strip(), row["here"]) for row in ROW.finditer(PAGE)]
SHORT = ("drivetrain check", "drivetrain train image-pairs --max_steps 2")
WRITES_FILES = "python examples/gpu_training_example.py --experts 2 --epochs 2"
TRAINS = ("train", "benchmark", "plan")
LONGEST_SECONDS = 580  # less than pytest's own limit, so that the command's output is shown
LAUNCHERS = ("torchrun", "accelerate", "tensorboard")
FILES = {  # of each recipe, what its guide writes
    "digits-moe": GPU_CONFIG,
    "email-sequence": MULTI_GPU.replace("\nfind_unused_parameters: false", ""),
    "darkroom": ACCELERATE,
    "chest-xray-vqa": BLOCK.replace("enabled: true", "enabled: false"),  # DeepSpeed is not always installed
}


def parsed(here: str) -> None:
    words = shlex.split(here)
    if words[0] == "drivetrain":
        parser = flag_parser(words[1], COMMANDS[words[1]].load())
        found = parser.parse(words[2:])
        assert found.problems == []
        assert parser.missing_positionals(found) == []
    elif words[0] not in LAUNCHERS and words[1] != "train.py":
        assert (ROOT / (words[1] if words[0] == "python" else words[0])).is_file()


@pytest.mark.parametrize("here", list(dict.fromkeys(here for _, here in ROWS)))
def test_the_command_exists(here: str) -> None:
    parsed(here)


def command(here: str, folder: Path) -> list[str]:
    """The command at its smallest, with everything it writes in a folder."""
    words = shlex.split(here)
    if words[0] in LAUNCHERS:
        module = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
        return ["-m", module.get(words[0], "tensorboard.main"), *words[1:]]
    if words[0].startswith("scripts/"):
        return [str(ROOT / words[0]), *words[1:], "--debug", "--gpu-mode", "cpu", "--output-dir", str(folder)]
    if words[1] == "train.py":
        return words[1:]
    if words[0] == "python":
        steps = "100" if here == WRITES_FILES else "3"
        size = ["--data", "digits", "--max-steps", steps, "--output-dir", str(folder)]
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
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline"}
    if "train.py" in here:
        (folder / "train.py").write_text(SCRIPT.replace("sys.argv[-1]", repr(str(folder))))
    if "runs/" in here:
        (folder / "runs").mkdir()
    words = command(here, folder)
    if "FILE" in words:
        recipe = next((name for name in FILES if name in here), "chest-xray-vqa")
        (folder / "theirs.yaml").write_text(FILES[recipe])
        words[words.index("FILE")] = str(folder / "theirs.yaml")
    if words[0] == "-m" and words[1] == "accelerate.commands.accelerate_cli":
        pytest.importorskip("accelerate")
    if words[0].endswith(".sh"):
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"
        done = subprocess.run(
            ["sh", *words], capture_output=True, text=True, timeout=LONGEST_SECONDS, cwd=folder,
            env=environment | {"PATH": path}, check=False,
        )  # fmt: skip
    else:
        done = warm_python.run(words, timeout=LONGEST_SECONDS, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if here == WRITES_FILES:
        written = {re.sub(r"\d+", "*", path.name) for path in (folder / "gpu_training").iterdir()}
        for name in re.findall(r"`([\w*]+\.(?:png|txt))`", PAGE):
            assert name in written or "(with several devices)" in PAGE.split(name)[1][:30], name


RUNNABLE = list(dict.fromkeys(here for there, here in ROWS if "(needs " not in there))


@pytest.mark.parametrize("here", [here for here in RUNNABLE if here.startswith(SHORT)])
def test_the_command_runs(here: str, tmp_path: Path) -> None:
    run(here, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("here", [here for here in RUNNABLE if not here.startswith(SHORT)])
def test_every_command_runs(here: str, tmp_path: Path) -> None:
    run(here, tmp_path)


def test_there_are_rows() -> None:
    assert len(ROWS) > 60
