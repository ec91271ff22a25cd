"""Runs made longer, moved aside, and begun anew after a start that did nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import drivetrain as dt
from drivetrain.commands.monitor import runs_in
from drivetrain.config import configure
from drivetrain.core.errors import DrivetrainError
from drivetrain.run.claiming import ExtendedSchedule
from tests import warm_python
from tests.api.jobs import Trained, Variant, make_job, read
from tests.api.test_resume import CrashingLoss, PlantedError, assert_identical

SHORT = Variant(
    "mlp", torch.float32, global_batch=16, steps=6, dropout=0.3, noisy_items=True, num_samples=60, save_every=4
)
LONG = replace(SHORT, steps=13)  # the seam is in the middle of an epoch


def trained(folder: Path, variant: Variant, settings: dict[str, Any] | None = None, **changes: Any) -> Trained:
    given = {"report": False, "loss_weighting": "samples", **(settings or {})}
    options = {name: changes.pop(name) for name in ("fresh", "extend") if name in changes}
    job = make_job(variant, **{"schedule": dt.Constant(warmup_steps=4), **changes})
    config = configure(output_dir=folder, gpu_mode="cpu", num_workers=0, batch_size=8, **given)
    result = dt.train(job, config, quiet=True, **options)
    return read(result.folder, result.resumed_from)


@pytest.mark.parametrize(
    "schedule",
    [dt.Constant(warmup_steps=8), lambda step: 0.9**step, lambda optimizer: StepLR(optimizer, 3, 0.5)],
    ids=["constant", "function", "torch"],
)
def test_an_extended_run_is_the_one_begun_longer(tmp_path: Path, schedule: Any) -> None:
    whole = trained(tmp_path / "whole", LONG, schedule=schedule)
    trained(tmp_path / "two", SHORT, schedule=schedule)
    second = trained(tmp_path / "two", LONG, schedule=schedule, extend=True)
    assert second.resumed_from == SHORT.steps
    assert_identical(second, whole)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["suite"]


def test_an_extension_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    """By the same command or without the flag; the crash comes before the extension saved anything, and after."""
    whole = trained(tmp_path / "whole", LONG)
    trained(tmp_path / "two", SHORT)
    for at_call, extend in ((3, True), (10, False)):  # the loss is called twice in most steps
        loss = CrashingLoss(make_job(LONG).loss, at_call)
        with pytest.raises(PlantedError):
            trained(tmp_path / "two", LONG, loss=loss, extend=extend)
    assert not (tmp_path / "two" / "suite" / "finished.json").exists()
    last = trained(tmp_path / "two", LONG, extend=True)
    assert last.resumed_from == 8
    assert_identical(last, whole)


COSINE = dt.WarmupCosine(warmup_steps=2, floor=0.1)


def rates(found: Trained) -> list[float]:
    return [row["lr"] / 1e-2 for row in found.rows]


@pytest.mark.parametrize("way", ["floor", "stretch", "rewarm"])
def test_a_schedule_by_length_needs_a_decision(tmp_path: Path, way: str) -> None:
    trained(tmp_path, SHORT, schedule=COSINE)
    before = {path: path.read_bytes() for path in (tmp_path / "suite").glob("*") if path.is_file()}
    with pytest.raises(DrivetrainError, match="depends on the number of steps") as caught:
        trained(tmp_path, LONG, schedule=COSINE, extend=True)
    assert "--extend-schedule" in caught.value.remedy
    assert {path: path.read_bytes() for path in (tmp_path / "suite").glob("*") if path.is_file()} == before
    loss = CrashingLoss(make_job(LONG).loss, 8)
    with pytest.raises(PlantedError):
        trained(tmp_path, LONG, {"extend_schedule": way}, schedule=COSINE, loss=loss)
    found = trained(tmp_path, LONG, schedule=COSINE)  # the folder knows the way
    expected = {
        "floor": [0.1] * 7,
        "stretch": [COSINE.factor(step, 13) for step in range(6, 13)],
        "rewarm": [COSINE.factor(step, 7) for step in range(7)],
    }[way]
    assert rates(found)[:6] == pytest.approx([COSINE.factor(step, 6) for step in range(6)])
    assert rates(found)[6:] == pytest.approx(expected)
    events = [json.loads(line) for line in (tmp_path / "suite" / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["event"] == "extended"]
    assert f"{1e-2 * expected[0]:.3g} in the next" in told["words"]
    assert not [event for event in events if event["event"] == "job changed" and "schedule" in str(event)]


def test_a_rate_of_0_is_not_kept(tmp_path: Path) -> None:
    trained(tmp_path, SHORT, schedule=dt.WarmupCosine())
    with pytest.raises(DrivetrainError, match="learning rate of 0"):
        trained(tmp_path, LONG, {"extend_schedule": "floor"}, schedule=dt.WarmupCosine())


def test_extensions_follow_each_other() -> None:
    from drivetrain.core.run_folder import Extension

    schedule = ExtendedSchedule(COSINE, (Extension(6, 12, 6, "rewarm"), Extension(12, 20, 12, "floor")))
    assert schedule(5) == COSINE.factor(5, 6)
    assert [schedule(6), schedule(11)] == [COSINE.factor(0, 6), COSINE.factor(5, 6)]
    assert schedule(12) == schedule(19) == pytest.approx(0.1)


def test_a_run_that_stopped_early_goes_on(tmp_path: Path) -> None:
    validated = {"valid": make_job(SHORT).data, "valid_every": 2, "early_stopping": dt.EarlyStopping(1, min_delta=9.0)}
    found = trained(tmp_path, SHORT, **validated)
    assert len(found.rows) == 4
    found = trained(tmp_path, LONG, extend=True, **validated)
    assert len(found.rows) == 6  # and one more validation brought nothing


def test_fresh_keeps_the_old_run(tmp_path: Path) -> None:
    first = trained(tmp_path, SHORT)
    second = trained(tmp_path, LONG, fresh=True, seed=9)
    assert second.resumed_from == 0
    assert len(second.rows) == 13
    assert_identical(read(tmp_path / "suite.old-1"), first)
    with pytest.raises(DrivetrainError, match="at once"):
        trained(tmp_path, LONG, fresh=True, extend=True)


def test_a_restart_by_a_launcher_goes_on_with_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = CrashingLoss(make_job(SHORT).loss, 12)
    with pytest.raises(PlantedError):
        trained(tmp_path, SHORT, {"fresh": True}, loss=loss)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert trained(tmp_path, SHORT, {"fresh": True}).resumed_from == 4
    assert not (tmp_path / "suite.old-1").exists()


def test_a_start_that_failed_before_its_first_step_blocks_no_name(tmp_path: Path) -> None:
    with pytest.raises(PlantedError):
        trained(tmp_path, SHORT, loss=CrashingLoss(make_job(SHORT).loss, 1))
    found = trained(tmp_path, SHORT, seed=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["suite"]
    assert len(found.rows) == 6


@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize(
    ("error", "state", "cause"),
    [
        (KeyboardInterrupt(), "stopped", "Ctrl-C before it began"),
        (DrivetrainError("it cannot work", remedy="mend it"), "refused", "it cannot work; remedy: mend it"),
        (PlantedError("planted"), "crashed", "PlantedError: planted"),
    ],
    ids=["interrupted", "refused", "failed"],
)
def test_why_a_run_did_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, state: str, cause: str, driven: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(f"drivetrain.api.{'driven_run' if driven else 'training'}.changes_since_start", fail)
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0)
    model = torch.nn.Linear(1, 1)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), list(torch.ones(8, 1))

    def begin() -> None:
        if driven:
            dt.drive(model, optimizer, data, global_batch=4, epochs=1, config=config, quiet=True)
        else:
            dt.train(make_job(SHORT), config, quiet=True)

    with pytest.raises(type(error)):
        begin()
    (found,) = runs_in(tmp_path)
    assert (found.state, found.step) == (state, 0)
    assert found.cause.startswith(cause)


REFUSED_OR_KILLED = """
import os, signal, sys, torch
import drivetrain as dt
from drivetrain.api import driven_run

