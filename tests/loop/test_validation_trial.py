"""One batch of each validation set is tried before the first step, and leaves no trace."""

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.checkpoint import Checkpoint
from drivetrain.loop.validation import Validation
from tests.gloo_pool import GlooPool


class Restless(nn.Module):
    """Draws at random and changes its buffers in evaluation mode, too: one in place, one by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        return self.layers(inputs) * (1 + 0.01 * noise + 0.1 * self.calls + 0.1 * self.replaced)


def data_of(num_samples: int = 24, width: int = 3, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(num_samples, width, generator=generator), torch.arange(num_samples) % 2)


def loss_of(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def correct(output: Tensor, batch: Any) -> Tensor:
    return output.argmax(1) == batch[1]


def job_of(**changes: Any) -> dt.Job:
    values: dict[str, Any] = {
        "name": "tried",
        "model": Restless,
        "data": data_of(),
        "loss": loss_of,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "global_batch": 8,
        "max_steps": 6,
        "valid": data_of(10, seed=2),
        "valid_every": 3,
        "metrics": {"accuracy": correct},
        "checkpoint_every": 3,
    }
    return dt.Job(**{**values, **changes})


def train(folder: Path | str, job: dt.Job) -> dt.Result:
    config = dt.configure(output_dir=folder, gpu_mode="cpu", num_workers=0, loss_weighting="samples", report=False)
    return dt.train(job, config, quiet=True)


def flawed(output: Tensor, batch: Any) -> Tensor:
    return batch[7]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"metrics": {"accuracy": correct, "recall": flawed}},
            dt.DrivetrainError,
            r"the metric 'recall' raised IndexError.*first batch of the validation set",
        ),
        (
            {"valid": {"clean": data_of(10), "noisy": data_of(10, width=4)}},
            RuntimeError,
            r"first batch of the validation set 'noisy'.*\(8, 4\)",
        ),
    ],
    ids=["metric", "shape"],
)
def test_what_would_end_the_first_validation_ends_the_start(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        train(tmp_path, job_of(**changes))
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert re.search(words, said, re.DOTALL), said
    assert (tmp_path / "tried" / "steps.jsonl").read_text() == ""


def test_it_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and validation are the same to the bit as without it."""

    def result_of(name: str) -> tuple[list[str], dict[str, Tensor]]:
        result = train(tmp_path / name, job_of(ema=0.9))
        saved = Checkpoint.open(result.folder / "checkpoints" / "step-00000006")
        lines = [line.partition('"seconds"')[0] for line in (result.folder / "steps.jsonl").read_text().splitlines()]
        lines += [line.partition('"seconds"')[0] for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
        return lines, {key: saved.read(key) for key in saved.keys}

    tried, calls = Validation.check, list[str]()

    def watched(validation: Validation, context: dt.StepContext) -> None:
        def state() -> list[Any]:
            model, generators = context.model, [random.getstate(), np.random.get_state()[1], torch.get_rng_state()]
            modes = [module.training for module in model.modules()]
            return [[*map(str, generators)], modes, {name: value.clone() for name, value in model.state_dict().items()}]

        before = state()
        tried(validation, context)
        generators, modes, weights = state()
        assert [generators, modes] == before[:2]
        assert all(torch.equal(value, before[2][name]) for name, value in weights.items())
        calls.append("tried")

    monkeypatch.setattr(Validation, "check", watched)
    with_it = result_of("with")
    assert calls == ["tried"]
    monkeypatch.setattr(Validation, "check", lambda *_: None)
    without = result_of("without")
    assert with_it[0] == without[0]
    assert all(torch.equal(value, without[1][key]) for key, value in with_it[1].items())


def test_a_run_that_goes_on_was_tried_before(tmp_path: Path) -> None:
    seen, is_planted = list[int](), [True]

    def counting(output: Tensor, batch: Any) -> Tensor:
        seen.append(len(output))
        return correct(output, batch)

    def crash(context: dt.StepContext) -> None:
        if context.step == 4 and is_planted and is_planted.pop():
            raise KeyError("planted")

    job = job_of(metrics={"accuracy": counting}, hooks=[dt.every(1, crash)], valid_batch=5)
    with pytest.raises(KeyError):
        train(tmp_path, job)
    assert seen == [5, 5, 5], "one batch tried, then the two of the set"
    assert train(tmp_path, job).resumed_from == 3
    assert seen == [5] * 5


def fail_on_one_rank(folder: str) -> str:
    def loss(model: Any, batch: Any) -> Tensor:
        if not model.training and torch.distributed.get_rank() == 1:
            raise KeyError("planted")
        return loss_of(model, batch)

    try:
        train(folder, job_of(loss=loss))
    except (KeyError, dt.DrivetrainError) as error:
        return " ".join([str(error), *getattr(error, "__notes__", [])])
    return ""


def test_all_ranks_end_together(tmp_path: Path, gloo_pool: GlooPool) -> None:
    first, second = gloo_pool.run(fail_on_one_rank, str(tmp_path), world=2)
    assert "validation failed: rank 1: KeyError: 'planted'" in first
    assert "first batch of the validation set" in second
    assert (tmp_path / "tried" / "steps.jsonl").read_text() == ""


def test_an_own_loop_is_tried_too(tmp_path: Path) -> None:
    model = Restless()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, report=False)
    run = dt.drive(
        model, optimizer, data_of(), name="own", global_batch=8, epochs=1, valid=data_of(10), loss=loss_of,
        metrics={"recall": flawed}, config=config, quiet=True,
    )  # fmt: skip
    with pytest.raises(dt.DrivetrainError, match="the metric 'recall' raised IndexError"):
        next(iter(run))


