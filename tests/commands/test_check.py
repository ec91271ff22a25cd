"""`drivetrain check`: one screen, no context, no torch, every problem with its remedy."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

import drivetrain as dt
from drivetrain.cli import main
from drivetrain.commands.check import as_document, is_ready, render
from drivetrain.config import configure
from drivetrain.hardware import Hardware, Note
from drivetrain.plan import choose_settings
from tests.hardware_fixtures import load, names


def screen(hardware: Hardware, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    render(console, hardware, choose_settings(hardware))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("machine", names())
def test_it_fits_one_screen(machine: str) -> None:
    lines = screen(load(machine))
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 80


def test_the_memory_of_several_gpus() -> None:
    text = " ".join(" ".join(screen(load("4x-l4"), 100)).split())
    assert re.search(r"4 GPUs: [0-9.]+ GiB in all, [0-9.]+ GiB on the smallest", text)


@pytest.mark.parametrize("machine", names())
def test_what_the_screen_must_say(machine: str) -> None:
    hardware = load(machine)
    text = " ".join(" ".join(screen(hardware, 100)).split())
    for word in ("micro-batch", "accumulation", "effective batch", "workers", "precision", "checkpointing", "strategy"):
        assert word in text
    assert "ZeRO stage" in text
    assert "Optional packages" in text
    for gpu in hardware.gpus:
        assert gpu.name in text
    for note in hardware.notes:
        assert note.sentence in text
        assert note.remedy in text


def test_a_problem_means_not_ready() -> None:
    broken = load("cpu-2core").model_copy(
        update={"notes": (Note(severity="problem", sentence="The driver is broken.", remedy="reboot"),)}
    )
    assert not is_ready(broken)
    text = "\n".join(screen(broken))
    assert "Not ready: 1 problem, no warnings" in text
    assert "The driver is broken. Remedy: reboot" in text
    assert as_document(broken, choose_settings(broken))["ready"] is False


def test_json_holds_all_of_it(capsys) -> None:
    code = main(["check", "--json", "--batch-size", "7"])
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["micro_batch"]["value"] == 7
    assert document["settings"]["micro_batch"]["pinned"] is True
    assert Hardware.model_validate(document["hardware"])
    assert code == (0 if document["ready"] else 1)


CHECK_IN_A_FRESH_PROCESS = """
import os, sys
import drivetrain.cli
begin = sum(os.times()[:4])  # of this process and of those it starts
code = drivetrain.cli.main(["check"])
print(f"seconds={sum(os.times()[:4]) - begin:.3f} torch={'torch' in sys.modules}", file=sys.stderr)
sys.exit(code)
"""


def test_it_answers_within_two_seconds_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK_IN_A_FRESH_PROCESS], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = float(done.stderr.split("seconds=")[1].split()[0])
    assert seconds < 2
    assert "torch=False" in done.stderr


def test_a_pipe_that_is_not_utf8() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", "check"],
        capture_output=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stderr == b""
    assert b"Ready" in done.stdout
    assert b"256 x 1 x 1 = 256" in done.stdout


@pytest.mark.parametrize("flags", [{}, {"batch_size": 7}, {"accumulation_steps": 2}], ids=str)
def test_a_run_does_what_check_says(flags: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The division of a step, precision, strategy and workers, for a job that leaves all of these open."""
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["check", "--json", "--gpu-mode", "cpu", *words]) == 0
    said = json.loads(capsys.readouterr().out)["settings"]

    class Items(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 600

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((3,), index / 600)

    job = dt.Job(
        name="open",
        model=lambda: torch.nn.Linear(3, 1),
        data=Items(),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        max_steps=2,
    )
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False, resident="off", **flags)
    run = yaml.safe_load((dt.train(job, config, quiet=True).folder / "plan.yaml").read_text())
    names = ("micro_batch", "accumulation", "strategy", "precision", "num_workers")
    assert {name: said[name]["value"] for name in names} == {name: run[name] for name in names}
    assert said["effective_batch"] == run["global_batch"]
    assert said["devices"]["value"] == [run["device"]]
