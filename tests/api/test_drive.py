"""A loop of one's own is as exact as `train`: the same bits on one process, the same to rounding on several."""

import copy
import difflib
import functools
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import drivetrain as dt
from drivetrain.api.driven_run import DrivenRun
from drivetrain.api.driving import Drive, drive
from drivetrain.checkpoint import Checkpoint, Checkpointer
from drivetrain.config import configure
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.core.world import World
from drivetrain.job import _groups
from tests import warm_python
from tests.api.jobs import Trained, Variant, make_job, make_model, plain_loop, read, run
from tests.api.test_equivalence import CASES, but_soak, difference
from tests.api.test_resume import BASE, MICRO_BATCH, PlantedError, assert_identical, call_in, run_until_crash
from tests.gloo_pool import GlooPool

Settings = dict[str, Any]


def start(
    folder: str, variant: Variant, micro_batch: int | None = None, settings: Settings | None = None, **changes: Any
) -> Drive:
    """The job of the other suites, as somebody with a loop of their own would set it up."""
    torch.manual_seed(variant.seed)
    job = make_job(variant)
    model = changes.pop("model", None) or make_model(variant)
    optimizer = changes.pop("optimizer", None) or torch.optim.AdamW(
        _groups([*model.parameters()], job.weight_decay), lr=1e-2
    )
    values: Settings = {
        "name": "suite",
        "global_batch": variant.global_batch,
        "max_steps": variant.steps,
        "seed": variant.seed,
        "schedule": job.schedule,
        "clip_norm": job.clip_norm,
        "checkpoint_every": job.checkpoint_every,
    }
    config = configure(**{
        "output_dir": folder, "gpu_mode": "cpu", "num_workers": 0, "batch_size": micro_batch, "report": False,
        **(settings or {}),
    })  # fmt: skip
    data = changes.pop("data", job.data)
    return drive(model, optimizer, data, config=config, **{"quiet": True, **values, **changes})


def looped(
    folder: str, variant: Variant, micro_batch: int | None = None, settings: Settings | None = None
) -> Trained | None:
    """To the end. The main rank returns what came of it."""
    loss = make_job(variant).loss
    going = start(folder, variant, micro_batch, settings)
    for batch in going:
        going.backward(loss(going.model, batch))
        going.step()
    assert going.finished
    return read(going.folder, going.resumed_from) if going.world.is_main else None


# The same as `train`


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize("micro_batch", [32, 8, 7])
def test_bit_identical_to_train_on_one_process(tmp_path: Path, kind: str, micro_batch: int) -> None:
    """Dropout, noisy items, a ragged last batch, accumulation; a mean (mlp), unequal counts of tokens (transformer)."""
    variant = Variant(kind, torch.float32, steps=14, dropout=0.3, noisy_items=True, save_every=5)
    trained = run(str(tmp_path / "train"), variant, micro_batch)
    driven = looped(str(tmp_path / "drive"), variant, micro_batch)
    assert trained is not None
    assert driven is not None
    assert_identical(driven, trained)


def test_bit_identical_to_train_in_bf16(tmp_path: Path) -> None:
    variant = Variant("transformer", torch.float32, steps=8, dropout=0.1)
    trained = run(str(tmp_path / "train"), variant, 8, settings={"precision": "bf16"})
    driven = looped(str(tmp_path / "drive"), variant, 8, {"precision": "bf16"})
    plain = looped(str(tmp_path / "fp32"), variant, 8)
    assert trained is not None
    assert driven is not None
    assert plain is not None
    assert_identical(driven, trained)
    assert driven.losses != plain.losses


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize(
    "case",
    but_soak(
        [case for case in CASES if not case.startswith("1")], "3 processes", "a last batch that leaves ranks empty"
    ),
)
def test_float64_equals_the_plain_loop_on_several_processes(
    gloo_pool: GlooPool, tmp_path: Path, kind: str, case: str
) -> None:
    world, global_batch, micro_batch, num_samples = CASES[case]
    variant = Variant(kind, torch.float64, global_batch, num_samples=num_samples)
    driven = gloo_pool.run(looped, str(tmp_path), variant, micro_batch, world=world)[0]
    of_losses, of_weights = difference(driven, *plain_loop(variant))
    assert of_losses < 1e-10, of_losses
    assert of_weights < 1e-10, of_weights


def wrapped_loop(folder: str, variant: Variant, micro_batch: int, is_inside: bool) -> Trained | None:
    """A script that wraps its model for several processes, and goes on calling the wrapper."""
    loss = make_job(variant).loss
    torch.manual_seed(variant.seed)
    model = make_model(variant)
    optimizer = torch.optim.AdamW(_groups([*model.parameters()], make_job(variant).weight_decay), lr=1e-2)
    wrapper: nn.Module = nn.parallel.DistributedDataParallel(model)
    wrapper = nn.Sequential(wrapper) if is_inside else wrapper
    going = start(folder, variant, micro_batch, model=wrapper, optimizer=optimizer)
    for batch in going:
        going.backward(loss(wrapper, batch))
        going.step()
    return read(going.folder) if going.world.is_main else None


@pytest.mark.parametrize(("micro_batch", "is_inside"), [(16, False), (5, False), (5, True)])
def test_a_model_that_the_script_wrapped_in_ddp(
    gloo_pool: GlooPool, tmp_path: Path, micro_batch: int, is_inside: bool
) -> None:
    """Its own reduction averaged gradients that were reduced once more."""
    driven = gloo_pool.run(wrapped_loop, str(tmp_path), Variant(), micro_batch, is_inside, world=2)[0]
    driven = replace(driven, weights={name.replace("0.module.", "", 1): it for name, it in driven.weights.items()})
    of_losses, of_weights = difference(driven, *plain_loop(Variant()))
    assert of_losses < 1e-10, of_losses
    assert of_weights < 1e-10, of_weights


def sharded_by_the_script(folder: str) -> str:
    model = make_model(Variant())
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        start(folder, Variant(), 8, model=model, optimizer=optimizer)
    except DrivetrainError as error:
        return f"{error}"
    return ""


