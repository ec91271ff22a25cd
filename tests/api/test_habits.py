"""What people bring from loops of their own: it trains as their loop does, or is refused or reported in words."""

import copy
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

import drivetrain as dt
from drivetrain import DrivetrainError, Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core.state import BesideLoss
from drivetrain.data.division import SampleStream
from tests.gloo_pool import GlooPool

SAMPLES, BATCH, STEPS, SEED = 20, 8, 6, 4
GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(SAMPLES, 5, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, 3, (SAMPLES,), generator=GENERATOR)

Loss = Callable[[Any, Any], Any]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def job_of(**changes: Any) -> Job:
    given = {
        "name": "habit",
        "model": make_model,
        "data": TensorDataset(INPUTS, LABELS),
        "loss": cross_entropy,
        "optimizer": sgd,
        "global_batch": BATCH,
        "max_steps": STEPS,
        "epochs": 9,
        "seed": SEED,
    }
    return Job(**{**given, **changes})


def weights_of(job: Job, folder: Path, **settings: Any) -> dict[str, Tensor]:
    given = {"device": "cpu", "precision": "fp32", "num_workers": 0, "auto_optimize": False, "batch_size": 3}
    result = train(job, config=configure(output_dir=folder, **{**given, **settings}))
    return dict(result.model.state_dict())


def plain_weights(
    model: nn.Module, loss: Loss, make: Callable[[Any], torch.optim.Optimizer] = sgd, labels: Tensor = LABELS
) -> dict[str, Tensor]:
    optimizer = make(list(model.parameters()))
    for samples in whole_batches():
        optimizer.zero_grad()
        loss(model, (INPUTS[samples], labels[samples])).backward()
        optimizer.step()
    return dict(model.state_dict())


def whole_batches() -> Iterator[Tensor]:
    stream, per_epoch = SampleStream(SAMPLES, SEED), -(-SAMPLES // BATCH)
    for step in range(STEPS):
        epoch, number = divmod(step, per_epoch)
        order = torch.as_tensor(stream.samples(epoch, 0, SAMPLES))
        yield order[number * BATCH : (number + 1) * BATCH]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("data", ["tensors", "items"])
def test_samples_without_a_label_are_not_counted(tmp_path: Path, data: str) -> None:
    """Samples labeled -100 were left out of the measurement, and the loss was taken for a mean over all samples."""
    labels = LABELS.clone()
    labels[::3] = -100
    given: Any = TensorDataset(INPUTS, labels)
    job = job_of(data=given if data == "tensors" else list(given))
    assert_same(weights_of(job, tmp_path, batch_size=2), plain_weights(make_model(), cross_entropy, labels=labels))


def test_another_default_type_is_no_random_draw(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "the collate function draws random numbers"
            weights_of(job_of(data=list(TensorDataset(INPUTS, LABELS)), max_steps=1), tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)


def clearing(model: Any, batch: Any) -> Tensor:
    model.zero_grad()
    return cross_entropy(model, batch)


def computing_gradients(model: Any, batch: Any) -> Tensor:
    value = cross_entropy(model, batch)
    value.backward(retain_graph=True)
    return value


def evaluating(model: Any, batch: Any) -> Tensor:
    value = cross_entropy(model, batch)
    model.eval()
    return value


def freezing(model: Any, batch: Any) -> Tensor:
    model[0].requires_grad_(False)
    return cross_entropy(model, batch)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (clearing, "clears the gradients"),
        (computing_gradients, "computed gradients itself"),
        (evaluating, "left the model in evaluation mode"),
        (freezing, "changed requires_grad of 0.weight"),
    ],
)
def test_a_loss_that_meddles_with_the_model_is_refused_before_the_first_step(
    tmp_path: Path, loss: Loss, words: str
) -> None:
    """The measurement of the loss hid it: a run began, and could not be resumed."""
    with pytest.raises(DrivetrainError, match=words):
        weights_of(job_of(loss=loss), tmp_path)


