"""Packed, grouped and LoRA jobs: `prove` finds nothing, and runs that are killed go on to the bit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import drivetrain as dt
from drivetrain.proving import Extent
from tests import warm_python
from tests.api.jobs import read
from tests.api.test_kill import Announce, kill_until_finished
from tests.api.test_resume import assert_identical
from tests.hf.test_packing import make_job, run

REPOSITORY = Path(__file__).parents[2]
CHILD = "import sys; from tests.hf.test_exactness import train; train(*sys.argv[1:])"


def train(folder: str, way: str) -> None:
    run(folder, way, 3, hooks=[Announce()], checkpoint_every=2)


def start(folder: Path, way: str) -> warm_python.WarmProcess:
    return warm_python.WarmProcess(["-c", CHILD, str(folder), way], cwd=REPOSITORY, drops_stderr=True)


@pytest.mark.parametrize("way", ["lora, packed", "grouped"])
def test_killed_runs_go_on_to_the_bit(tmp_path: Path, way: str) -> None:
    assert kill_until_finished(partial(start, tmp_path / "whole", way), 0, 1) == 0
    assert kill_until_finished(partial(start, tmp_path / "broken", way), 2, 1, fewest_steps=2) > 0
    assert_identical(read(tmp_path / "broken" / "suite"), read(tmp_path / "whole" / "suite"))


@pytest.mark.parametrize("way", [pytest.param("packed", marks=pytest.mark.soak), "grouped", "lora, packed"])
def test_nothing_is_found_to_prove_against(tmp_path: Path, way: str) -> None:
    extent = Extent(num_steps=4, max_world=2)  # three an epoch
    certificate: Any = dt.prove(make_job(way, global_batch=16), extent=extent, output=tmp_path / "c.json", quiet=True)
    assert certificate.ok, [str(verdict) for verdict in certificate.verdicts]
    assert {check.status for check in certificate.checks} == {"ok"}, certificate.checks