class Centers(nn.Module):
    """Keeps a center, a teacher and the state of the batch before; all change in evaluation mode, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.out = nn.LSTMCell(3, 4), nn.Linear(4, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)
        self.register_buffer("center", torch.zeros(2))
        self.register_buffer("replaced", torch.tensor([math.nan, 0.0]))
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        before = None if self.state is None else tuple(part.detach()[: len(inputs)] for part in self.state)
        self.state = self.cell(inputs, before)
        output = self.out(self.state[0])
        self.center.lerp_(output.detach().mean(0), 0.5)
        self.teacher.weight.data.mul_(0.9)
        self.replaced = self.replaced + 1
        return output - 0.1 * self.center + self.teacher(inputs) * self.replaced[1]


def test_validation_does_not_change_what_the_model_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It moved the center and the state of the batch before, and training went on from there."""
    alone = train(tmp_path / "alone", job_of(model=Centers, valid=None, valid_every=None, metrics={}))
    validated = train(tmp_path / "validated", job_of(model=Centers, valid_every=1))
    for result in (alone, validated):
        dt.export(result, result.folder / "last.pt")
    expected, found = (torch.load(result.folder / "last.pt") for result in (alone, validated))
    for name, value in expected.items():
        assert torch.equal(found[name].nan_to_num(), value.nan_to_num()), name
    told = [line for line in capsys.readouterr().err.splitlines() if "validation changes" in line]
    assert len(told) == 1
    assert "center, replaced, teacher.weight" in told[0]


def derivative(model: Any, batch: Any) -> Tensor:
    """A loss of the model's derivative, as of a differential equation or a penalty on gradients."""
    inputs = batch[0].clone().requires_grad_(True)
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return (slope - 1).square().mean()


def smooth() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def test_a_loss_that_computes_gradients_is_validated(tmp_path: Path) -> None:
    def on_host(output: Tensor, batch: Any) -> Tensor:
        return torch.from_numpy(output.numpy().argmax(1)) == batch[1]

    job = job_of(model=smooth, loss=derivative, metrics={"accuracy": on_host}, valid_batch=4)
    result = train(tmp_path, job)
    valid = data_of(10, seed=2)
    expected = derivative(result.model, (valid.tensors[0], valid.tensors[1])).item()
    assert result.best is not None
    assert result.best.value == pytest.approx(expected, rel=1e-5)
    found = dt.predict(result, valid)
    assert torch.allclose(found, result.model(valid.tensors[0]).detach(), atol=1e-6)
    assert not found.requires_grad


def root(output: Tensor, batch: Any) -> Tensor:
    return functional.mse_loss(output[:, 1], batch[1].float()).sqrt()


def mean_error(output: Tensor, batch: Any) -> Tensor:
    return (output[:, 1] - batch[1]).abs().mean()