def hooked(hook: Callable[[Tensor], None]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make_model()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        return model

    return made


def step_at_once(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


def clip_by_value(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def test_an_optimizer_inside_of_the_backward_is_refused(tmp_path: Path) -> None:
    """It stepped in the trial before the first step, too, and for each micro-batch."""
    with pytest.raises(DrivetrainError, match=r"the backward has changed 0\.weight"):
        weights_of(job_of(model=hooked(step_at_once)), tmp_path)


def test_a_hook_after_each_backward_keeps_the_division(tmp_path: Path) -> None:
    model = hooked(clip_by_value)
    found = weights_of(job_of(model=model), tmp_path, batch_size=BATCH)
    assert_same(found, plain_weights(model(), cross_entropy))
    assert lines_told(tmp_path)[0].startswith("a hook of 0.weight runs after each backward")


def lines_told(folder: Path) -> tuple[str, list[str]]:
    """Return why the division is kept, and what else was said of the loss."""
    events = [json.loads(line) for line in (folder / "habit" / "events.jsonl").read_text().splitlines()]
    found = [event for event in events if event["event"] == "loss weighting"]
    return (found[-1]["holds_division"], found[-1]["notes"]) if found else ("", [])


class Counting(nn.Module):
    """Counts its calls, for a term of the loss that grows with the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = make_model(), 0

    def forward(self, inputs: Tensor) -> Any:
        self.calls += 1
        return self.net(inputs) * min(1.0, self.calls / 4)


class Recurrent(nn.Module):
    """Begins each batch with the hidden state of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.out = nn.GRUCell(5, 6).double(), nn.Linear(6, 3).double()
        self.hidden: Tensor | None = None

    def forward(self, inputs: Tensor) -> Any:
        before = None if self.hidden is None or len(self.hidden) != len(inputs) else self.hidden.detach()
        self.hidden = self.cell(inputs, before)
        return self.out(self.hidden)


class LongMemory(Recurrent):
    """Keeps a pair of tensors, as an LSTM does."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.state = nn.LSTMCell(5, 6).double(), None

    def forward(self, inputs: Tensor) -> Any:
        state: Any = self.state
        before = None if state is None or len(state[0]) != len(inputs) else tuple(part.detach() for part in state)
        self.state = self.cell(inputs, before)
        return self.out(self.state[0])


class Fading(nn.Module):
    """Keeps what each forward changes in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64), persistent=False)

    def forward(self, inputs: Tensor) -> Any:
        self.scale.mul_(0.9)
        return self.net(inputs) * self.scale


@pytest.mark.parametrize(
    ("model", "name"), [(Counting, "calls"), (Recurrent, "hidden"), (LongMemory, "state"), (Fading, "scale")]
)
def test_what_a_model_keeps_between_calls_is_reported_and_begins_with_the_first_step(
    tmp_path: Path, model: Callable[[], nn.Module], name: str
) -> None:
    found = weights_of(job_of(model=model), tmp_path, batch_size=BATCH)
    assert_same(found, plain_weights(model(), cross_entropy))  # the trials before left nothing behind
    (note,) = lines_told(tmp_path)[1]
    assert f"keeps something between calls ({name})" in note


class Observing(nn.Module):
    """Has a buffer that gets its shape in the first forward, as observers of quantization have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.register_buffer("peak", torch.empty(0, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Any:
        highest = inputs.abs().amax(0)
        if self.training and not self.peak.numel():
            self.peak.resize_(highest.shape).copy_(highest)
        elif self.training:
            self.peak.copy_(torch.maximum(self.peak, highest))
        return self.net(inputs / self.peak if self.peak.numel() else inputs)


def observed(folder: str) -> dict[str, Tensor]:
    return weights_of(job_of(model=Observing), Path(folder), batch_size=BATCH)


def test_a_buffer_gets_its_shape_in_the_first_forward(tmp_path: Path, gloo_pool: GlooPool) -> None:
    """The trial left its shape behind, and a checkpoint was that of another model."""
    expected, is_first = plain_weights(Observing(), cross_entropy), [True]

    def fail_once(context: dt.StepContext) -> None:
        if context.step == 3 and is_first.pop():
            raise KeyboardInterrupt

    job = job_of(model=Observing, hooks=[dt.every(3, fail_once)], checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        weights_of(job, tmp_path / "one", batch_size=BATCH)
    is_first.append(False)
    assert_same(weights_of(job, tmp_path / "one", batch_size=BATCH), expected)
    for found in gloo_pool.run(observed, str(tmp_path / "two"), world=2):
        assert {name: value.shape for name, value in found.items()} == {
            name: value.shape for name, value in expected.items()
        }


@pytest.mark.parametrize("global_batch", [1, 8])
def test_a_counter_outside_of_the_model_is_reported(tmp_path: Path, global_batch: int) -> None:
    calls = {"number": 0}

    def warming_up(model: Any, batch: Any) -> Tensor:
        calls["number"] += 1
        return cross_entropy(model, batch) * min(1.0, calls["number"] / 1e4)

    weights_of(job_of(loss=warming_up, max_steps=1, global_batch=global_batch), tmp_path)
    assert "gives another value" in lines_told(tmp_path)[1][0]


class Taught(nn.Module):
    """Has a teacher that follows it in each forward, and begins as a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(5, 3).double()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Any:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)
        return self.student(inputs) + self.teacher(inputs)


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 3)).double()


