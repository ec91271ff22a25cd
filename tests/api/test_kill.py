"""kill -9 at random moments, again and again: what comes out in the end is what would have come without."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drivetrain import StepContext
from tests import warm_python
from tests.api.jobs import read, run
from tests.api.test_resume import BASE, MICRO_BATCH, assert_identical
from tests.checkpoint.frozen_runs import Adapted

REPOSITORY = Path(__file__).parents[2]
CHILD = "import sys; from tests.api.test_kill import train; train(*sys.argv[1:])"


class Announce:
    """Says each step aloud, so that the killer knows how far it is."""

    every = 1

    def __call__(self, context: StepContext) -> None:
        if context.world.is_main:
            print(f"step {context.step}", flush=True)
        time.sleep(0.01)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def train(folder: str, kind: str = "trained") -> None:
    """`frozen`: most weights are, and are stored apart from the checkpoints."""
    changes = {"model": Adapted} if kind == "frozen" else {}
    run(folder, replace(BASE, steps=14), MICRO_BATCH, num_workers=1, hooks=[Announce()], checkpoint_every=2, **changes)


def start(folder: Path, kind: str) -> warm_python.WarmProcess:
    return warm_python.WarmProcess(["-c", CHILD, str(folder), kind], cwd=REPOSITORY, drops_stderr=True)


def kill_until_finished(
    start: Callable[[], warm_python.WarmProcess], num_kills: int, seed: int, fewest_steps: int = 1
) -> int:
    """Start, wait for a random step and a random moment in it, kill, start again. Returns how many kills it took."""
    chance = random.Random(seed)
    kills = 0
    while True:
        child = start()
        assert child.stdout is not None
        steps_to_go = chance.randint(fewest_steps, 4) if kills < num_kills else 10**9
        for line in child.stdout:
            steps_to_go -= line.startswith("step ")
            if steps_to_go == 0:
                time.sleep(chance.random() * 0.03)
                break
        if steps_to_go > 0:
            assert child.wait(timeout=240) == 0
            return kills
        child.kill()
        child.wait()
        child.stdout.close()
        kills += 1


def check(tmp_path: Path, num_kills: int, seed: int, kind: str = "trained") -> None:
    whole = tmp_path / "whole"
    assert kill_until_finished(partial(start, whole, kind), 0, seed) == 0
    broken = tmp_path / "broken"
    assert kill_until_finished(partial(start, broken, kind), num_kills, seed) > 0
    assert_identical(read(broken / "suite"), read(whole / "suite"))


def test_three_kills(tmp_path: Path) -> None:
    check(tmp_path, 3, seed=1)


def test_a_kill_with_frozen_weights(tmp_path: Path) -> None:
    check(tmp_path, 1, seed=5, kind="frozen")
    assert len(list((tmp_path / "broken" / "suite" / "checkpoints").glob("frozen-*"))) == 1


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["trained", "frozen"])
@pytest.mark.parametrize("seed", range(20))
def test_many_kills(tmp_path: Path, seed: int, kind: str) -> None:
    check(tmp_path, 4, seed, kind)