def test_a_model_that_the_script_sharded_is_refused(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """It ended with torch's words on mixed tensors."""
    for words in gloo_pool.run(sharded_by_the_script, str(tmp_path), world=2):
        assert "cut into shards already" in words
        assert "--parallel-strategy fsdp" in words


def mean_of_means(folder: str, variant: Variant, micro_batch: int) -> Trained | None:
    """What a loop does that hands in a mean where items are not samples."""
    loss = make_job(variant).loss
    going = start(folder, variant, micro_batch)
    for batch in going:
        found: Any = loss(going.model, batch)
        going.backward(found.total / found.count)
        going.step()
    return read(going.folder) if going.world.is_main else None


def averaged_loop(folder: str, kind: str) -> dict[str, Tensor] | str:
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    models: dict[str, nn.Module] = {"net": net}
    trained = list(net.parameters())
    if kind == "average":
        models["average"] = torch.optim.swa_utils.AveragedModel(net)
    elif kind == "head":
        trained = list(net[2].parameters())
    elif kind == "unused":
        models["other"] = nn.Linear(3, 1).double()
        trained += models["other"].parameters()
    config = dt.configure(output_dir=folder, gpu_mode="cpu", report=False)
    data = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sgd = torch.optim.SGD(trained, lr=0.1)
    going = dt.drive(models, sgd, data, name="averaged", global_batch=4, epochs=1, config=config)
    try:
        for batch in going:
            where = "backward"
            going.backward((net(batch) - batch.sum(1, keepdim=True)).square().mean())
            where = "step"
            going.step()
            if kind == "average":
                models["average"].update_parameters(net)  # type: ignore[operator]
    except DrivetrainError as error:
        return f"in run.{where}: {error.message}"
    assert all(it.requires_grad for model in models.values() for it in model.parameters())
    return {name: value.clone() for name, value in nn.ModuleDict(models).state_dict().items()}


@pytest.mark.parametrize("kind", ["average", "head"])
def test_weights_in_no_optimizer_are_not_waited_for(gloo_pool: GlooPool, tmp_path: Path, kind: str) -> None:
    """An average given to the run as a model ended it: the loop was said to have changed gradients."""
    expected = averaged_loop(str(tmp_path / "one"), kind)
    assert isinstance(expected, dict)
    for found in gloo_pool.run(averaged_loop, str(tmp_path / "two"), kind, world=2):
        assert isinstance(found, dict), found
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


def test_weights_that_the_loss_leaves_out_are_named(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """In `run.step` a rank waited for one that was still in the backward, where they left out other weights each."""
    for message in gloo_pool.run(averaged_loop, str(tmp_path), "unused", world=2):
        assert "in run.backward: no gradient reached other.weight" in message


def test_a_planted_mean_of_means_is_caught(gloo_pool: GlooPool, tmp_path: Path) -> None:
    variant = Variant("transformer")
    driven = gloo_pool.run(mean_of_means, str(tmp_path), variant, 8, world=2)[0]
    assert difference(driven, *plain_loop(variant))[0] > 1e-6


# Stopping and going on


@dataclass(frozen=True)
class Stop:
    """Where a loop is left: at which step (from 0) and batch of it, before or after what, and how."""

    step: int
    micro: int = 0
    when: str = "after step"  # or "before backward", "before step"
    how: str = "break"  # or "error", "stop"


def looped_until(folder: str, variant: Variant, stop: Stop, num_workers: int = 0) -> tuple[int, bool]:
    """The steps that were done, and whether the job was finished."""
    loss = make_job(variant).loss
    going = start(folder, variant, MICRO_BATCH, {"num_workers": num_workers})
    place = (-1, -1)

    def leaves(when: str) -> bool:
        return when == stop.when and place == (stop.step, stop.micro)

    try:
        for batch in going:
            place = (going.steps, place[1] + 1 if place[0] == going.steps else 0)
            found = loss(going.model, batch)
            if leaves("before backward"):
                break
            going.backward(found)
            if leaves("before step"):
                break
            going.step()
            if leaves("after step"):
                if stop.how == "break":
                    break
                if stop.how == "error":
                    raise PlantedError
                if going.world.rank == going.world.size - 1:  # one rank's wish is enough
                    going.stop()
    except PlantedError:
        pass
    return going.steps, going.finished


LAST = -1
STOPS = {
    "after a step, by break": Stop(4),
    "after a step, by an error": Stop(4, how="error"),
    "after an epoch's last step": Stop(3),
    "inside an accumulation window": Stop(5, micro=1),
    "before backward": Stop(5, micro=1, when="before backward"),
    "between backward and step": Stop(6, when="before step"),
    "in the first step": Stop(0, when="before step"),
    "asked to": Stop(4, how="stop"),
}


def at_last_micro(stop: Stop, world: int) -> Stop:
    """`run.step()` acts with the last batch of a step: leave after that one, unless another was named."""
    if stop.when != "after step" or stop.micro:
        return stop
    samples = 12 if stop.step % 4 == 3 else 16
    return replace(stop, micro=ceil(ceil(samples / world) / MICRO_BATCH) - 1)


@pytest.fixture(scope="module")
def whole(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Trained]:
    """What a loop that is never left comes to, in a world of a size."""

    @functools.cache
    def loop_in(world: int) -> Trained:
        folder = str(tmp_path_factory.mktemp("whole"))
        trained: Trained = gloo_pool.run(looped, folder, BASE, MICRO_BATCH, world=world)[0]
        return trained

    return loop_in


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", STOPS)
def test_bit_identical_after_every_kind_of_stop(
    gloo_pool: GlooPool, whole: Callable[[int], Trained], tmp_path: Path, name: str, world: int
) -> None:
    stop = at_last_micro(STOPS[name], world)
    left = gloo_pool.run(looped_until, str(tmp_path / "broken"), BASE, stop, world=world)
    assert len(set(left)) == 1
    assert not left[0][1]
    mended = gloo_pool.run(looped, str(tmp_path / "broken"), BASE, MICRO_BATCH, world=world)[0]
    assert mended.resumed_from == left[0][0], "every whole step was saved"
    assert_identical(mended, whole(world))


def test_resumed_with_loader_workers(tmp_path: Path) -> None:
    whole = looped(str(tmp_path / "whole"), BASE, MICRO_BATCH)
    assert looped_until(str(tmp_path / "broken"), BASE, Stop(5, micro=1), num_workers=2) == (5, False)
    mended = looped(str(tmp_path / "broken"), BASE, MICRO_BATCH, {"num_workers": 2})
    assert whole is not None
    assert mended is not None
    assert mended.resumed_from == 5
    assert_identical(mended, whole)


class Followed(nn.Module):
    """A student with a weight that the loop clamps, and a teacher that the loop moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student = make_model(BASE)
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("moved", torch.zeros(()))


def followed(folder: Path, leave: Callable[[Drive], bool] = lambda going: False) -> dict[str, Tensor]:
    """Do what a step is followed by after `run.step()`, as most loops have it, and not in a hook."""
    torch.manual_seed(5)
    model = Followed()
    going = start(
        str(folder), BASE, 8, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), checkpoint_every=1
    )
    for inputs, labels in going:
        if leave(going):
            break
        student, teacher = model.student(inputs) * model.scale, model.teacher(inputs)
        going.backward(
            nn.functional.cross_entropy(student, labels) + nn.functional.mse_loss(student, teacher.softmax(1))
        )
        going.step()
        if going.accumulating:
            continue
        with torch.no_grad():
            model.scale.clamp_(0.99, 1.001)
            model.get_buffer("moved").add_(1)
            for ours, theirs in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                ours.data.mul_(0.8).add_(theirs.data, alpha=0.2)
        if leave(going):
            break
    if going.finished:
        assert_equal(torch.load(going.export(folder / "weights.pt")), model.state_dict())
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("where", ["after the step", "in the next one"])
def test_what_the_loop_does_after_a_step_is_in_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, is_killed: bool
) -> None:
    whole = followed(tmp_path / "whole")
    if is_killed:  # as where the process is killed: what was not saved by then is lost
        monkeypatch.setattr(DrivenRun, "_save_alone", lambda self: None)
    begins = where == "in the next one"
    followed(tmp_path / "broken", lambda going: going.steps == 4 and begins != bool(going._is_stepped))
    monkeypatch.undo()
    checkpoint = Checkpointer(tmp_path / "broken" / "suite" / "checkpoints", World()).latest()
    assert checkpoint is not None
    assert checkpoint.step == (3 if is_killed and not begins else 4)
    assert_equal(followed(tmp_path / "broken"), whole)


def assert_equal(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


def test_another_world_goes_on(gloo_pool: GlooPool, tmp_path: Path) -> None:
    variant = replace(BASE, dtype=torch.float64, dropout=0.0)
    whole = gloo_pool.run(looped, str(tmp_path / "whole"), variant, MICRO_BATCH, world=1)[0]
    gloo_pool.run(looped_until, str(tmp_path / "b"), variant, at_last_micro(Stop(4), 2), world=2)
    moved = gloo_pool.run(looped, str(tmp_path / "b"), variant, MICRO_BATCH, world=3)[0]
    assert moved.resumed_from == 5
    assert moved.losses == pytest.approx(whole.losses, abs=1e-10)


class Normed(nn.Module):
    """Its buffers change with every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.norm(self.first(inputs))))
        return result