class Tallying(nn.Module):
    """Counts its calls in a buffer of whole numbers, for a factor that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Any:
        self.calls += 1
        return self.net(inputs) * (self.calls / 4).clamp(max=1)


@pytest.mark.parametrize(("model", "name"), [(Taught, "teacher.weight"), (normalized, "_u"), (Tallying, "calls")])
def test_state_that_each_forward_changes_keeps_the_division(
    tmp_path: Path, model: Callable[[], nn.Module], name: str
) -> None:
    """Each micro-batch moves it once more, so the micro-batch is part of what is learned."""
    found = weights_of(job_of(model=model), tmp_path, batch_size=BATCH)
    assert_same(found, plain_weights(model(), cross_entropy, sgd))
    why, notes = lines_told(tmp_path)
    assert why.startswith("each forward pass changes")
    assert name in why
    assert notes == []


def lines_of_a_table(folder: str) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        weights_of(job_of(model=Tallying), Path(folder))
    return printed.getvalue()


def test_buffers_of_other_processes_are_not_lost_in_silence(tmp_path: Path, gloo_pool: GlooPool) -> None:
    words = "all go on with those of rank 0"
    assert words not in lines_of_a_table(str(tmp_path / "one"))
    assert words in gloo_pool.run(lines_of_a_table, str(tmp_path / "two"), world=2)[0]


class Layered(nn.Module):
    """Keeps its layers in a list, and trains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(5, 3).double()]

    def forward(self, inputs: Tensor) -> Any:
        return self.layers[0](inputs)


class Fitting(nn.Linear):
    def train(self, positive: Tensor, negative: Tensor) -> None:  # type: ignore[override]
        """Do what the forward-forward algorithm does with its layers."""


def test_models_whose_names_mean_something_else_to_torch_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match="has no parameters") as raised:
        weights_of(job_of(model=Layered), tmp_path)
    assert "nn.ModuleList" in raised.value.remedy
    with pytest.raises(DrivetrainError, match=r"train\(\) of 0 \(Fitting\) cannot be called as train\(True\)"):
        weights_of(job_of(model=lambda: nn.Sequential(Fitting(5, 3).double())), tmp_path)


def test_a_loss_that_is_made_for_the_batch_of_the_job_is_measured_with_no_more(tmp_path: Path) -> None:
    """Style transfer compares with a style that was repeated once for each sample of a batch."""
    styles = torch.ones(BATCH, 3, dtype=torch.float64)

    def loss(model: Any, batch: Any) -> Tensor:
        output = model(batch[0])
        return functional.cross_entropy(output, batch[1]) + (output - styles[: len(output)]).square().mean()

    assert_same(weights_of(job_of(loss=loss), tmp_path), plain_weights(make_model(), loss))
    assert lines_told(tmp_path) == ("", [])


def with_teacher() -> Loss:
    """A mean teacher beside the model, which follows it inside of the loss."""
    teacher = make_model().requires_grad_(False)
    for parameter in teacher.parameters():
        parameter.zero_()
    table = torch.zeros(3, dtype=torch.float64)

    def loss(model: Any, batch: Any) -> Tensor:
        output = model(batch[0])
        for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
            ours.data.mul_(0.5).add_(theirs.data, alpha=0.5)
        table.add_(output.detach().mean(0))
        return functional.cross_entropy(output + table, batch[1]) + (output - teacher(batch[0])).square().mean()

    return loss


def test_what_the_loss_keeps_beside_the_model_is_changed_by_steps_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trials before the first step and validations moved the teacher, which a plain loop does not."""
    job = job_of(loss=with_teacher(), valid=TensorDataset(INPUTS, LABELS), valid_every=2)
    result = train(job, configure(output_dir=tmp_path, device="cpu", auto_optimize=False, batch_size=8))
    dt.export(result, tmp_path / "last.pt")
    assert capsys.readouterr().err.count("validation changes what the loss function keeps beside the model") == 1
    found = torch.load(tmp_path / "last.pt", weights_only=True)
    assert_same(found, plain_weights(make_model(), with_teacher()))
    assert "keeps something between calls" in lines_told(tmp_path)[1][0]


def test_a_model_is_listed_only_where_its_loss_keeps_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations ask each time, since hooks may have added parameters: 11 ms for 48 layers of a transformer."""
    model, listed = make_model(), []
    original = nn.Module.modules
    monkeypatch.setattr(nn.Module, "modules", lambda self: listed.append(self) or original(self))
    assert BesideLoss([cross_entropy, lambda called, batch: model(batch[0]).sum()], model).put_back() is False
    assert listed == []
    kept = torch.zeros(3)
    beside = BesideLoss([lambda called, batch: model[0].weight.sum() + kept.sum()], model)
    kept.add_(1)
    assert beside.put_back()
    assert torch.equal(kept, torch.zeros(3))
    assert listed == [model]


