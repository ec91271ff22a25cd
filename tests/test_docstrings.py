"""Public names document every parameter, with an example that runs."""

import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain import moe

OF_MIXTURES = ("Balance", "Knowledge", "Lifecycle", "LoadReport", "MixtureOfExperts", "Rules", "Sleep", "SleepRules")
PUBLIC = [*(name for name in dt.__all__ if name != "__version__"), *OF_MIXTURES]
MADE_BY_OTHERS = {"Drive", "Hook"}  # `dt.drive` makes the first, users the second: no one passes their parameters


def public(name: str) -> Any:
    return getattr(moe if name in OF_MIXTURES else dt, name)


def documented(name: str) -> str:
    return inspect.getdoc(public(name)) or ""


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in MADE_BY_OTHERS])
def test_every_parameter_is_documented(name: str) -> None:
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", documented(name), re.MULTILINE | re.DOTALL)
    named = re.findall(r"^ {4}(\w+): ", section[1], re.MULTILINE) if section else []
    parameters = inspect.signature(public(name)).parameters
    assert named == [parameter for parameter in parameters if parameter != "self"]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Example:" in documented(name)
    monkeypatch.chdir(tmp_path)
    inputs = torch.linspace(0, 1, 64).unsqueeze(1)
    job = dt.Job(
        name="line",
        model=lambda: torch.nn.Linear(1, 1),
        data=TensorDataset(inputs, 2 * inputs + 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=16,
        max_steps=2,
    )
    names: dict[str, Any] = {"dt": dt, "torch": torch, "job": job}
    example = doctest.DocTestParser().get_doctest(documented(name), names, name, None, None)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert result.attempted or "+SKIP" in documented(name)
    assert result.failed == 0