NORMED = Variant(global_batch=24, steps=10, num_samples=96, save_every=3)


def trained_normed(folder: str) -> Trained | None:
    return run(folder, NORMED, 4, model=lambda: Normed().double())


def looped_normed(folder: str, leave_in_step: int | None = None) -> Trained | None:
    torch.manual_seed(NORMED.seed)
    model = Normed().double()
    going = start(folder, NORMED, 4, model=model)
    for inputs, labels in going:
        loss = nn.functional.cross_entropy(going.model(inputs), labels)
        if going.steps == leave_in_step:
            return None
        going.backward(loss)
        going.step()
    return read(going.folder, going.resumed_from) if going.world.is_main else None


@pytest.mark.parametrize("world", [1, 2, 3])
def test_buffers_are_those_of_train(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    """Ranks that saw other samples have other running means; rank 0's are shared before each step, as DDP does."""
    trained = gloo_pool.run(trained_normed, str(tmp_path / "train"), world=world)[0]
    driven = gloo_pool.run(looped_normed, str(tmp_path / "drive"), world=world)[0]
    assert driven.losses == pytest.approx(trained.losses, abs=1e-10)
    for key, value in trained.weights.items():
        assert np.allclose(driven.weights[key], value, rtol=0, atol=1e-10), key


def test_buffers_of_half_a_step_are_not_saved(tmp_path: Path) -> None:
    """A forward has changed the running means: what was whole last is the checkpoint of step 3."""
    whole = looped_normed(str(tmp_path / "whole"))
    assert looped_normed(str(tmp_path / "broken"), leave_in_step=5) is None
    mended = looped_normed(str(tmp_path / "broken"))
    assert whole is not None
    assert mended is not None
    assert mended.resumed_from == 3
    assert_identical(mended, whole)


def test_a_bad_step_is_not_saved(tmp_path: Path) -> None:
    going = start(str(tmp_path), replace(BASE, save_every=50), MICRO_BATCH)
    fourth_is_nan = body(
        backward=lambda going, batch: going.backward(loss_of(going, batch) * (float("nan") if going.steps == 3 else 1))
    )
    with pytest.raises(DrivetrainError, match=r"the loss of step 4 .* is nan"):
        fourth_is_nan(going)
    assert [path.name for path in (going.folder / "checkpoints").iterdir()] == []


def test_weights_that_a_bad_step_made_nan_are_not_the_loops_doing(tmp_path: Path) -> None:
    """NaN is unlike itself: the loop was said to have changed the weights, in place of which step was bad."""
    going = start(str(tmp_path), BASE, MICRO_BATCH)
    first_is_nan = body(
        backward=lambda going, batch: going.backward(loss_of(going, batch) * (1 if going.steps else float("nan")))
    )
    with pytest.raises(DrivetrainError, match=r"the loss of step 1 .* is nan"):
        first_is_nan(going)


# What else happens in a loop


def validate(going: Drive, sample: Tensor) -> None:
    """Somebody's own: draws from all generators, and runs the model."""
    import random

    random.random()
    np.random.rand(3)
    torch.rand(5)
    going.model.eval()
    with torch.no_grad(), going.autocast():
        going.model(sample)
    going.model.train()


def test_a_validation_does_not_disturb_training(tmp_path: Path) -> None:
    whole = looped(str(tmp_path / "whole"), BASE, MICRO_BATCH)
    going = start(str(tmp_path / "validated"), BASE, MICRO_BATCH)
    sample, epochs = torch.randn(5, 6), []
    for batch in going:
        going.backward(nn.functional.cross_entropy(going.model(batch[0]), batch[1]))
        going.step()
        if not going.accumulating and going.steps % 2:
            validate(going, sample)
        if going.ends_epoch:
            epochs.append((going.epoch, going.steps))
    assert whole is not None
    assert_identical(read(going.folder), whole)
    assert epochs == [(0, 4), (1, 8)]


def test_what_a_loop_can_ask(tmp_path: Path) -> None:
    variant = Variant(global_batch=10, steps=3, num_samples=25)
    going = start(str(tmp_path), variant, 4, {"report": True})
    seen = []
    for batch in going:
        assert len(batch[0]) == going.num_samples
        seen.append((going.steps, going.num_samples, going.accumulating, going.epoch))
        going.backward(nn.functional.cross_entropy(going.model(batch[0]), batch[1]))
        going.step()
    assert seen == [
        *[(0, 4, True, 0), (0, 4, True, 0), (0, 2, False, 0)],
        *[(1, 4, True, 0), (1, 4, True, 0), (1, 2, False, 0)],
        *[(2, 4, True, 0), (2, 1, False, 0)],
    ]
    assert going.last is not None
    assert (going.last.step, going.last.samples) == (3, 5)
    assert (going.folder / "report.html").exists()
    from safetensors.torch import load_file

    exported, model = load_file(going.export(tmp_path / "weights.safetensors")), going.model
    assert all(torch.equal(exported[name], value) for name, value in model.state_dict().items())


def test_precision_is_on_between_the_batch_and_backward(tmp_path: Path) -> None:
    going = start(str(tmp_path), Variant(dtype=torch.float32, steps=4), settings={"precision": "bf16"})
    for batch in going:
        assert torch.is_autocast_enabled("cpu")
        loss = nn.functional.cross_entropy(going.model(batch[0]), batch[1])
        if going.steps == 2:
            break
        going.backward(loss)
        assert not torch.is_autocast_enabled("cpu")
        with going.autocast():
            assert going.model(batch[0]).dtype == torch.bfloat16
        going.step()
    assert not torch.is_autocast_enabled("cpu")


def test_model_and_optimizer_are_used_as_they_are(tmp_path: Path) -> None:
    """The same parameters; modes as they were set; an optimizer that has a state already keeps it."""
    model = make_model(Variant(dropout=0.5, dtype=torch.float32))
    model.layers[2].eval()  # type: ignore[index,union-attr,operator]
    before = list(model.parameters())
    optimizer = torch.optim.Adagrad(before, lr=0.1, initial_accumulator_value=0.25)
    going = start(str(tmp_path), Variant(dtype=torch.float32, steps=2), model=model, optimizer=optimizer)
    assert going.model is model
    assert not model.layers[2].training  # type: ignore[index,union-attr]
    assert model.layers[1].training  # type: ignore[index,union-attr]
    assert float(optimizer.state[before[0]]["sum"].min()) == 0.25
    for batch in going:
        going.backward(nn.functional.cross_entropy(going.model(batch[0]), batch[1]))
        going.step()
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert float(optimizer.state[before[0]]["sum"].max()) > 0.25


def test_left_after_the_last_step(tmp_path: Path) -> None:
    """As `zip` of two runs leaves the second: all steps are done, so the run is finished."""
    going = start(str(tmp_path), BASE)
    loss = make_job(BASE).loss
    for batch in going:
        going.backward(loss(going.model, batch))
        going.step()
        if going.steps == BASE.steps:
            break
    assert going.finished
    assert (going.folder / "finished.json").exists()


def test_opened_again_in_one_process(tmp_path: Path) -> None:
    """As a cell of a notebook that is run again, while a traceback still holds the loop of the first."""
    loss = make_job(BASE).loss
    first = start(str(tmp_path), BASE)
    held = iter(first)
    for _ in range(2):
        first.backward(loss(first.model, next(held)))
        first.step()
    second = start(str(tmp_path), BASE)
    assert second.resumed_from == 2
    with pytest.raises(DrivetrainError, match="was opened again"):
        first.backward(torch.zeros(()))
    for batch in second:
        second.backward(loss(second.model, batch))
        second.step()
    assert_identical(read(second.folder, 0), looped(str(tmp_path / "whole"), BASE))


@pytest.mark.parametrize("rate", [0.5, None])
def test_a_model_left_in_evaluation_mode_is_reported(tmp_path: Path, rate: float | None) -> None:
    layers = [nn.Linear(4, 4), *([] if rate is None else [nn.Dropout(rate)])]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    run = drive(model, optimizer, [*torch.ones(12, 4)], global_batch=4, max_steps=3, config=config, quiet=True)
    for batch in run:
        run.backward(run.model(batch).square().mean())
        run.step()
        model.eval()
    notes = [line for line in (run.folder / "events.jsonl").read_text().splitlines() if "in evaluation mode" in line]
    assert len(notes) == (0 if rate is None else 1)


def test_left_with_a_held_iterator(tmp_path: Path) -> None:
    going = start(str(tmp_path), replace(BASE, save_every=50), 16)
    batches = iter(going)
    batch = next(batches)
    going.backward(nn.functional.cross_entropy(going.model(batch[0]), batch[1]))
    going.step()
    going.close()
    assert (going.folder / "checkpoints" / "step-00000001").is_dir()
    again = start(str(tmp_path), replace(BASE, save_every=50), 16)
    assert again.resumed_from == 1
    again.close()


HELD = """
import torch
import drivetrain as dt

model = torch.nn.Linear(2, 1)
config = dt.configure(gpu_mode="cpu", report=False)
run = dt.drive(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(24, 2), name="held", global_batch=4,
               epochs=1, config=config)
batches = iter(run)
while run.steps < 6:
    run.backward(model(next(batches)).square().mean())
    run.step()
    with torch.no_grad():
        model.weight.clamp_(-0.1, 0.1)
"""


def test_a_script_that_holds_the_iterator_at_its_end(tmp_path: Path) -> None:
    """Loops that call `next` never come to the end of their run: it had no last checkpoint, and was not finished."""
    (tmp_path / "held.py").write_text(HELD)
    done = warm_python.run(["held.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ignored" not in done.stderr
    run = tmp_path / "runs" / "held"
    assert (run / "finished.json").exists()
    assert Checkpoint.open(run / "checkpoints" / "step-00000006").read("model/weight").abs().max() <= 0.1


# Errors in words


def body(**parts: Callable[[Drive, Any], Any]) -> Callable[[Drive], None]:
    """A loop with one thing wrong."""

    def loop(going: Drive) -> None:
        for batch in going:
            for name in ("first", "backward", "middle", "step", "last"):
                if name in parts:
                    parts[name](going, batch)
                elif name == "backward":
                    going.backward(nn.functional.cross_entropy(going.model(batch[0]), batch[1]))
                elif name == "step":
                    going.step()

    return loop


def nothing(going: Drive, batch: Any) -> None:
    pass


def loss_of(going: Drive, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(going.model(batch[0]), batch[1])


def change_rate(going: Drive, batch: Any) -> None:
    going._optimizer.param_groups[0]["lr"] *= 0.9


def add_group(going: Drive, batch: Any) -> None:
    going._optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def clip(going: Drive, batch: Any) -> None:
    nn.utils.clip_grad_norm_(going.model.parameters(), 0.01)


def clip_whole(going: Drive, batch: Any) -> None:
    if not going.accumulating:
        clip(going, batch)


def attack(going: Drive, batch: Any) -> None:
    """Look for an adversarial sample, as many scripts do: the gradients of the weights are a by-product."""
    inputs = batch[0].clone().requires_grad_()
    nn.functional.cross_entropy(going.model(inputs), batch[1]).backward()


def learn_more(going: Drive, batch: Any) -> None:
    (2 * loss_of(going, batch)).backward()


def leave_out(going: Drive, batch: Any) -> None:
    next(going.model.parameters()).grad = None


def backward_of_sum(going: Drive, batch: Any) -> None:
    going.backward(dt.LossSum(loss_of(going, batch) * len(batch[1]), len(batch[1])))


def own_backward(going: Drive, batch: Any) -> None:
    loss_of(going, batch).backward()


def two_backwards(going: Drive, batch: Any) -> None:
    """As in many loops of two losses: cleared, and then one backward for each."""
    if not going._micro or not going._micro.number:
        going._optimizer.zero_grad()
    own_backward(going, batch)


def both_backwards(going: Drive, batch: Any) -> None:
    loss = loss_of(going, batch)
    loss.backward()
    going.backward(loss)


def clear_to_zero(going: Drive, batch: Any) -> None:
    going._optimizer.zero_grad(set_to_none=False)


SCALER = torch.amp.GradScaler("cpu")


def scale_loss(going: Drive, batch: Any) -> None:
    scaler = SCALER
    going.backward(scaler.scale(loss_of(going, batch)))


class WithScaler:
    """A trainer class that has its scaler as an attribute."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu")

    def backward(self, going: Drive, batch: Any) -> None:
        going.backward(self.scaler.scale(loss_of(going, batch)))


def update_by_hand(going: Drive, batch: Any) -> None:
    for parameter in going.model.parameters():
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)


def make_scheduler(going: Drive, batch: Any) -> None:
    if not going.steps and not hasattr(going, "scheduler"):
        going.scheduler = torch.optim.lr_scheduler.StepLR(going._optimizer, 1)  # type: ignore[attr-defined]


def step_scheduler(going: Drive, batch: Any) -> None:
    going.scheduler.step()  # type: ignore[attr-defined]


WRONG: dict[str, tuple[Callable[[Drive], None], str]] = {
    "no backward": (body(backward=nothing, step=nothing), r"without run\.backward\(loss\)"),
    "no step": (body(step=nothing), r"without run\.step\(\)"),
    "step first": (body(backward=nothing), r"run\.step\(\) was called before run\.backward\(\)"),
    "backward twice": (body(middle=lambda going, batch: going.backward(loss_of(going, batch))), "called twice"),
    "step twice": (body(last=lambda going, batch: going.step()), "called twice"),
    "no scalar": (body(backward=lambda going, batch: going.backward(going.model(batch[0]))), "not that of a scalar"),
    "no tensor": (body(backward=lambda going, batch: going.backward(1.0)), "returned float"),  # type: ignore[arg-type]
    "no gradient": (
        body(backward=lambda going, batch: going.backward(loss_of(going, batch).detach())),
        "does not depend on any parameter",
    ),
    "optimizer.step": (body(step=lambda going, batch: going._optimizer.step()), r"optimizer\.step\(\) was called"),
    "zero_grad": (body(first=lambda going, batch: going._optimizer.zero_grad()), "gradients were cleared"),
    "zero_grad to zeros": (body(first=clear_to_zero), "gradients were cleared"),
    "a backward of its own": (body(first=own_backward), r"computed gradients before run\.backward\(\)"),
    "a backward for each loss": (body(first=two_backwards), r"computed gradients before run\.backward\(\)"),
    "loss.backward, too": (body(backward=both_backwards), r"computed gradients before run\.backward\(\)"),
    "a GradScaler": (body(backward=scale_loss), "scales its loss with a GradScaler"),
    "a GradScaler of a trainer": (body(backward=WithScaler().backward), "scales its loss with a GradScaler"),
    "an update by hand": (body(middle=update_by_hand), "changed weights before the step was over"),
    "an update by hand after the step": (body(last=update_by_hand), "changed weights before the step was over"),
    "an attack on the inputs": (body(first=attack), r"computed gradients before run\.backward\(\)"),
    "clipping": (body(middle=clip), "has changed gradients before run.step.*depend on the micro-batch"),
    "a gradient left out": (body(middle=leave_out), "has changed gradients before run.step"),
    "clipping a LossSum": (body(backward=backward_of_sum, middle=clip_whole), "divided by the count of the LossSum"),
    "a scheduler of one's own": (body(last=change_rate), "learning rate was changed"),
    "a scheduler of torch": (body(first=make_scheduler, last=step_scheduler), "learning rate was changed"),
    "another group": (body(last=add_group), "changed the optimizer.s groups: there were 2"),
    "next(run)": (body(first=lambda going, batch: next(going)), "a run is no iterator"),
    "another iteration": (body(first=lambda going, batch: next(iter(going))), "iterated over once"),
}


@pytest.mark.parametrize("name", ["a backward of its own", "a backward for each loss", "loss.backward, too"])
def test_gradients_of_the_loop_itself_are_refused_in_whole_batches(tmp_path: Path, name: str) -> None:
    """They were dropped without a word."""
    going = start(str(tmp_path), Variant(steps=4))
    with pytest.raises(DrivetrainError, match=WRONG[name][1]):
        WRONG[name][0](going)


def test_gradients_of_inputs_may_be_computed(tmp_path: Path) -> None:
    """Adversarial examples: the gradients that fall to the weights are cleared, to None or to zeros."""
    expected = looped(str(tmp_path / "plain"), Variant(steps=4))
    going = start(str(tmp_path / "cleared"), Variant(steps=4))
    for number, batch in enumerate(going):
        (loss_of(going, batch) * 3).backward()
        going._optimizer.zero_grad(set_to_none=number % 2 == 0)
        going.backward(loss_of(going, batch))
        going.step()
    found = read(going.folder, going.resumed_from)
    assert expected is not None
    assert found.losses == expected.losses
    going = start(str(tmp_path / "inputs"), Variant(steps=4), 8)
    for batch in going:
        inputs = batch[0].clone().requires_grad_()
        torch.autograd.grad(loss_of(going, (inputs, batch[1])), inputs)
        going.backward(loss_of(going, batch))
        going.step()
    assert going.finished


def test_an_error_in_a_batch_of_one_sample_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that squeezes its outputs runs into it only where a step is divided: 7 samples, in batches of 3."""

    def loop(going: Drive) -> None:
        for batch in going:
            loss = nn.functional.binary_cross_entropy(going.model(batch[0]).sigmoid().squeeze(), batch[1].double())
            going.backward(loss)
            going.step()

    for batch_size, count in ((3, 1), (7, 0)):
        model = nn.Linear(6, 1).double()
        settings: Settings = {"quiet": False, "data": TensorDataset(torch.zeros(14, 6).double(), torch.arange(14) % 2)}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        variant = Variant(global_batch=7, steps=2)
        going = start(
            str(tmp_path / str(batch_size)), variant, batch_size, model=model, optimizer=optimizer, **settings
        )
        if count:
            with pytest.raises(ValueError, match="target size"):
                loop(going)
            going.close()
        else:
            loop(going)
        assert capsys.readouterr().out.count("it was left in a batch of 1 sample") == count


@pytest.mark.parametrize(("name", "count"), [("middle", 1), ("last", 0)])
def test_weights_that_the_loop_changes_before_the_step_are_told_once(
    tmp_path: Path, name: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """An update by hand that stayed in the script counted in addition to the optimizer's. After the step, it may."""
    going = start(str(tmp_path), Variant(steps=4), quiet=False)
    body(**{name: update_by_hand})(going)
    assert going.finished
    assert capsys.readouterr().out.count("changes weights beside the optimizer") == count


def test_an_unused_scaler_and_weights_that_a_forward_changes_are_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values: Settings = {"model": model, "optimizer": optimizer, "data": torch.arange(64) % 9, "quiet": False}
    going = start(str(tmp_path), Variant(), 8, **values)
    for batch in going:
        going.backward(scaler.scale(going.model(batch).square().mean()))
        going.step()
    assert going.finished
    assert "beside the optimizer" not in capsys.readouterr().out


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_loop_is_said(tmp_path: Path, name: str) -> None:
    loop, words = WRONG[name]
    going = start(str(tmp_path), Variant(steps=4), 8)
    with pytest.raises(DrivetrainError, match=words) as caught:
        loop(going)
    assert caught.value.remedy
    assert not torch.is_autocast_enabled("cpu")


CHANGED: dict[str, tuple[dict[str, Callable[[Drive, Any], Any]], str]] = {
    "before": ({"first": attack}, "computed gradients before"),  # DDP reduced them, and not those of the run
    "after": ({"middle": learn_more}, "each process in another way"),
    "alike": ({"middle": clip_whole}, ""),
}


def message_of(folder: str, name: str) -> str:
    going = start(folder, Variant(steps=4), 32)
    try:
        body(**CHANGED[name][0])(going)
    except DrivetrainError as error:
        return error.message
    return ""


@pytest.mark.parametrize("name", CHANGED)
def test_processes_do_not_come_apart_in_silence(gloo_pool: GlooPool, tmp_path: Path, name: str) -> None:
    """In whole steps. In a divided one, gradients must not be changed before the last batch, with one process, too."""
    words = CHANGED[name][1]
    told = gloo_pool.run(message_of, str(tmp_path), name, world=2)
    assert all(words in message if words else not message for message in told), told


def test_gradients_that_are_cleared_before_the_first_batch_of_a_step_do_no_harm(tmp_path: Path) -> None:
    def attack_and_clear(going: Drive, batch: Any) -> None:
        attack(going, batch)
        going.model.zero_grad()

    found = []
    for name, first in (("attacked", attack_and_clear), ("not", nothing)):
        going = start(str(tmp_path / name), Variant(steps=4), 32)
        body(first=first)(going)
        found.append(read(going.folder).weights)
    assert all(np.array_equal(value, found[1][name]) for name, value in found[0].items())


def q_learning(folder: Path, *, is_given: bool, last: int = 99) -> dict[str, Tensor]:
    """A loop with a target network that follows the model: by the loop itself, or as one more model by a hook."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    target = copy.deepcopy(model).requires_grad_(False)

    def follow(_: Any = None) -> None:
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.3)

    models: Any = {"model": model, "target": target} if is_given else model
    going = dt.drive(
        models,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randn(24, 3, dtype=torch.float64),
        name="q",
        global_batch=4,
        epochs=2,
        hooks=[dt.every(1, follow)] if is_given else [],
        config=dt.configure(output_dir=folder, gpu_mode="cpu", report=False),
    )
    for batch in going:
        going.backward((model(batch) - 1 - 0.9 * target(batch)).square().mean())
        going.step()
        if not is_given:
            follow()
        if going.steps == last:
            break
    return dict(model.state_dict())


def test_a_target_network_that_the_loop_keeps_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run began with the target of the first step."""
    expected = q_learning(tmp_path / "kept", is_given=False)
    told = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint holds" in line]
    assert len(told) == 1
    assert "target changes with the steps" in told[0]
    q_learning(tmp_path / "given", is_given=True, last=5)
    found = q_learning(tmp_path / "given", is_given=True)
    assert "no checkpoint holds" not in capsys.readouterr().out
    assert all(torch.equal(found[name], value) for name, value in expected.items())


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of squares": lambda out, batch: (out - batch).square().sum() * 0.5,
    "two terms": lambda out, batch: nn.functional.mse_loss(out, batch, reduction="sum") - 0.1 * torch.sum(out),
    "of rows": lambda out, batch: (out - batch).square().mean(1).sum(),
}
MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda out, batch: (out - batch).square().mean(),
    "divided": lambda out, batch: (out - batch).square().sum() / len(batch),
    "multiplied": lambda out, batch: (out - batch).square().sum() * (1 / len(batch)),
    "with a penalty": lambda out, batch: (out - batch).square().mean() + out.square().sum() * 0.01,
    "of classes": lambda out, batch: ((out - batch).square().mean(0) * torch.tensor([0.5, 0.3, 0.2])).sum(),
}


def summing_loop(
    folder: str, loss: Callable[[Tensor, Tensor], Tensor], micro_batch: int, weighting: str = "auto", last: int = 99
) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    config = dt.configure(
        output_dir=folder, batch_size=micro_batch, loss_weighting=weighting, gpu_mode="cpu", report=False
    )
    data = torch.randn(24, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    going = dt.drive(model, optimizer, data, name="sum", global_batch=8, epochs=2, shuffle=False, config=config)
    for batch in going:
        going.backward(loss(model(batch), batch))
        going.step()
        if going.steps == last:
            break
    return model.weight.detach().clone()


def plainly_summed(loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    data = torch.randn(24, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in (*data.split(8), *data.split(8)):
        optimizer.zero_grad()
        loss(model(batch), batch).backward()
        optimizer.step()
    return model.weight.detach().clone()


def summing_rank(folder: str, name: str) -> Tensor:
    return summing_loop(folder, SUMS[name], 2, "sum")


@pytest.mark.parametrize("name", SUMS)
def test_a_loss_that_is_a_sum(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], gloo_pool: GlooPool
) -> None:
    """Taken for a mean it is told where that matters; asked for, it is the plain loop's on any number of batches."""
    expected = plainly_summed(SUMS[name])
    torch.testing.assert_close(summing_loop(str(tmp_path / "whole"), SUMS[name], 8), expected, rtol=0, atol=1e-12)
    assert "like a sum" not in capsys.readouterr().out
    summing_loop(str(tmp_path / "told"), SUMS[name], 4)
    assert capsys.readouterr().out.count("looks like a sum over its batch") == 1
    found = summing_loop(str(tmp_path / "sum"), SUMS[name], 2, "sum")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert "like a sum" not in capsys.readouterr().out
    for found in gloo_pool.run(summing_rank, str(tmp_path / "ranks"), name, world=2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MEANS)
def test_a_loss_that_is_no_sum(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    summing_loop(str(tmp_path), MEANS[name], 2)
    assert "like a sum" not in capsys.readouterr().out


def test_weights_that_are_normalized_in_each_batch_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loss(out: Tensor, batch: Tensor) -> Tensor:
        weights = batch[:, 0].exp()
        return (weights / weights.sum() * (out - batch).square().mean(1)).sum()

    summing_loop(str(tmp_path), loss, 2)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  loss ")]
    assert len(told) == 1
    assert "weights that add up to 1 in each batch" in told[0]


def test_how_a_loop_weights_its_loss_is_kept(tmp_path: Path) -> None:
    summing_loop(str(tmp_path), SUMS["of rows"], 2, "sum", last=3)
    with pytest.raises(DrivetrainError, match="would change what the run learns"):
        summing_loop(str(tmp_path), SUMS["of rows"], 2, "samples")
    with pytest.raises(DrivetrainError, match="cannot be counted") as caught:
        summing_loop(str(tmp_path / "other"), SUMS["of rows"], 2, "tokens")
    assert "dt.LossSum" in (caught.value.remedy or "")
    resumed = summing_loop(str(tmp_path), SUMS["of rows"], 2)
    torch.testing.assert_close(resumed, plainly_summed(SUMS["of rows"]), rtol=0, atol=1e-12)


class Recurrent(nn.Module):
    """Goes on from the state that it had after the batch before: given by the loop, or in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 1)
        self.register_buffer("state", torch.zeros(1, 4))

    def forward(self, inputs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        before = self.state.clone() if state is None else state
        after = self.cell(inputs, before)
        if state is None:
            self.state.copy_(after.detach())
        return self.head(after), after


def recurrent_loop(folder: Path, *, in_buffer: bool, last: int = 99) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Recurrent().double()
    data = torch.randn(24, 3, dtype=torch.float64)
    state = torch.zeros(1, 4, dtype=torch.float64)
    going = dt.drive(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        name="recurrent",
        global_batch=1,
        epochs=1,
        shuffle=False,
        config=dt.configure(output_dir=folder, gpu_mode="cpu", report=False),
    )
    batches, total = iter(going), 0.0
    for batch in batches:
        if in_buffer:
            result, _ = model(batch)
        else:
            result, state = model(batch, state.detach())
        going.backward((result - batch.mean()).square().mean())
        going.step()
        total += float(result.detach())  # for a log: it is not carried into the loss
        if going.steps == last:
            break
    return {name: value for name, value in model.state_dict().items() if name != "state"}


def test_a_state_that_the_loop_carries_into_the_loss_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run began with an empty one; in a buffer of the model, as the line advises, it is saved."""
    expected = recurrent_loop(tmp_path / "kept", in_buffer=False)
    told = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint holds" in line]
    assert len(told) == 1
    assert "loop       state changes with the steps" in told[0]
    recurrent_loop(tmp_path / "buffer", in_buffer=True, last=10)
    found = recurrent_loop(tmp_path / "buffer", in_buffer=True)
    assert "no checkpoint holds" not in capsys.readouterr().out
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_generators_that_the_loop_draws_from_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run drew the numbers of the first steps again."""
    model = nn.Linear(3, 1).double()
    torchs, numpys, pythons = torch.Generator().manual_seed(0), np.random.default_rng(0), random.Random(0)
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    data, sgd = torch.randn(20, 3, dtype=torch.float64), torch.optim.SGD(model.parameters(), lr=0.1)
    going = dt.drive(model, sgd, data, name="draws", global_batch=4, epochs=1, config=config)
    for batch in going:
        noise = torch.randn(batch.shape, generator=torchs) * numpys.normal() + pythons.random()
        going.backward(model(batch + noise).square().mean())
        going.step()
    told = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint holds" in line]
    assert len(told) == 1
    assert "loop       numpys, pythons, torchs change with the steps" in told[0]


def test_what_a_loop_changes_after_an_epoch_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best value so far, which decides on a file, and a weight of the loss: in the first three steps both stay."""
    model = nn.Linear(3, 1).double()
    data, best, weight, patience = torch.randn(20, 3, dtype=torch.float64), 9.0, 1.0, 5
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    going = dt.drive(model, sgd, data, name="epochs", global_batch=4, epochs=3, config=config)
    for batch in going:
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        going.backward(loss * weight)
        going.step()
        if going.ends_epoch:
            weight *= 0.9
            if loss.item() < best:
                best = loss.item()
                going.export(tmp_path / "best.pt")
            elif patience == 0:
                break
    told = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint holds" in line]
    assert len(told) == 2
    assert "loop       weight changes" in told[0]
    assert "loop       best changes" in told[1]
    assert "valid=…" in told[1]


def counted(folder: Path, data: Any, last: int = 99, **settings: Any) -> tuple[int, int]:
    """Return how many batches a loop was said to get, and how many it got."""
    parts = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]).double()
    sgd = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    optimizer: Any = {"a": sgd[0], "b": sgd[1]} if settings.get("turns") else sgd[0]
    model = parts if settings.get("turns") else parts[0]
    config = dt.configure(output_dir=folder, gpu_mode="cpu", report=False, batch_size=3)
    going = dt.drive(model, optimizer, data, name="counted", quiet=True, config=config, **settings)
    said, number = len(going), 0
    assert going
    for batch in going:
        called = parts[["a", "b"].index(going.turn)] if going.turn else model
        going.backward(called(batch).square().mean())
        going.step()
        number += 1
        if going.steps == last and not going.accumulating:
            break
    assert len(going) == said
    return said, number


def test_the_length_of_a_loop(tmp_path: Path) -> None:
    data = torch.randn(22, 3, dtype=torch.float64)
    assert counted(tmp_path / "epochs", data, global_batch=8, epochs=3) == (24, 24)
    assert counted(tmp_path / "steps", data, global_batch=8, epochs=3, max_steps=4) == (11, 11)
    assert counted(tmp_path / "turns", data, global_batch=8, epochs=1, turns=True) == (16, 16)
    assert counted(tmp_path / "grows", data, global_batch={0: 2, 5: 6}, epochs=2) == (17, 17)
    sampler = WeightedRandomSampler([1.0] * 22, 13)
    loader = DataLoader(list(data), batch_size=4, sampler=sampler, drop_last=True)
    assert counted(tmp_path / "sampler", loader, epochs=2) == (12, 12)
    assert counted(tmp_path / "left", data, 4, global_batch=8, epochs=3) == (24, 11)
    assert counted(tmp_path / "left", data, global_batch=8, epochs=3) == (13, 13)
    with pytest.raises(TypeError, match="no length"):
        counted(tmp_path / "stream", iter(data), global_batch=8, epochs=1)


@pytest.mark.parametrize("micro_batch", [3, 8])
def test_whole_gradients_may_be_changed(tmp_path: Path, micro_batch: int) -> None:
    """What a loop does to them in the last batch of a step is what its own loop did."""
    clipped = []
    for name, clip_norm in (("by hand", None), ("by the run", 0.01)):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        data = TensorDataset(torch.randn(24, 3, dtype=torch.float64), torch.arange(24) % 2)
        config = dt.configure(output_dir=tmp_path / name, batch_size=micro_batch, gpu_mode="cpu", report=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        going = dt.drive(
            model, optimizer, data, name="clipped", global_batch=8, epochs=2, clip_norm=clip_norm, config=config
        )
        for batch in going:
            going.backward(loss_of(going, batch))
            if clip_norm is None:
                clip_whole(going, batch)
            going.step()
        clipped.append(model.weight.detach().clone())
    torch.testing.assert_close(clipped[0], clipped[1], rtol=0, atol=1e-9)


def test_outside_the_loop(tmp_path: Path) -> None:
    going = start(str(tmp_path), Variant(steps=2))
    with pytest.raises(DrivetrainError, match="outside the loop"):
        going.backward(torch.zeros(()))
    with pytest.raises(DrivetrainError, match="outside the loop"):
        going.step()
    going.close()


def test_what_other_trainers_call_a_part_of_a_run(tmp_path: Path) -> None:
    going = start(str(tmp_path), Variant(steps=4), 8)
    for name, words in (
        ("device", r"run\.world\.device"),
        ("save_checkpoint", r"run\.export"),
        ("zero_grad", "nothing"),
    ):
        with pytest.raises(AttributeError, match=f"no {name}; use {words}"):
            getattr(going, name)
    with pytest.raises(AttributeError, match=r"has no nonsense$"):
        going.nonsense  # type: ignore[attr-defined]  # noqa: B018
    going.close()


def test_the_optimizer_of_another_model(tmp_path: Path) -> None:
    other = torch.optim.SGD(make_model(Variant()).parameters(), lr=0.1)
    with pytest.raises(DrivetrainError, match=r"a parameter of shape .* that the model does not have") as caught:
        start(str(tmp_path), Variant(steps=2), optimizer=other)
    assert "give the module that has it to the run, too" in caught.value.remedy


def test_static_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="static-graph"):
        start(str(tmp_path), Variant(steps=2), settings={"static_graph": True})


def test_two_lines_of_data_and_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page shows it, with nothing but what is needed."""
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    model = nn.Linear(3, 2)
    going = dt.drive(model, torch.optim.SGD(model.parameters(), lr=0.1), data, global_batch=8, epochs=2, name="mine")
    for inputs, labels in going:
        going.backward(nn.functional.cross_entropy(going.model(inputs), labels))
        going.step()
    assert going.steps == 10
    assert (tmp_path / "runs" / "mine" / "steps.jsonl").exists()


# The page


def scripts_of_the_page() -> tuple[str, str]:
    """The plain script, and the changes to it."""
    text = (Path(__file__).parents[2] / "docs" / "guide" / "own-loop.md").read_text(encoding="utf-8")
    return tuple(re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)[0] for kind in ("python", "diff"))  # type: ignore[return-value]


def applied(script: str, changes: str) -> str:
    """A unified diff, applied line by line; every line it names has to be there."""
    lines, result, at = script.splitlines(), [], 0
    for line in changes.splitlines()[2:]:
        if line.startswith("@@"):
            first = int(line.split()[1].lstrip("-").split(",")[0]) - 1
            result += lines[at:first]
            at = first
        elif line.startswith("+"):
            result.append(line[1:])
        else:
            assert lines[at] == line[1:], "the diff is of another script"
            result += [line[1:]] if line.startswith(" ") else []
            at += 1
    return "\n".join([*result, *lines[at:], ""])


def num_changed(changes: str) -> int:
    """A line that is replaced counts once: of each run of removed and added lines, the longer."""
    hunks = re.split(r"^(?:@@.*| .*)\n", changes.split("\n", 2)[2], flags=re.MULTILINE)
    return sum(max(len(re.findall(r"^-", hunk, re.M)), len(re.findall(r"^\+", hunk, re.M))) for hunk in hunks)


def test_the_page_changes_six_lines_of_a_plain_script(tmp_path: Path) -> None:
    plain, changes = scripts_of_the_page()
    driven = applied(plain, changes)
    assert (
        "".join(difflib.unified_diff(plain.splitlines(True), driven.splitlines(True), "plain.py", "driven.py"))
        == changes
    )
    assert num_changed(changes) == 6
    losses = []
    for name, script in (("plain.py", plain), ("driven.py", driven)):
        (tmp_path / name).write_text(script)
        done = warm_python.run([name], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(float(re.findall(r"loss ([\d.]+)$", done.stdout.strip(), re.M)[-1]))
    assert max(losses) < 0.35 < math.log(2), losses  # both learn: from ln 2
    assert len((tmp_path / "runs" / "mine" / "steps.jsonl").read_text().splitlines()) == 64


def test_changed_lines_are_counted_by_run() -> None:
    assert num_changed("--- a\n+++ b\n@@ -1,3 +1,3 @@\n x\n-a\n-b\n+c\n y\n+d\n") == 3


# Shared with `train`


class Counting:
    """A hook that counts its calls."""

    every = 2

    def __init__(self) -> None:
        self.calls = 0
        self.losses: dict[int, float] = {}

    def __call__(self, context: dt.StepContext) -> None:
        self.calls += 1
        self.losses[context.step] = context.loss

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


def test_hooks_are_called_and_go_on(tmp_path: Path) -> None:
    for first, last, calls in ((0, 5, 2), (5, 10, 5)):
        hook = Counting()
        going = start(str(tmp_path), BASE, 16, hooks=[hook])
        assert going.resumed_from == first
        losses: dict[int, list[Tensor]] = {}
        for batch in going:
            loss = loss_of(going, batch)
            losses.setdefault(going.steps + 1, []).extend([loss.detach()] * len(batch[1]))
            going.backward(loss)
            going.step()
            if going.steps == last:
                break
        assert hook.calls == calls
        expected = {step: torch.stack(each).double().mean().item() for step, each in losses.items() if step % 2 == 0}
        assert hook.losses == pytest.approx(expected, rel=1e-12)


def test_other_hooks_than_before_are_an_error_in_words(tmp_path: Path) -> None:
    words = r"has 1 hooks now, and had 0 when step \d was saved"
    looped_until(str(tmp_path / "drive"), BASE, at_last_micro(Stop(4), 1))
    with pytest.raises(DrivetrainError, match=words) as caught:
        start(str(tmp_path / "drive"), BASE, hooks=[Counting()])
    assert "--name" in caught.value.remedy
    assert run_until_crash(str(tmp_path / "train"), BASE, 0, call_in(5, 0, 1))
    with pytest.raises(DrivetrainError, match=words):
        run(str(tmp_path / "train"), BASE, hooks=[Counting()])


def test_a_script_run_by_the_command_line(tmp_path: Path) -> None:
    """Its flags count, and a script that drives is one that trains."""
    plain, changes = scripts_of_the_page()
    (tmp_path / "driven.py").write_text(applied(plain, changes))
    flags = ["--batch-size", "16", "--gpu-mode", "cpu", "--name", "named"]
    done = warm_python.run(["-m", "drivetrain", "train", "driven.py", *flags], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "micro_batch: 16" in (tmp_path / "runs" / "named" / "plan.yaml").read_text()


# Models that DDP finds difficult


class Twice(nn.Module):
    """Called twice for a batch, by a method that is not `forward`; a part of it is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.unused = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(3, 3)

    def encoded(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.first(inputs))


def looped_twice(folder: str) -> list[float]:
    torch.manual_seed(0)
    going = start(
        folder, TWICE, 4, {"find_unused_parameters": True}, model=(model := Twice().double()), optimizer=sgd(model)
    )
    for inputs, labels in going:
        both = going.model.encoded(inputs) + going.model.encoded(-2 * inputs)
        going.backward(nn.functional.cross_entropy(going.model.out(both), labels))
        going.step()
    return read(going.folder).losses if going.world.is_main else []


class Rows(nn.Module):
    """With gradients that hold only the rows that were used."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(11, 8, sparse=True), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.out(self.rows(tokens))
        return result


def looped_sparse(folder: str) -> list[float]:
    torch.manual_seed(0)
    going = start(folder, SPARSE, 4, model=(model := Rows().double()), optimizer=sgd(model), clip_norm=None)
    loss = make_job(SPARSE).loss
    for batch in going:
        going.backward(loss(going.model, batch).total / len(batch[0]))
        going.step()
    return read(going.folder).losses if going.world.is_main else []


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


TWICE = Variant(steps=6)
SPARSE = Variant("transformer", steps=6)


@pytest.mark.parametrize("loop", [looped_twice, looped_sparse])
def test_unused_parameters_several_calls_and_sparse_gradients(
    gloo_pool: GlooPool, tmp_path: Path, loop: Callable[[str], list[float]]
) -> None:
    alone = gloo_pool.run(loop, str(tmp_path / "1"), world=1)[0]
    together = gloo_pool.run(loop, str(tmp_path / "2"), world=2)[0]
    assert together == pytest.approx(alone, abs=1e-10)
    assert alone[-1] != alone[0]