def test_parameters_of_the_loss_are_not_left_out_in_silence(tmp_path: Path) -> None:
    scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def weighted(model: Any, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * torch.exp(-scale) + scale

    weights_of(job_of(loss=weighted, max_steps=1), tmp_path)
    assert "parameters that the model does not have" in lines_told(tmp_path)[1][0]
    job = job_of(loss=weighted, optimizer=lambda groups: sgd([*groups, {"params": [scale]}]), name="other")
    with pytest.raises(DrivetrainError, match="holds a parameter of shape"):
        weights_of(job, tmp_path)
    assert not list((tmp_path / "other" / "checkpoints").iterdir())


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer as it is often written: without calling `super().__init__`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.num_steps = base, 0
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.slow = [[parameter.detach().clone() for parameter in group["params"]] for group in self.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for group, kept in zip(self.param_groups, self.slow, strict=True):
                for parameter, slow in zip(group["params"], kept, strict=True):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)


def test_an_optimizer_around_another_one_is_resumed(tmp_path: Path) -> None:
    """Its state was saved and could not be loaded again."""

    def make(groups: Any) -> torch.optim.Optimizer:
        return Lookahead(sgd(groups))

    expected = plain_weights(make_model(), cross_entropy, make)  # first: torch changes the class when it loads a state
    is_first = [True]

    def fail_once(context: dt.StepContext) -> None:
        if context.step == 3 and is_first.pop():
            raise KeyboardInterrupt

    job = job_of(optimizer=make, hooks=[dt.every(3, fail_once)], checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        weights_of(job, tmp_path)
    is_first.append(False)
    found = weights_of(job, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # it has gone on with the same run
    assert_same(found, expected)


def test_a_scheduler_made_with_the_optimizer_is_refused_by_its_name(tmp_path: Path) -> None:
    def make(groups: Any) -> torch.optim.Optimizer:
        optimizer = sgd(groups)
        torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer

    with pytest.raises(DrivetrainError, match="has a torch scheduler") as raised:
        weights_of(job_of(optimizer=make), tmp_path)
    assert "Job(schedule=lambda optimizer: StepLR" in str(raised.value)


def clipping(context: dt.StepContext) -> None:
    nn.utils.clip_grad_norm_(context.model.parameters(), 0.01)


def clip_on_ranks(folder: str) -> str:
    with pytest.raises(DrivetrainError) as raised:
        weights_of(job_of(hooks=[dt.every(1, clipping)]), Path(folder))
    return str(raised.value)


def test_a_hook_that_clips_gradients_is_refused(tmp_path: Path, gloo_pool: GlooPool) -> None:
    with pytest.raises(DrivetrainError, match="changed gradients"):
        weights_of(job_of(hooks=[dt.every(1, clipping)]), tmp_path)
    for message in gloo_pool.run(clip_on_ranks, str(tmp_path / "ranks"), world=2):
        assert "changed gradients" in message


def test_a_hook_that_sets_the_learning_rate_is_refused(tmp_path: Path) -> None:
    made: list[torch.optim.Optimizer] = []

    def make(groups: Any) -> torch.optim.Optimizer:
        made.append(sgd(groups))
        return made[-1]

    def halve(context: dt.StepContext) -> None:
        for optimizer in made:
            optimizer.param_groups[0]["lr"] /= 2

    with pytest.raises(DrivetrainError, match="changed the learning rate"):
        weights_of(job_of(optimizer=make, hooks=[dt.every(1, halve)]), tmp_path)


class FrozenNorm(nn.Module):
    """Keeps the statistics of its batch norm, by the override of `train` that is usual for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = (
            nn.Linear(5, 8).double(),
            nn.BatchNorm1d(8).double(),
            nn.Linear(8, 3).double(),
        )

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs: Tensor) -> Any:
        return self.last(self.norm(self.first(inputs)))


def test_a_frozen_batch_norm_couples_nothing(tmp_path: Path) -> None:
    assert_same(weights_of(job_of(model=FrozenNorm), tmp_path), plain_weights(FrozenNorm().train(), cross_entropy))
    assert lines_told(tmp_path) == ("", [])


def test_a_batch_norm_that_the_factory_froze_is_not_unfrozen_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        model[1].eval()
        return model

    weights_of(job_of(model=make, max_steps=1), tmp_path)
    assert "1 was in evaluation mode" in capsys.readouterr().err
    # A model that keeps it so, and a loop whose modes stay, are told nothing.
    weights_of(job_of(name="kept", model=lambda: FrozenNorm().train(), max_steps=1), tmp_path)
    model, data = make(), TensorDataset(INPUTS, LABELS)
    config = configure(output_dir=tmp_path, device="cpu", num_workers=0)
    run = dt.drive(model, sgd(model.parameters()), data, name="own", max_steps=1, global_batch=8, config=config)
    for batch in run:
        run.backward(cross_entropy(model, batch))
        run.step()
    assert not model[1].training  # type: ignore[index]
    assert "was in evaluation mode" not in capsys.readouterr().err


def test_a_loss_may_change_its_batch(tmp_path: Path) -> None:
    def popping(model: Any, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        return functional.cross_entropy(model(batch["inputs"].mul_(1.1)), labels)

    expected = plain_weights(make_model(), lambda model, batch: cross_entropy(model, (batch[0] * 1.1, batch[1])))
    job = job_of(data={"inputs": INPUTS, "labels": LABELS}, loss=popping)
    assert_same(weights_of(job, tmp_path), expected)
    assert lines_told(tmp_path) == ("", [])


class Growing(Dataset[Any]):
    """Changes its items in place, and returns views of them."""

    def __init__(self) -> None:
        self.inputs = INPUTS.clone()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.inputs[index] *= 1.01
        return self.inputs[index], LABELS[index]


def test_items_that_are_changed_in_place_are_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="changes its items in place"):
        weights_of(job_of(data=Growing(), max_steps=1), tmp_path)


class Curriculum(Dataset[Any]):
    """Has other items in each epoch, by the method that samplers have for it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index] * (1 + self.epoch), LABELS[index]


def test_a_collate_function_that_leaves_items_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mean over the rest counted as one over all, and so depended on the micro-batch."""

    def collate(items: list[Any]) -> Any:
        return default_collate([item for item in items if item[1] >= 0])

    labels = LABELS.clone()
    labels[18] = -1
    job = job_of(data=list(zip(INPUTS, labels, strict=True)), collate=collate, shuffle=False)
    weights_of(job, tmp_path)
    told = [line for line in capsys.readouterr().err.splitlines() if "the collate function returned a batch of" in line]
    assert len(told) == 1
    assert "of 1 rows for 2 items" in told[0] or "of 2 rows for 3 items" in told[0]


class CountedOrder(Sampler[int]):
    """Shuffles by a counter of its own, which no checkpoint holds."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class KeyedOrder(CountedOrder):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize(("sampler", "count"), [(CountedOrder, 1), (KeyedOrder, 0)])
def test_a_sampler_that_does_not_go_on_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sampler: Callable[[], Sampler[int]], count: int
) -> None:
    """After an interruption in the second epoch, samples came twice or not at all."""
    is_first = [True]

    def fail_once(context: dt.StepContext) -> None:
        if context.step == 5 and is_first.pop():
            raise KeyboardInterrupt

    def job() -> Job:
        loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=BATCH, sampler=sampler())
        return job_of(data=loader, global_batch=None, hooks=[dt.every(1, fail_once)], checkpoint_every=1)

    with pytest.raises(KeyboardInterrupt):
        weights_of(job(), tmp_path)
    is_first.extend([False] * 9)
    weights_of(job(), tmp_path)
    told = [line for line in capsys.readouterr().err.splitlines() if "does not yield what it did before" in line]
    assert len(told) == count


