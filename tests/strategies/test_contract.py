"""What every strategy of the registry holds, and the example of CONTRIBUTING.md: one suite, which finds them by itself.

The same losses and weights as a plain loop; stop, save, load, go on: the same bits; another world goes on.
"""

import re
import shutil
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drivetrain.core.plugins import STRATEGIES, strategy_facts
from drivetrain.moe import MixtureOfExperts
from drivetrain.run import Session
from tests.api.jobs import Trained, Variant, make_job, plain_loop, run
from tests.api.test_equivalence import difference
from tests.api.test_resume import CrashingLoss, PlantedError, assert_identical
from tests.gloo_pool import GlooPool
from tests.strategies.test_data_parallel import two_copies

EXAMPLE = "contributed_strategy:SPEC"
OPTIONS: dict[str, dict[str, Any]] = {"expert_parallel": {"expert_rest": "fsdp"}}  # a second time, with these
MICRO_BATCH = 4
ROOT = Path(__file__).parents[2]


def cases() -> list[Any]:
    found = []
    for name in (*STRATEGIES.names(), EXAMPLE):
        facts, marks = strategy_facts(name), []
        if facts.package:
            missing = find_spec(facts.package) is None
            marks = [getattr(pytest.mark, facts.package), pytest.mark.skipif(missing, reason=f"needs {facts.package}")]
        for options in ({}, OPTIONS[name]) if name in OPTIONS else ({},):
            given = {"parallel_strategy": name, **options}
            found.append(pytest.param(given, id=" ".join(map(str, given.values())), marks=marks))
    return found


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the strategy that CONTRIBUTING.md shows where the ranks find it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "contributed_strategy.py").write_text(next(block for block in blocks if "StrategySpec(" in block))
    monkeypatch.syspath_prepend(tmp_path)


class Mixed(nn.Module):
    """A mixture of experts, which every strategy trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.mixture = MixtureOfExperts(8, 4, 8, k=2)
        self.out = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.out(self.mixture(torch.tanh(self.first(inputs))))
        return result


def train_with(folder: str, settings: dict[str, Any], variant: Variant, mixed: bool, at_call: int) -> Trained | None:
    changes: dict[str, Any] = {"model": lambda: Mixed().to(variant.dtype)} if mixed else {}
    if at_call:
        changes["loss"] = CrashingLoss(make_job(variant).loss, at_call)
    with ExitStack() as stack:
        if strategy_facts(settings["parallel_strategy"]).devices == "several":
            # Configuration refuses it here, for want of GPUs; copies that share their weights stand in for them.
            stack.enter_context(mock.patch.object(Session, "make_strategy", two_copies))
            settings = {key: value for key, value in settings.items() if key != "parallel_strategy"}
        try:
            return run(folder, variant, MICRO_BATCH, settings=settings, **changes)
        except PlantedError:
            return None


def worlds_of(strategy: str) -> tuple[int, int]:
    """One number of processes that the strategy can be used in, and another one, if there is one."""
    return {"one": (1, 1), "several": (2, 3), "any": (2, 1)}[strategy_facts(strategy).processes]


def dtype_of(strategy: str) -> torch.dtype:
    return torch.float32 if strategy_facts(strategy).memory == "zero" else torch.float64


pytestmark = pytest.mark.usefixtures("example")


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize("settings", cases())
def test_it_is_the_plain_loop(gloo_pool: GlooPool, tmp_path: Path, settings: dict[str, Any], kind: str) -> None:
    """Ragged steps, and a last one of an epoch that leaves a rank without samples; clipped, with a schedule."""
    name = settings["parallel_strategy"]
    if strategy_facts(name).shares_experts:
        pytest.skip("its plain loop is in test_expert_parallel.py: it needs a mixture")
    variant = Variant(kind, dtype_of(name), global_batch=15, num_samples=46, steps=6)
    arguments = (str(tmp_path / "run"), settings, variant, False, 0)
    trained = gloo_pool.run(train_with, *arguments, world=worlds_of(name)[0])[0]
    of_losses, of_weights = difference(trained, *plain_loop(variant))
    exact = variant.dtype == torch.float64
    assert of_losses < (1e-10 if exact else 1e-5)
    if exact or kind == "mlp":  # in float32 the bias of a key drifts in any strategy: its gradient is rounding alone
        assert of_weights < (1e-10 if exact else 1e-3)


@pytest.mark.parametrize("settings", cases())
def test_stop_and_go_on(gloo_pool: GlooPool, tmp_path: Path, settings: dict[str, Any]) -> None:
    """In the same world every bit is the same; in another one, to rounding."""
    name = settings["parallel_strategy"]
    world, other = worlds_of(name)
    variant = Variant("mlp", dtype_of(name), global_batch=16, num_samples=64, steps=6, save_every=3)

    def train(folder: str, world: int, at_call: int = 0) -> Trained | None:
        found: Trained | None = gloo_pool.run(
            train_with, str(tmp_path / folder), settings, variant, True, at_call, world=world
        )[0]
        return found

    calls = 16 // world // MICRO_BATCH * (2 if strategy_facts(name).devices == "several" else 1)  # one per copy
    whole = train("whole", world)
    assert train("same", world, 1 + 4 * calls + 1) is None, "it crashed in the fifth step"
    shutil.copytree(tmp_path / "same", tmp_path / "moved")
    same = train("same", world)
    assert whole is not None
    assert same is not None
    assert same.resumed_from == 3
    assert_identical(same, whole)
    if other != world:
        moved = train("moved", other)
        assert moved is not None
        assert moved.resumed_from == 3
        exact = variant.dtype == torch.float64
        assert moved.losses == pytest.approx(whole.losses, abs=1e-10 if exact else 1e-5)
        assert moved.weights.keys() == whole.weights.keys()
        for key, value in whole.weights.items():
            assert np.allclose(moved.weights[key], value, rtol=0, atol=1e-10 if exact else 1e-3), key
