"""Habits of user code that go wrong in silence elsewhere: told, undone or refused."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt


class Model(nn.Module):
    """Notes down its mode in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Dropout(0.5)
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.modes.append((self.training, self.norm.training))
        result: Tensor = self.drop(self.norm(self.body(inputs))).sum(1)
        return result


class Annealed(Model):
    """Counts its forwards, by which it weighs its output, and notes down what is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards, self.largest_batch, self.is_warm = 0, 0, False

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_forwards += 1
        self.largest_batch, self.is_warm = max(self.largest_batch, len(inputs)), True
        return super().forward(inputs) * min(1.0, self.num_forwards / 10)


class Registered(Annealed):
    """Has the counter as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.num_forwards
        self.register_buffer("num_forwards", torch.zeros(()))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def evaluate(context: dt.StepContext) -> None:
    context.model.eval()


def train(folder: Path, model: nn.Module, **changes: Any) -> None:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    values: dict[str, Any] = {
        "name": "habits",
        "model": model,
        "data": TensorDataset(inputs, inputs.sum(1)),
        "loss": loss_of,
        "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.01),
        "global_batch": 8,
        "max_steps": 6,
    }
    config = dt.configure(output_dir=folder, gpu_mode="cpu", report=False, loss_weighting="samples")
    dt.train(dt.Job(**{**values, **changes}), config)


def test_a_hook_that_forgets_to_go_back_to_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    train(tmp_path, model, hooks=[dt.every(2, evaluate)])
    assert len(model.modes) >= 6
    assert len(set(model.modes)) == 1, "every step has the modes of the first"
    assert model.modes[0][0]
    told = [line for line in capsys.readouterr().out.splitlines() if "evaluation mode" in line]
    assert told == ["  hooks      evaluate left the model in evaluation mode: it is back in training mode"]


def test_a_loss_that_forgets_to_go_back_to_training(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = loss_of(model, batch)
        model.eval()
        return value

    with pytest.raises(dt.DrivetrainError, match="the loss function left the model in evaluation mode"):
        train(tmp_path, Model(), loss=loss)


def test_a_counter_that_no_checkpoint_holds_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "plain", Annealed())
    told = [line for line in capsys.readouterr().out.splitlines() if "changes with every step" in line]
    assert len(told) == 1
    assert told[0].startswith("  model      num_forwards changes with every step, and is not in model.state_dict()")
    train(tmp_path / "buffer", Registered())
    assert "changes with every step" not in capsys.readouterr().out


class Clearing(torch.optim.SGD):
    """Counts how often its gradients are cleared, as one does that keeps something of them."""

    num_cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.num_cleared += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("by_class", [True, False])
def test_an_optimizer_that_clears_gradients_its_own_way_is_asked_to(tmp_path: Path, by_class: bool) -> None:
    made: list[Any] = []

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        found: Any = (Clearing if by_class else torch.optim.SGD)(groups, lr=0.01)
        if not by_class:
            found.num_cleared = 0

            def zero_grad(set_to_none: bool = True) -> None:
                found.num_cleared += 1
                torch.optim.SGD.zero_grad(found, set_to_none)

            found.zero_grad = zero_grad
        made.append(found)
        return found

    train(tmp_path, Model(), optimizer=optimizer)
    assert made[-1].num_cleared >= 6, "once for each step"


def averaging() -> dt.Hook:
    """A moving average in the closure of a hook, of torch's own class."""
    average: dict[str, Any] = {}

    def follow(context: dt.StepContext) -> None:
        if not average:
            average["model"] = torch.optim.swa_utils.AveragedModel(context.model)
        average["model"].update_parameters(context.model)

    return dt.every(1, follow)


class Shadow(dt.Hook):
    """A moving average in a list of tensors, written to behind the back of torch's counters."""

    every = 1

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def __call__(self, context: dt.StepContext) -> None:  # type: ignore[override]
        live = list(context.model.parameters())
        self.weights = self.weights or [torch.zeros_like(weight) for weight in live]
        for mine, weight in zip(self.weights, live, strict=True):
            mine.data.lerp_(weight.data, 0.1)


class Patient(dt.Hook):
    every = 1

    def __init__(self) -> None:
        self.best, self.log = 1e9, list[float]()

    def __call__(self, context: dt.StepContext) -> None:  # type: ignore[override]
        self.best -= 1
        self.log.append(context.loss)


class Saved(Patient):
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: Any) -> None:
        self.best = state["best"]


class Reading(dt.Hook):
    """Keeps nothing but a log, and what belongs to the model."""

    every = 1

    def __init__(self) -> None:
        self.losses, self.model, self.scale = list[float](), None, 3.0

    def __call__(self, context: dt.StepContext) -> None:  # type: ignore[override]
        self.losses.append(context.loss)
        self.model = context.model  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (averaging, "averaging.<locals>.follow keeps average, which no checkpoint holds"),
        (Shadow, "Shadow keeps weights, which no checkpoint holds"),
        (Patient, "Patient keeps best, which no checkpoint holds"),
        (Saved, ""),
        (Reading, ""),
    ],
)
def test_what_a_hook_keeps_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hook: Callable[[], dt.Hook], words: str
) -> None:
    train(tmp_path, Model(), hooks=[hook()])
    told = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint holds" in line]
    assert len(told) == bool(words)
    assert not words or words in told[0]


class Scheduled(dt.Hook):
    """Sets the rate of a dropout late in training, and where a run is resumed if it is asked to."""

    every = 1

    def __call__(self, context: dt.StepContext) -> None:  # type: ignore[override]
        context.model.drop.p = 0.0 if context.step < 5 else 0.3  # type: ignore[union-attr]