def test_a_data_set_is_told_its_epoch(tmp_path: Path) -> None:
    steps = iter(range(STEPS))

    def of_epoch(model: Any, batch: Any) -> Tensor:
        return cross_entropy(model, (batch[0] * (1 + next(steps) // 3), batch[1]))

    assert_same(weights_of(job_of(data=Curriculum()), tmp_path), plain_weights(make_model(), of_epoch))
    with pytest.raises(DrivetrainError, match="set_epoch"):
        weights_of(job_of(data=Curriculum(), name="resident"), tmp_path, resident="on")


def test_a_last_batch_that_is_too_small_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """20 samples in steps of 8 leave 4; in steps of 19, one, which batch normalization cannot take."""

    def of_eight(model: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0].view(8, 5)), batch[1])

    with pytest.raises(RuntimeError, match="invalid for input") as raised:
        weights_of(job_of(loss=of_eight), tmp_path / "shape", batch_size=8)
    assert any("the last batch of each epoch" in note and "drop_last=True" in note for note in raised.value.__notes__)
    normalized = job_of(model=lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)).double(), global_batch=19)
    with pytest.raises(ValueError, match="more than 1 value") as raised:
        weights_of(normalized, tmp_path / "norm", batch_size=19)
    assert any("with 1 sample instead of 19" in note for note in raised.value.__notes__)
    for folder in ("shape", "norm"):
        assert not (tmp_path / folder / "habit" / "steps.jsonl").exists()
    weights_of(job_of(loss=of_eight, data=TensorDataset(INPUTS[:16], LABELS[:16])), tmp_path / "whole", batch_size=8)


def squeezed(model: Any, batch: Any) -> Tensor:
    return functional.binary_cross_entropy(model(batch[0]).sigmoid().squeeze(), batch[1].double())


def test_a_single_sample_at_the_end_is_tried_before_the_first_step(tmp_path: Path) -> None:
    """`squeeze()` drops the dimension of samples, where there is one: 17 samples in batches of 8."""
    data, odd = TensorDataset(INPUTS[:16], LABELS[:16] > 0), TensorDataset(INPUTS[:17], LABELS[:17] > 0)
    given: dict[str, Any] = {"model": lambda: nn.Linear(5, 1).double(), "loss": squeezed}
    for name, changes in {"last": {"data": odd}, "valid": {"data": data, "valid": odd}}.items():
        with pytest.raises(ValueError, match="target size") as raised:
            weights_of(job_of(**given, **changes), tmp_path / name, batch_size=8)
        assert any("its batch has 1 sample: squeeze()" in note for note in raised.value.__notes__)
        assert any("was tried" in note and "before the first step" in note for note in raised.value.__notes__)
    with pytest.raises(ValueError, match="target size") as raised:
        weights_of(job_of(**given, data=data), tmp_path / "micro", batch_size=7)
    assert any("its batch has 1 sample: squeeze()" in note for note in raised.value.__notes__)
    weights_of(job_of(**given, data=data, valid=data, max_steps=1), tmp_path / "even", batch_size=8)