def test_a_metric_that_is_no_mean_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its mean over batches depended on their size, without a word."""
    train(tmp_path, job_of(model=smooth, metrics={"mean": mean_error, "accuracy": correct, "root": root}))
    told = [line for line in capsys.readouterr().err.splitlines() if "is no mean over samples" in line]
    assert len(told) == 1
    assert "the metric 'root'" in told[0]


def top(output: Tensor, batch: Any) -> Tensor:
    """The accuracy in percent, in a tensor of one entry, as many scripts compute it."""
    return (output.argmax(1) == batch[1]).float().sum(0, keepdim=True).mul_(100 / len(batch[1]))


def test_a_metric_with_one_entry_for_each_batch_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its entries count alike: a mean over batches of 4, 4 and 2 samples, which was reported without a word."""
    job = job_of(model=smooth, valid_batch=4, metrics={"accuracy": correct, "top": top})
    train(tmp_path / "entry", job)
    told = [line for line in capsys.readouterr().err.splitlines() if "one entry for a batch of 4 samples" in line]
    assert len(told) == 1
    assert "the metric 'top'" in told[0]
    found = train(tmp_path / "scalar", replace(job, metrics={"accuracy": correct, "top": lambda *it: top(*it)[0]}))
    assert found.metrics["valid_top"] == pytest.approx(100 * found.metrics["valid_accuracy"])
    assert "one entry" not in capsys.readouterr().err


def test_a_metric_of_pairs_of_samples_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output of one column and labels without one broadcast: the accuracy was that of all pairs."""

    def of_pairs(output: Tensor, batch: Any) -> Tensor:
        return (output[:, 1:] > 0) == batch[1]

    def of_tokens(output: Tensor, batch: Any) -> Tensor:
        return output[:, :1].expand(-1, 4) > 0  # as many as a batch has samples

    train(tmp_path, job_of(model=smooth, valid_batch=4, metrics={"pairs": of_pairs, "tokens": of_tokens}))
    told = [line for line in capsys.readouterr().err.splitlines() if "entries as a batch has samples" in line]
    assert len(told) == 1
    assert "the metric 'pairs'" in told[0]


class Ranked:
    """The share of pairs in the right order, over the whole set: an area under a curve."""

    def __init__(self, collects: bool) -> None:
        self.collects, self.seen = collects, list[tuple[Tensor, Tensor]]()

    def reset(self) -> None:
        self.seen = []

    def update(self, output: Tensor, target: Tensor) -> None:
        self.seen.append((output[:, 1], target))

    def compute(self) -> float:
        seen = self.seen
        if self.collects and torch.distributed.is_initialized():
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, seen)
            seen = [pair for part in parts for pair in part]
        scores, labels = map(torch.cat, zip(*seen, strict=True))
        return float((scores[labels == 1][:, None] > scores[labels == 0]).float().mean())


def ranked(folder: str, collects: bool) -> float:
    job = job_of(model=smooth, metrics={"auc": Ranked(collects)}, valid=data_of(11, seed=2), valid_batch=3)
    return train(folder, job).metrics["valid_auc"]


def test_a_metric_object_has_to_collect_what_all_ranks_have_seen(tmp_path: Path, gloo_pool: GlooPool) -> None:
    """Each rank had the value of its own share, and rank 0's was reported."""
    alone = ranked(str(tmp_path / "alone"), collects=False)
    assert gloo_pool.run(ranked, str(tmp_path / "together"), True, world=2) == pytest.approx([alone, alone])
    with pytest.raises(Exception, match="add up what all ranks have seen"):
        gloo_pool.run(ranked, str(tmp_path / "apart"), False, world=2)


class Detector(nn.Module):
    """Returns losses where it is trained, and what it found otherwise, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        output = self.layers(inputs)
        return {"classes": functional.cross_entropy(output, labels)} if self.training else list(output)


def summed(model: Any, batch: Any) -> Any:
    found = model(*batch)
    return sum(found.values()) if isinstance(found, dict) else found


def summed_in_training(model: Any, batch: Any) -> Any:
    was_training = model.training
    model.train()
    losses = model(*batch)
    model.train(was_training)
    return sum(losses.values())


def test_a_model_without_losses_in_evaluation_mode(tmp_path: Path) -> None:
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    with pytest.raises(dt.DrivetrainError, match="'loss' returned list") as caught:
        dt.train(job_of(model=Detector, loss=summed, metrics={}), config, quiet=True)
    assert "call model.train() first" in caught.value.remedy
    job = job_of(model=Detector, loss=summed_in_training, metrics={}, name="mended")
    assert dt.train(job, config, quiet=True).metrics["valid_loss"] > 0
