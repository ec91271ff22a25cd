"""Real training under the supervisor: killed and started again to the same bits, stopped cleanly, failed in words."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.checkpoint import Checkpoint
from tests.gloo_pool import GlooPool
from tests.launch.jobs import are_gone, launch, launching
from tests.launch.training_script import train

SCRIPT = Path(__file__).parents[1] / "launch" / "training_script.py"


def diary(folder: Path, rank: int = 0) -> list[tuple[int, float, int]]:
    """(step, when, pid) of every step a rank made, over all attempts."""
    path = folder / f"diary-{rank}"
    if not path.exists():
        return []
    rows = [line.split() for line in path.read_text().splitlines()]
    return [(int(row[0]), float(row[1]), int(row[2])) for row in rows if len(row) == 3]


def wait_for_step(
    folder: Path, step: int, after: float = 0.0, rank: int = 0, seconds: float = 180
) -> tuple[float, int]:
    """When a rank first made this step or a later one after a moment, and its pid."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for made, at, pid in diary(folder, rank):
            if made >= step and at > after:
                return at, pid
        time.sleep(0.02)
    raise AssertionError(f"rank {rank} did not make step {step} within {seconds} s")


def losses(folder: Path) -> list[float]:
    rows = (folder / "runs" / "launched" / "steps.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def weights(folder: Path) -> dict[str, object]:
    checkpoint = Checkpoint.latest_in(folder / "runs" / "launched" / "checkpoints")
    assert checkpoint is not None
    return {key: checkpoint.read(key).tolist() for key in checkpoint.keys}


def kill_again_and_again(folder: Path, kills: int, limit_seconds: float) -> int:
    """Kill a random rank after a few steps, so often, then press Ctrl-C. The job's number of steps; it is not done."""
    chance = random.Random(kills)
    steps = 6 * kills + 60
    took: list[float] = []
    victims: list[int] = []
    words = ("--max-restarts", str(kills), str(SCRIPT), str(folder), str(steps))
    with launching(folder, *words, forks=True) as process:
        moment, target = 0.0, 3
        for _ in range(kills):
            victims.append(chance.randint(0, 1))
            _, pid = wait_for_step(folder, target, moment, rank=victims[-1])
            time.sleep(chance.random() * 0.05)
            moment = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            again, _ = wait_for_step(folder, 0, moment + 0.3)
            took.append(again - moment)
            target = max(step for step, _, _ in diary(folder)) + 3
        workers = [wait_for_step(folder, target, moment, rank)[1] for rank in (0, 1)]
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 130, err
        assert are_gone(workers) == []
    assert err.count("signal: ended by SIGKILL, which came from outside") == kills, err
    assert "Traceback" not in out + err
    checkpoint = Checkpoint.latest_in(folder / "runs" / "launched" / "checkpoints")
    assert checkpoint is not None
    saved = f"the checkpoint of step {checkpoint.step} is saved, and the same command goes on from there"
    assert err.rstrip().splitlines()[-1] == f"drivetrain: stopped by SIGINT; {saved}"
    assert diary(folder)[-1][0] == checkpoint.step < steps  # nothing is lost, and something is left
    assert max(took) < limit_seconds, took
    assert set(victims) == {0, 1}
    return steps


def launch_again(folder: Path, steps: int) -> None:
    done = launch(folder, str(SCRIPT), str(folder), str(steps), PAUSE="0")
    assert done.code == 0, done.err
    assert "going on from step" in done.out
    assert f"finished {steps}" in done.out


def check_restarts(
    pool: GlooPool, tmp_path: Path, kills: int, limit_seconds: float, goes_on: Callable[[Path, int], Any]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    broken.mkdir()
    steps = kill_again_and_again(broken, kills, limit_seconds)
    goes_on(broken, steps)
    pool.run(train_whole, str(whole), steps, world=2)
    assert weights(broken) == weights(whole)
    assert losses(broken) == losses(whole)
    logs = broken / "runs" / "launched" / "logs"
    assert len(list(logs.glob("attempt-*/rank-0.log"))) == kills + 1
    assert not (broken / "runs" / "launched" / "crash.json").exists()


def train_whole(folder: str, steps: int) -> None:
    train(Path(folder), steps)


def test_two_restarts_and_ctrl_c_to_the_same_bits(gloo_pool, tmp_path: Path) -> None:
    """As if nothing had happened, whichever rank was killed; in a world that nothing was launched in."""

    def goes_on(folder: Path, steps: int) -> None:  # here and not launched: that takes two processes more to start
        gloo_pool.run(train_whole, str(folder), steps, world=2)

    check_restarts(gloo_pool, tmp_path, 2, 150, goes_on)  # the machine may be busy; the promise is held below


@pytest.mark.soak
def test_thirty_restarts_in_a_row_within_15_seconds_each(gloo_pool, tmp_path: Path) -> None:
    check_restarts(gloo_pool, tmp_path, 30, 15, launch_again)


@pytest.mark.soak
def test_ranks_that_do_not_mean_the_same_are_told_before_a_model_is_made(tmp_path: Path) -> None:
    """Rank 1 has fewer samples: the preflight says so, once, and nothing is started again."""
    text = SCRIPT.read_text().replace(
        "inputs = torch.randn(96", "inputs = torch.randn(96 - 6 * int(os.environ['RANK'])"
    )
    text = text.replace("model=lambda: ", "model=lambda: print('made a model') or ")
    path = tmp_path / "job.py"
    path.write_text(text)
    done = launch(tmp_path, str(path), str(tmp_path), "4")
    assert done.code == 1
    assert "made a model" not in done.out
    assert "has another data set than rank 0" in done.err
    assert "num_samples is 90 there and 96 on rank 0" in done.err
    assert "remedy" in done.last_lines[-1]
    assert "Traceback" not in done.err


SEVERAL = """
import sys
import torch
import drivetrain as dt

x, y = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
for number in range(6):
    job = dt.Job(
        name=f"run-{number}",
        model=lambda: torch.nn.Linear(8, 3),
        data=torch.utils.data.TensorDataset(x, y),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=16,
        epochs=1,
    )
    dt.train(job, dt.configure(output_dir=sys.argv[1], report=False), quiet=True)
"""


def test_a_script_may_train_several_times(tmp_path: Path) -> None:
    """Each run makes process groups and closes them; ranks are never quite equally fast in that."""
    script = tmp_path / "several.py"
    script.write_text(SEVERAL)
    done = launch(tmp_path, str(script), str(tmp_path / "runs"), forks=True)
    assert done.code == 0, done.err
    assert sorted(path.parent.name for path in (tmp_path / "runs").glob("*/finished.json")) == [
        f"run-{number}" for number in range(6)
    ]