def begin(*_, **__):
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise dt.DrivetrainError("it cannot work", remedy="mend it") if sys.argv[2] == "refused" else KeyError("planted")

driven_run.changes_since_start = begin
model = torch.nn.Linear(1, 1)
config = dt.configure(output_dir=sys.argv[1], gpu_mode="cpu", num_workers=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dt.drive(model, optimizer, list(torch.ones(8, 1)), global_batch=4, epochs=1, config=config, quiet=True)
"""


@pytest.mark.parametrize(("first", "state"), [("refused", "refused"), ("failed", "crashed")])
def test_a_start_that_is_killed_is_not_the_one_before(tmp_path: Path, first: str, state: str) -> None:
    """What is recorded of the last start is no longer the news once another one has begun."""

    def start(how: str) -> tuple[str, str]:
        warm_python.run(["-c", REFUSED_OR_KILLED, str(tmp_path), how])
        (found,) = runs_in(tmp_path)
        return found.state, found.cause

    assert start(first)[0] == state
    killed, cause = start("killed")
    assert killed == "crashed"
    assert cause.startswith("its process ended without a word")
    assert start("refused")[0] == "refused"


def test_a_driven_loop_is_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def drive(folder: Path, max_steps: int, **options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = list(torch.arange(48.0).reshape(12, 4) / 48)
        config = configure(output_dir=folder, gpu_mode="cpu", report=False)
        run = dt.drive(model, optimizer, data, global_batch=5, max_steps=max_steps, config=config, **options)
        for batch in run:
            run.backward(run.model(batch).square().mean())
            run.step()
        return model.weight.detach().clone()

    whole = drive(tmp_path / "whole", 9)
    drive(tmp_path / "two", 4)
    assert torch.equal(drive(tmp_path / "two", 9, extend=True), whole)
    assert "extended   from 4 to 9 steps" in capsys.readouterr().out
    assert torch.equal(drive(tmp_path / "two", 9, fresh=True), whole)
    assert (tmp_path / "two" / "drive.old-1").exists()