class Restoring(Scheduled):
    def check(self, context: dt.StepContext) -> None:
        self(context)


def switch_on(context: dt.StepContext) -> None:
    context.model.is_warm = True  # type: ignore[assignment]


def run_it(context: dt.StepContext) -> None:
    context.model(torch.zeros(99, 4))


@pytest.mark.parametrize(
    ("hook", "name", "words"),
    [
        (Scheduled(), "Undropped", "Scheduled has changed drop.p of the model"),
        (Restoring(), "Undropped", ""),
        (dt.every(3, switch_on), "Undropped", "switch_on has changed is_warm of the model"),
        (dt.every(1, run_it), "Noting", ""),
    ],
)
def test_settings_of_the_model_that_a_hook_changes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hook: dt.Hook, name: str, words: str
) -> None:
    """No checkpoint has the rate of a dropout: a resumed run began with that of the start, and nothing said so."""

    class Undropped(Model):
        def __init__(self) -> None:
            super().__init__()
            self.drop.p, self.is_warm = 0.0, False

    class Noting(Model):
        num_samples = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.num_samples = len(inputs)
            return super().forward(inputs)

    train(tmp_path, {"Undropped": Undropped, "Noting": Noting}[name](), hooks=[hook])
    told = [line for line in capsys.readouterr().out.splitlines() if "has changed" in line]
    assert len(told) == bool(words)
    assert all(words in line for line in told)


class Ending(dt.Hook):
    """Ends the first run after five steps, as a kill would."""

    every = 1

    def __init__(self, folder: Path) -> None:
        self._mark = folder / "ended"

    def __call__(self, context: dt.StepContext) -> None:  # type: ignore[override]
        if context.step == 5 and not self._mark.exists():
            self._mark.touch()
            raise RuntimeError("ended")


class Silent(nn.Module):
    """Has no dropout of torch's, and draws from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = nn.Linear(4, 1), nn.Identity()
        self.drop.p = 0.0  # type: ignore[assignment]

    def forward(self, inputs: Tensor) -> Tensor:
        noise = torch.randn_like(inputs) if self.drop.p else 0  # type: ignore[truthy-bool]
        result: Tensor = self.body(inputs + noise).squeeze(1)
        return result


class Early(Restoring):
    def __call__(self, context: dt.StepContext) -> None:  # type: ignore[override]
        context.model.drop.p = 0.0 if context.step < 3 else 0.3  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [Model, Silent])
def test_a_run_that_draws_late_is_resumed_exactly(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    """What drew nothing in a trial went on without keys, so a resumed run had other draws."""
    found = []
    for ends in (False, True):
        torch.manual_seed(0)
        folder = tmp_path / str(ends)
        folder.mkdir()
        if not ends:
            (folder / "ended").touch()
        else:
            with pytest.raises(RuntimeError, match="ended"):
                train(folder, made(make), hooks=[Early(), Ending(folder)], checkpoint_every=1)
            torch.manual_seed(1)
        train(folder, made(make), hooks=[Early(), Ending(folder)], checkpoint_every=1)
        dt.export(folder / "habits", file := folder / "weights.safetensors")
        found.append(load_file(file)["body.weight"])
    assert torch.equal(*found)


@pytest.mark.parametrize(("start", "num_told"), [(0, 0), (4, 1), (99, 0)])
def test_draws_outside_of_torch_that_begin_late_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: int, num_told: int
) -> None:
    """They had no key, and a run that was resumed learned something else."""
    drawn = list[float]()

    class Mixed(Silent):
        num_steps = 0

        def forward(self, inputs: Tensor) -> Tensor:
            if self.drop.p >= start:  # type: ignore[operator]
                drawn.append(random.random())
                inputs = inputs * drawn[-1]
            return super().forward(inputs) if self.drop.p == 0 else self.body(inputs).squeeze(1)

    def count(context: dt.StepContext) -> None:
        context.model.drop.p = float(context.step)  # type: ignore[union-attr]

    train(tmp_path, Mixed(), hooks=[dt.every(1, count)], max_steps=10)
    assert capsys.readouterr().err.count("draws from Python's or numpy's generators") == num_told


def made(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    model.drop.p = 0.0  # type: ignore[union-attr]
    return model


def test_what_a_hook_of_the_optimizer_keeps_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run scaled its gradients as the first steps did."""

    def noisy(groups: Any) -> torch.optim.Optimizer:
        optimizer, count = torch.optim.SGD(groups, lr=0.01), {"steps": 0}

        def before(*_: Any) -> None:
            count["steps"] += 1

        optimizer.register_step_pre_hook(before)
        return optimizer

    train(tmp_path, Model(), optimizer=noisy)
    told = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint holds" in line]
    assert len(told) == 1
    assert "before keeps count, which no checkpoint holds" in told[0]


class Observed(nn.Module):
    """Scales by the largest output so far, a number that its first forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.largest, self.num_inputs = nn.Linear(4, 1), None, None

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.layer(inputs).squeeze(1)
        now = float(outputs.detach().abs().max())
        self.largest = now if self.largest is None else 0.9 * self.largest + 0.1 * now
        self.num_inputs = inputs.shape[1]
        return outputs / (1 + self.largest)


def test_a_number_that_the_first_forward_sets_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was not there before the first step, so nothing compared it; a resumed run began it anew in silence."""
    train(tmp_path, Observed())
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "changes with every step" in line]
    assert told.startswith("  model      largest changes with every step")