def test_an_error_names_its_step(tmp_path: Path) -> None:
    class Damaged(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if (inputs == INPUTS[sample]).all(1).any():
                raise KeyError("damaged")
            return super().forward(inputs)

    sample = int(torch.as_tensor(SampleStream(SAMPLES, SEED).samples(0, 17, 18))[0])  # in the third step
    with pytest.raises(KeyError) as raised:
        weights_of(job_of(model=lambda: Damaged(5, 3).double()), tmp_path)
    said = [note for note in raised.value.__notes__ if note.startswith("drivetrain: this was step 3, in epoch 1")]
    assert len(said) == 1
    assert "the last of the epoch and has 4 samples" in said[0]


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    hook = dt.every(2, lambda context: os.chdir(tmp_path / "elsewhere"))
    weights_of(job_of(hooks=[hook], checkpoint_every=3), Path("runs"))
    assert (tmp_path / "runs" / "habit" / "finished.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_run_inside_of_itself_is_refused(tmp_path: Path) -> None:
    hook = dt.every(2, lambda context: weights_of(job_of(), tmp_path))
    with pytest.raises(DrivetrainError, match="another run of this very process"):
        weights_of(job_of(hooks=[hook]), tmp_path)


class Leveled(Dataset[Any]):
    """Has an attribute that its items depend on, and others that only reading changes."""

    def __init__(self) -> None:
        self.level, self.reads, self.cache = 1.0, 0, dict[int, Tensor]()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        self.cache[index] = INPUTS[index]
        return self.cache[index] * self.level, LABELS[index]


def notes_on_data(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / "habit" / "events.jsonl").read_text().splitlines()]
    return [note for event in events if event["event"] == "data" for note in event["notes"]]


def test_a_curriculum_that_a_hook_sets_is_reported(tmp_path: Path) -> None:
    data = Leveled()

    class Remembering(dt.Hook):
        every = 1

        def __call__(self, context: dt.StepContext) -> None:
            data.level = 1 + context.step

        def state_dict(self) -> dict[str, Any]:
            return {"level": data.level}

        def load_state_dict(self, state: Any) -> None:
            data.level = state["level"]

    class Reading(dt.Hook):
        every = 1
        changes_data = False

        def __call__(self, context: dt.StepContext) -> None:
            data.level = 1 + context.step

    def harder(context: dt.StepContext) -> None:
        data.level = 1 + context.step

    weights_of(job_of(data=data, hooks=[dt.every(2, harder)]), tmp_path / "function")
    (note,) = notes_on_data(tmp_path / "function")
    assert "harder has changed level of the data set" in note
    assert "load_state_dict" in note
    for hook in (Remembering(), Reading(), dt.every(1, lambda context: None)):
        folder = tmp_path / type(hook).__name__
        weights_of(job_of(data=data, hooks=[hook]), folder)
        assert notes_on_data(folder) == []


@pytest.mark.parametrize("settings", [{"num_workers": 1}, {"resident": "on"}])
def test_a_curriculum_that_does_not_arrive_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    class Quiet(Leveled):
        def __getitem__(self, index: int) -> Any:
            return INPUTS[index] * self.level, LABELS[index]

    data = Quiet()
    hook = dt.every(2, lambda context: setattr(data, "level", 2.0))
    with pytest.raises(DrivetrainError, match=r"has changed level of the data set.* no effect") as raised:
        weights_of(job_of(data=data, hooks=[hook]), tmp_path, **settings)
    assert "--num-workers 0" in raised.value.remedy


def test_a_data_set_that_uses_the_model_is_reported(tmp_path: Path) -> None:
    class Played(Dataset[Any]):
        def __init__(self, policy: nn.Module) -> None:
            self.policy = policy

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            return INPUTS[index], self.policy(INPUTS[index]).argmax()

    model, other = make_model(), make_model()
    weights_of(job_of(model=model, data=Played(model)), tmp_path / "own")
    (note,) = notes_on_data(tmp_path / "own")
    assert "uses the model (policy)" in note
    weights_of(job_of(model=make_model(), data=Played(other)), tmp_path / "other")
    assert notes_on_data(tmp_path / "other") == []


def looped(folder: Path, data: Any, after_step: Callable[[Any], None], num_workers: int = 0) -> None:
    model, config = make_model(), configure(output_dir=folder, device="cpu", num_workers=num_workers)
    run = dt.drive(model, sgd(model.parameters()), data, name="habit", global_batch=8, epochs=2, config=config)
    for batch in run:
        run.backward(cross_entropy(model, batch))
        run.step()
        after_step(run)


def test_a_curriculum_that_a_loop_sets_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Quiet(Leveled):
        limit = 3

        def __getitem__(self, index: int) -> Any:
            return INPUTS[index] * self.level, LABELS[index]

    def harder(run: Any) -> None:
        if run.ends_epoch:
            data.level, data.limit = 2.0, 4

    data = Quiet()
    looped(tmp_path / "here", data, harder)
    told = capsys.readouterr().out
    assert "the loop has changed limit, level of the data set, and no checkpoint holds that" in told
    data = Quiet()
    with pytest.raises(DrivetrainError, match=r"the loop has changed limit, level of the data set.* no effect"):
        looped(tmp_path / "workers", data, harder, num_workers=1)
    looped(tmp_path / "reads", Leveled(), lambda run: None)
    assert "has changed" not in capsys.readouterr().out


def test_labels_that_a_loop_chooses_anew_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Workers, and a GPU that holds the data, had copies of the tensors: pseudo-labels had no effect, in silence."""

    def relabel(run: Any) -> None:
        if run.ends_epoch:
            labels.copy_(labels.roll(1))

    labels = LABELS.clone()
    data = TensorDataset(INPUTS, labels)
    looped(tmp_path / "here", data, relabel)
    assert "the loop has changed tensors[1] of the data set, and no checkpoint holds that" in capsys.readouterr().out
    with pytest.raises(DrivetrainError, match=r"the loop has changed tensors\[1\] of the data set.* no effect"):
        looped(tmp_path / "workers", data, relabel, num_workers=1)
    with pytest.raises(DrivetrainError, match=r"tensors\[1\] of the data set.* copied to memory .*no effect"):
        looped(tmp_path / "a part", torch.utils.data.Subset(data, range(len(data) // 2)), relabel)
    looped(tmp_path / "reads", data, lambda run: None)
    assert "has changed" not in capsys.readouterr().out


class Labeled(Dataset[Any]):
    """Has labels that can be replaced, and a cache that it fills itself."""

    def __init__(self) -> None:
        self.targets: list[int] = LABELS.tolist()
        self.cache: list[Tensor] = []

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.cache.append(INPUTS[index])
        return INPUTS[index], self.targets[index]


def test_labels_that_a_loop_replaces_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def relabel(run: Any) -> None:
        if run.ends_epoch:
            data.targets = data.targets[::-1]

    data = Labeled()
    looped(tmp_path / "here", data, relabel)
    assert "the loop has changed targets of the data set, and no checkpoint holds that" in capsys.readouterr().out
    with pytest.raises(DrivetrainError, match=r"the loop has changed targets of the data set.* no effect"):
        looped(tmp_path / "workers", data, relabel, num_workers=1)
    looped(tmp_path / "reads", data, lambda run: None)
    assert "has changed" not in capsys.readouterr().out


class HardOnes(Sampler[int]):
    """Draws by weights that the training sets."""

    def __init__(self) -> None:
        self.weights = torch.ones(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        return iter(self.weights.multinomial(16, replacement=True).tolist())

    def __len__(self) -> int:
        return 16


@pytest.mark.parametrize("way", ["hook", "loop"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_that_the_training_changes_is_reported(
    tmp_path: Path, way: str, num_workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With workers it was read for the epochs ahead before, so that what was learned depended on their number."""
    loader = DataLoader(TensorDataset(INPUTS, LABELS), 8, sampler=(sampler := HardOnes()))

    def change(run: Any) -> None:
        if way == "hook" or run.ends_epoch:
            sampler.weights = torch.rand(SAMPLES)

    def trained() -> None:
        if way == "hook":
            job = job_of(data=loader, global_batch=None, max_steps=None, epochs=2, hooks=[dt.every("epoch", change)])
            weights_of(job, tmp_path, num_workers=num_workers)
        else:
            looped(tmp_path, loader, change, num_workers)

    words = "has changed weights of the sampler"
    if num_workers:
        with pytest.raises(DrivetrainError, match=f"{words}, which is read ahead") as raised:
            trained()
        assert "set_epoch" in raised.value.remedy
    else:
        trained()
        assert words in capsys.readouterr().out + " ".join(notes_on_data(tmp_path))


def test_a_batch_that_the_turns_of_a_loop_share_is_not_changed(tmp_path: Path) -> None:
    model = make_model()
    halves = {"first": sgd(model[0].parameters()), "last": sgd(model[2].parameters())}
    data = TensorDataset(INPUTS, LABELS)
    with pytest.raises(DrivetrainError, match="changed its batch in place") as raised:
        turned(tmp_path, model, halves, data)
    assert "x = x / 255" in raised.value.remedy


def turned(folder: Path, model: nn.Module, optimizers: Any, data: Any) -> None:
    config = configure(output_dir=folder, device="cpu", num_workers=0)
    run = dt.drive(model, optimizers, data, turns=True, name="habit", global_batch=8, epochs=1, config=config)
    for inputs, labels in run:
        inputs.div_(255)
        run.backward(cross_entropy(model, (inputs, labels)))
        run.step()


@pytest.mark.parametrize("kind", ["ignored", "padded", "weighted", "plain", "norm"])
def test_a_loop_whose_divided_steps_are_not_the_whole_ones_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    labels = LABELS.clone()
    labels[[2, 9]] = -100 if kind == "ignored" else 0
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) if kind == "weighted" else None
    expected = {"ignored": "(labels != -100).sum()", "padded": "(labels != 0).sum()", "norm": "batch normalization"}
    expected["weighted"] = "weights[labels[labels != -100]].sum()"
    left_out = 0 if kind == "padded" else -100
    for size, is_told in ((4, kind in expected), (8, False)):
        model = make_model() if kind != "norm" else nn.Sequential(nn.BatchNorm1d(5), make_model()).double()
        config = configure(output_dir=tmp_path / str(size), device="cpu", num_workers=0, batch_size=size)
        data = TensorDataset(INPUTS[:16], labels[:16])
        run = dt.drive(model, sgd(model.parameters()), data, global_batch=8, epochs=1, shuffle=False, config=config)
        for inputs, targets in run:
            loss = functional.cross_entropy(model(inputs), targets, weight, ignore_index=left_out)
            run.backward(loss + 0.1 * model(inputs).square().mean())
            run.step()
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  loss ")]
        assert len(told) == is_told
        assert expected.get(kind, "") in "".join(told) or not is_told


