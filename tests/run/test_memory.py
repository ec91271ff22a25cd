"""A run that is out of memory goes on with smaller micro-batches, and comes to the same."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from drivetrain import DrivetrainError, every
from drivetrain.api import training
from drivetrain.api.training import train
from drivetrain.checkpoint import Checkpointer
from drivetrain.config import configure
from drivetrain.core.errors import GOES_ON_WITH
from drivetrain.core.world import World
from drivetrain.run import recovery
from drivetrain.run.memory import NoPeakMeter, ResidentPeakMeter, peak_meter
from tests.api.jobs import Variant, make_job, make_model, plain_loop, read, run, vector_loss
from tests.launch.jobs import launch, script

VARIANT = Variant(steps=20, save_every=4)


class Hungry:
    """A loss that needs too much memory for more than `most` samples at once, from some step on."""

    def __init__(self, most: int, after_samples: int = 0, loss: Any = vector_loss) -> None:
        self.most, self.after_samples, self.loss = most, after_samples, loss
        self.num_samples, self.failures = 0, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.num_samples += len(batch[0])
        if self.num_samples > self.after_samples and len(batch[0]) > self.most:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        result: Tensor = self.loss(model, batch)
        return result


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(row) for row in (folder / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


@pytest.mark.parametrize("after_samples", [0, 100, 360], ids=["at once", "before a checkpoint", "after one"])
def test_it_comes_to_what_whole_batches_come_to(tmp_path: Path, after_samples: int, capfd: Any) -> None:
    losses, weights = plain_loop(VARIANT)
    loss = Hungry(8, after_samples)
    found = run(str(tmp_path), VARIANT, loss=loss)
    assert found is not None
    assert loss.failures == 2, "32 samples, then 16"
    assert [row["step"] for row in found.rows] == list(range(1, 21))
    np.testing.assert_allclose(found.losses, losses, rtol=0, atol=1e-12)
    for name, value in weights.items():
        np.testing.assert_allclose(found.weights[name], value, rtol=0, atol=1e-12)
    told = events(tmp_path / "suite", "micro-batch capped")
    assert told[-1]["micro_batch"] == 8
    choice = yaml.safe_load((tmp_path / "suite" / "plan.yaml").read_text())["choices"]["batch.size"]
    assert (choice["value"], choice["why"]) == (8, "micro-batches of 16 samples or more ran out of memory")
    words = "out of memory with micro-batches of 16 samples: going on with half as many from the beginning"
    if after_samples:
        words = "with micro-batches of 16 samples: it is repeated with 8, and a step stays what it was"
    assert words in capfd.readouterr().err
    assert found.resumed_from == 0


def test_the_cap_holds_for_later_starts(tmp_path: Path) -> None:
    class Interrupted(Hungry):
        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            if self.num_samples > 500:
                raise KeyError("planted")
            return super().__call__(model, batch)

    with pytest.raises(KeyError):
        run(str(tmp_path), VARIANT, loss=Interrupted(16))
    loss = Hungry(16)
    assert run(str(tmp_path), VARIANT, loss=loss) is not None
    assert not loss.failures
    assert json.loads((tmp_path / "suite" / "memory.json").read_text())["micro_batch"] == 16


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cap cannot be written; everything else can."""

    def refused(path: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(recovery, "write_atomically", refused)


@pytest.mark.parametrize("after_samples", [0, 200])
@pytest.mark.usefixtures("full_disk")
def test_a_cap_that_cannot_be_kept_is_told_and_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], after_samples: int
) -> None:
    losses, _ = plain_loop(VARIANT)
    found = run(str(tmp_path), VARIANT, loss=(loss := Hungry(8, after_samples)))
    assert found is not None
    assert loss.failures == 2, "32, 16"
    np.testing.assert_allclose(found.losses, losses, rtol=0, atol=1e-12)
    told = [line for line in capfd.readouterr().err.splitlines() if "memory.json" in line]
    assert len(told) == 2
    assert "No space left on device" in told[-1]
    assert "--batch-size 8" in told[-1]
    assert not (tmp_path / "suite" / "memory.json").exists()


@pytest.mark.usefixtures("full_disk")
def test_without_the_cap_another_start_is_told_the_batch_size(tmp_path: Path) -> None:
    def hungry(context: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        run(str(tmp_path), VARIANT, hooks=[every(1, hungry)], model=make_model(VARIANT))
    notes = "".join(raised.value.__notes__)
    assert "Start it again with --batch-size 16" in notes
    assert "by itself" not in notes
    assert not hasattr(raised.value, GOES_ON_WITH), "the supervisor would start it again in vain"


def test_the_cap_is_that_of_a_machine(tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match="one sample"):
        run(str(tmp_path), VARIANT, loss=Hungry(0))
    file = tmp_path / "suite" / "memory.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": "another"}))
    assert run(str(tmp_path), VARIANT) is not None
    assert events(tmp_path / "suite", "start")[-1]["micro_batch"] == 32


