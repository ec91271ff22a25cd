"""How long a job is trained: as it says, or as the configuration says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Job, configure, train
from drivetrain.core.errors import ConfigError
from drivetrain.run.job_settings import of_asked_length


def job() -> Job:
    data = TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
    return Job(
        name="length",
        model=lambda: nn.Linear(3, 1),
        data=data,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=torch.optim.SGD,
        global_batch=4,
        epochs=5,
    )


def test_what_is_configured_goes_before_what_the_job_says() -> None:
    assert of_asked_length(job(), configure()).num_steps == 15
    assert of_asked_length(job(), configure(epochs=2)).num_steps == 6
    assert of_asked_length(job(), configure(max_steps=7)).num_steps == 7
    read = replace(job(), length_is_read=True)  # a recipe, for which an epoch may be something else
    assert of_asked_length(read, configure(epochs=2)).num_steps == 15


def test_what_the_data_cannot_is_said_of_the_configuration() -> None:
    once = replace(job(), data=(item for item in [(torch.zeros(3), torch.zeros(1))]), epochs=None, max_steps=5)
    with pytest.raises(ConfigError, match=r"budget.epochs \(the configuration of this run\): .*only once"):
        of_asked_length(once, configure(epochs=2))


def test_it_is_obeyed_in_python_as_on_the_command_line(tmp_path: Path) -> None:
    settings = {"output_dir": tmp_path, "gpu_mode": "cpu", "report": False}
    assert train(job(), configure(epochs=2, **settings), quiet=True).steps == 6
    assert train(job(), configure(name="whole", **settings), quiet=True).steps == 15