class Langevin(torch.optim.SGD):
    """Adds noise to the weights, as the dynamics of Langevin do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(0.01 * torch.randn_like(parameter))
        return result


def noised(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that adds noise to whole gradients, as private training does."""
    optimizer = sgd(parameters)

    def add_noise(of: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in of.param_groups[0]["params"]:
            parameter.grad.add_(0.01 * torch.randn_like(parameter))

    optimizer.register_step_pre_hook(add_noise)
    return optimizer


def make_dropping() -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.3), make_model())


def own_weights(folder: str, way: str, micro_batch: int, *, drops: bool, last: int = STEPS) -> dict[str, Tensor]:
    """Return the weights of this rank itself after training with noise; those of others may have come apart."""
    make_optimizer = noised if way == "drive, a hook" else lambda parameters: Langevin(parameters, lr=0.1)
    make = make_dropping if drops else make_model
    seen: dict[str, Tensor] = {}

    def see(context: Any) -> dt.Verdict:
        seen.update({name: value.clone() for name, value in context.model.state_dict().items()})
        return dt.Verdict(save=True)

    settings = {"device": "cpu", "precision": "fp32", "num_workers": 0, "auto_optimize": False, "report": False}
    config = configure(output_dir=folder, batch_size=micro_batch, **settings)
    if way == "train":
        train(job_of(model=make, optimizer=make_optimizer, hooks=[dt.every(1, see)]), config=config)
        return seen
    model = make()
    going = dt.drive(
        model,
        make_optimizer(list(model.parameters())),
        TensorDataset(INPUTS, LABELS),
        name="habit",
        global_batch=BATCH,
        max_steps=STEPS,
        seed=SEED,
        config=config,
    )
    for batch in going:
        going.backward(cross_entropy(model, batch))
        going.step()
        if going.steps == last:
            break
    return dict(model.state_dict())


@pytest.mark.parametrize("way", ["train", "drive", "drive, a hook"])
def test_noise_of_an_optimizer_is_the_same_on_all_processes(tmp_path: Path, gloo_pool: GlooPool, way: str) -> None:
    """Each process drew its own, so that their models came apart, and rank 0 saved its own one."""
    alone = own_weights(str(tmp_path / "alone"), way, BATCH, drops=False)
    assert_same(own_weights(str(tmp_path / "divided"), way, 3, drops=False), alone)
    for weights in gloo_pool.run(own_weights_with, str(tmp_path / "two"), way, False, world=2):
        assert_same(weights, alone)
    first, second = gloo_pool.run(own_weights_with, str(tmp_path / "drops"), way, True, world=2)
    assert_same(first, second)


def own_weights_with(folder: str, way: str, drops: bool) -> dict[str, Tensor]:
    return own_weights(folder, way, 3, drops=drops)


def test_noise_of_an_optimizer_goes_on(tmp_path: Path) -> None:
    whole = own_weights(str(tmp_path / "whole"), "drive", 3, drops=True)
    own_weights(str(tmp_path / "broken"), "drive", 3, drops=True, last=3)
    assert_same(own_weights(str(tmp_path / "broken"), "drive", 3, drops=True), whole)
