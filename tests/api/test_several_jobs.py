"""Scripts that train several jobs in turn: after an interruption, those that are finished are not trained again."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain as dt
from drivetrain.api.training import configured
from drivetrain.run import session
from tests import warm_python


class PlantedError(Exception):
    """An interruption."""


class Interrupts(dt.Hook):
    every = 1

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, context: dt.StepContext) -> None:
        if context.step == self.at:
            raise PlantedError


class Ends(dt.Hook):
    every = 1

    def __call__(self, context: dt.StepContext) -> dt.Verdict:
        return dt.Verdict(stop=context.step == 3)


@contextmanager
def started(monkeypatch: pytest.MonkeyPatch, folder: Path, target: str = "jobs.py") -> Iterator[None]:
    """Be in a process of its own that runs a script."""
    monkeypatch.setattr(session, "_claimed", [])
    with configured(dt.configure(output_dir=folder, gpu_mode="cpu", report=False), target):
        yield


def trained(name: str, hooks: Any = (), config: dt.Config | None = None, **changes: Any) -> dt.Result:
    data = torch.linspace(0, 1, 48, dtype=torch.float64).unsqueeze(1)
    values: dict[str, Any] = {"global_batch": 8, "epochs": 2, "valid": data[:10], **changes}
    return dt.train(
        dt.Job(
            name=name,
            model=lambda: nn.Linear(1, 1).double(),
            data=data,
            loss=lambda model, batch: (model(batch) - 2 * batch).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            hooks=hooks,
            **values,
        ),
        config,
    )


def driven(name: str) -> tuple[int, bool]:
    """Return how many batches a loop got, and whether its run is finished."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, number = dt.drive(model, optimizer, torch.ones(16, 1), name=name, global_batch=8, epochs=1), 0
    for batch in run:
        run.backward(model(batch).square().mean())
        run.step()
        number += 1
    return number, run.finished


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_script_goes_on_in_the_job_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first job was trained again, as NAME-2."""
    with started(monkeypatch, tmp_path):
        first = trained("first")
        assert driven("loop") == (2, True)
        ended = trained("ended", [Ends()])
        assert ended.steps == 3
        with pytest.raises(PlantedError):
            trained("last", [Interrupts(4)], checkpoint_every=1)
    capsys.readouterr()
    with started(monkeypatch, tmp_path):
        again = trained("first")
        told = capsys.readouterr()
        assert "first is finished, and last, which this script trained after it, is not" in told.out + told.err
        assert (again.finished, again.steps, again.resumed_from) == (True, 12, 12)
        assert (again.metrics, again.best) == (first.metrics, first.best)
        assert all(map(torch.equal, first.model.parameters(), again.model.parameters()))
        assert driven("loop") == (0, True)
        assert trained("ended", [Ends()]).steps == 3, "a hook ended it"
        last = trained("last", [Interrupts(99)], checkpoint_every=1)
        assert (last.finished, last.resumed_from > 0) == (True, True)
        assert trained("first").folder.name == "first-2", "the script asks for it once more"
    assert names_in(tmp_path) == ["ended", "first", "first-2", "last", "loop"]
    with started(monkeypatch, tmp_path):
        assert trained("ended", [Ends()]).folder.name == "ended-2", "nothing was interrupted"


def test_what_is_not_the_same_script_or_job_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(monkeypatch, tmp_path):
        trained("first")
        with pytest.raises(PlantedError):
            trained("last", [Interrupts(4)])
    with started(monkeypatch, tmp_path, "other.py"):
        assert trained("first").folder.name == "first-2"
    with started(monkeypatch, tmp_path, ""):
        assert trained("first").folder.name == "first-3"
    with started(monkeypatch, tmp_path):
        assert trained("first", epochs=3).folder.name == "first-4"
        assert trained("first").folder.name == "first"
    for checkpoint in (tmp_path / "first" / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / f"moved-{checkpoint.name}")
    with started(monkeypatch, tmp_path):
        assert trained("first").folder.name == "first-5", "its weights are gone"


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.api.test_several_jobs import trained
import drivetrain as dt

for name in ("first", "second", "third"):
    trained(name, config=dt.configure(output_dir=Path("runs"), gpu_mode="cpu", report=False))
    if name != "third" and not Path(f"killed after {name}").exists():
        Path(f"killed after {name}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_script_that_is_killed_between_two_jobs_trains_none_again(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(KILLED)
    for code, names, words in (
        (-signal.SIGKILL, ["first"], []),
        (-signal.SIGKILL, ["first", "second"], ["first is finished, and this script was killed before its end: "]),
        (
            0,
            ["first", "second", "third"],
            [
                "first is finished, and this script was killed before its end, after second: ",
                "second is finished, and this script was killed before its end: ",
            ],
        ),
    ):
        done = warm_python.run(["jobs.py"], cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert names_in(tmp_path / "runs") == names
        assert done.stderr.count("is not trained again") + done.stdout.count("is not trained again") == len(words)
        assert all(each in done.stderr + done.stdout for each in words)
    with pytest.MonkeyPatch.context() as patch, started(patch, tmp_path / "runs", str(tmp_path / "jobs.py")):
        patch.setattr(sys, "argv", ["jobs.py"])
        assert trained("first").folder.name == "first-2", "it has come to its end"
