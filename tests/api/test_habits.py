"""What people bring from loops of their own: it trains as their loop does, or is refused or reported in words."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain import DrivetrainError, Job
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.data.division import SampleStream

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
    """Samples labelled -100 were left out of the measurement, and the loss was taken for a mean over all samples."""
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
