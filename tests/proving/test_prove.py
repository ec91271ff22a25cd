"""`dt.prove` and `drivetrain prove`: Drivetrain itself as the trainer under test."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import drivetrain as dt
from drivetrain.cli import main
from drivetrain.job import Job
from drivetrain.proving import Case, Extent, Kind
from tests.proving.jobs import mlp, vector_job

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt

generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(30, 3, generator=generator), torch.randint(0, 2, (30,), generator=generator))
job = dt.Job(
    name="scripted",
    model=lambda: nn.Linear(3, 2),
    data=data,
    loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    global_batch=6,
    max_steps=8,
)
dt.train(job)
raise SystemExit("it went on after training")
"""


def test_the_command_proves_the_job_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    assert main(["prove", "train.py", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(Path("runs/scripted/certificate.json").read_text(encoding="utf-8"))
    assert printed["ok"]
    assert printed["facts"]["compared_in"] == "float64"
    whats = {(check["configuration"], check["what"]): check for check in printed["checks"]}
    assert all(check["status"] == "ok" for check in whats.values()), printed["checks"]
    assert whats["1 process, whole batches", "gradient"]["error"] < 1e-12
    configurations = {configuration for configuration, _ in whats}
    assert any("fsdp" in name for name in configurations)
    assert any("kill" in name for name in configurations)
    assert "continued from step 3 of 8" in {check["detail"] for check in printed["checks"]}
    assert [path.name for path in Path("runs/scripted").iterdir()] == ["certificate.json"]
    assert main(["train", "digits", "--name", "scripted", "--max-steps", "2", "--quiet", "--no-report"]) == 0


def test_a_job_that_keeps_state_of_its_own_is_told_from_a_trainer_that_loses_some(tmp_path: Path) -> None:
    class Counting(nn.Module):
        """Grows its noise with every call, in an attribute that no checkpoint sees."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = mlp(), 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            result: torch.Tensor = self.inner(inputs) * (1 + 0.01 * self.calls)
            return result

    extent = Extent(num_steps=12, divisions=False, max_world=1)
    certificate = dt.prove(vector_job(model=Counting), extent=extent, output=tmp_path / "c.json", quiet=True)
    verdict = certificate.verdicts[0]
    assert (verdict.kind, verdict.whose) == (Kind.STATE_NOT_SAVED, "job"), str(verdict)


def test_a_trainer_that_fails_is_said_to_with_its_last_words(tmp_path: Path) -> None:
    def broken(case: Case) -> None:
        raise RuntimeError("no such device")

    extent = Extent(num_steps=4, max_world=1, repeats=False)
    certificate = dt.prove(vector_job(), broken, extent=extent, output=tmp_path / "c.json", quiet=True)
    assert not certificate.ok
    assert certificate.verdicts[0].kind == Kind.FAILED
    assert "no such device" in certificate.verdicts[0].detail


def test_data_that_can_only_be_iterated_is_refused(tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> object:
            return iter([1.0, 2.0])

    with pytest.raises(dt.DrivetrainError, match="samples have no numbers"):
        dt.prove(vector_job(data=Stream(), global_batch=1), output=tmp_path / "c.json", quiet=True)


def test_a_batch_that_grows_is_proven_and_one_that_does_not_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = Extent(max_world=1, only=("micro-batches",), repeats=False, num_steps=10)
    job = vector_job(global_batch={0: 4, 1000: 8})
    certificate = dt.prove(job, extent=extent, output=tmp_path / "c.json", quiet=True)
    assert certificate.ok, certificate.checks
    assert certificate.facts["global_batch"] == {"0": 4, "4": 8}  # soon, so that a short proof sees it
    assert certificate.notes == [
        "a step has 4 samples, 8 after 1,000 steps in the job, and 4 samples, 8 after 4 steps here"
    ]
    monkeypatch.setattr(Job, "batch_sizes", property(lambda job: () if job.name == "prove" else ((0, 4), (1000, 8))))
    certificate = dt.prove(job, extent=extent, output=tmp_path / "c.json", quiet=True)
    assert Kind.GLOBAL_BATCH in {check.verdict.kind for check in certificate.checks if check.verdict}


def test_a_trainer_is_not_blamed_for_frozen_weights_that_follow_in_each_forward(tmp_path: Path) -> None:
    class Taught(nn.Module):
        """Has a teacher, a copy at first, that each forward moves towards the rest."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.teacher = copy.deepcopy(self.inner).requires_grad_(False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for own, other in zip(self.teacher.parameters(), self.inner.parameters(), strict=True):
                own.data.mul_(0.9).add_(other.data, alpha=0.1)
            result: torch.Tensor = self.inner(inputs) + self.teacher(inputs)
            return result

    extent = Extent(num_steps=6, max_world=1, only=("micro-batches",), repeats=False)
    certificate = dt.prove(vector_job(model=Taught), extent=extent, output=tmp_path / "c.json", quiet=True)
    assert not [check for check in certificate.checks if check.status == "failed"]
    (unknown, *_) = [check for check in certificate.checks if check.status == "unknown"]
    assert "how often the loss was called" in unknown.detail