def test_what_this_process_cannot_make_anew_needs_another_start(tmp_path: Path) -> None:
    """A model that was handed in has learned some steps, and there is no checkpoint yet; a hook runs out of memory."""
    losses, _ = plain_loop(VARIANT)

    def trained(*hooks: Any) -> Any:
        torch.manual_seed(VARIANT.seed)
        return run(str(tmp_path), VARIANT, hooks=list(hooks), model=make_model(VARIANT))

    def hungry(context: Any) -> None:
        if context.step == 3 and not (tmp_path / "suite" / "memory.json").exists():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(every(1, hungry))
    assert "Start it again: it goes on by itself with half as many" in "".join(raised.value.__notes__)
    np.testing.assert_allclose(trained(every(1, hungry)).losses, losses, rtol=0, atol=1e-12)


def test_no_smaller_than_one_sample(tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match="out of memory with one sample at a time") as raised:
        run(str(tmp_path), Variant(steps=4, global_batch=3), loss=Hungry(0))
    assert "--activations recompute" in raised.value.remedy


def test_a_division_that_is_part_of_what_is_learnt_stays(tmp_path: Path) -> None:
    """In-batch negatives: half as many are another loss."""

    def contrastive(model: nn.Module, batch: Any) -> Tensor:
        rows = nn.functional.normalize(model(batch[0]))
        return nn.functional.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))

    loss = Hungry(8, 300, contrastive)
    with pytest.raises(DrivetrainError, match="cannot be made smaller without changing what is learned") as raised:
        train(make_job(VARIANT, loss=loss), configure(output_dir=tmp_path, gpu_mode="cpu", report=False), quiet=True)
    assert "LossSum" in raised.value.remedy


def test_other_errors_are_raised_as_they_are(tmp_path: Path) -> None:
    def failing(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        run(str(tmp_path), VARIANT, loss=failing)
    assert not (tmp_path / "suite" / "memory.json").exists()


SCRIPT = """
import sys
import torch
import drivetrain as dt
from tests.run.test_memory import VARIANT, Hungry
from tests.api.jobs import make_job

class OnOneRank(Hungry):
    def __call__(self, model, batch):
        import torch.distributed as dist
        self.most = 4 if dist.get_rank() == 1 else 999
        return super().__call__(model, batch)

job = make_job(VARIANT, loss=OnOneRank(4, 100))
dt.train(job, dt.configure(output_dir=sys.argv[1], gpu_mode="cpu", report=False, loss_weighting="samples"))
"""


@pytest.mark.soak
def test_ranks_start_again_with_smaller_ones(tmp_path: Path) -> None:
    done = launch(tmp_path, "--max-restarts", "4", str(script(tmp_path, SCRIPT)), str(tmp_path / "out"))
    assert done.code == 0, done.err
    losses, weights = plain_loop(VARIANT)
    found = read(tmp_path / "out" / "suite")
    np.testing.assert_allclose(found.losses, losses, rtol=0, atol=1e-12)
    for name, value in weights.items():
        np.testing.assert_allclose(found.weights[name], value, rtol=0, atol=1e-12)
    checkpoint = Checkpointer(tmp_path / "out" / "suite" / "checkpoints", World()).latest()
    assert checkpoint is not None
    assert checkpoint.meta["plan"]["way"]["micro_batch"] == 4


def test_before_there_is_a_folder_it_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(training, "settle_global_batch", fail)
    with pytest.raises(torch.OutOfMemoryError):
        run(str(tmp_path), VARIANT)


def test_the_size_that_ran_out_is_named(tmp_path: Path) -> None:
    """Half of 15 is 7, and twice 7 is not 15."""
    run(str(tmp_path), Variant(steps=2, global_batch=15), loss=Hungry(7))
    (told,) = events(tmp_path / "suite", "micro-batch capped")
    assert told["micro_batch"] == 7
    assert told["words"] == "micro-batches of 15 samples or more ran out of memory"


MB = 10**6


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count is Linux's")
def test_resident_memory_is_seen_and_forgotten() -> None:
    meter = peak_meter(torch.device("cpu"))
    assert isinstance(meter, ResidentPeakMeter)
    assert meter.is_coarse
    held = torch.ones(25 * MB)
    meter.reset()
    big = torch.ones(50 * MB)
    del big
    small = torch.ones(10 * MB)
    assert meter.peak_bytes() == pytest.approx(200 * MB, abs=20 * MB), "the most at once, above what was held before"
    meter.reset()
    assert meter.peak_bytes() < 20 * MB
    del held, small


def test_where_nobody_counts() -> None:
    meter = NoPeakMeter()
    meter.reset()
    assert meter.peak_bytes() == 0
