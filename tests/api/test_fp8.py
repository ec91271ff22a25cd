"""Jobs in FP8, on a CPU, where torch multiplies in it as a GPU does, only slowly."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.api.measuring import plan
from drivetrain.core import precision as fp8
from drivetrain.core.errors import ConfigError
from drivetrain.core.precision import Fp8Linear
from drivetrain.planning import planner
from drivetrain.planning.probe import StepProbe
from tests.api.test_resume import CrashingLoss, PlantedError
from tests.gloo_pool import GlooPool
from tests.hardware_fixtures import load

WIDTH = 32


@pytest.fixture(autouse=True)
def small_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "LEAST_FEATURES", 16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + down


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 2 * WIDTH)  # large enough, but not in a block

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def job_of(name: str = "fp8", loss: Any = loss_of, steps: int = 6, **changes: Any) -> dt.Job:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(0, 9, (64,), generator=generator))
    made = {"model": Net, **changes}
    return dt.Job(
        name=name,
        data=data,
        loss=loss,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
        global_batch=32,
        max_steps=steps,
        seed=1,
        **made,
    )


def trained(folder: Path, job: dt.Job, precision: str = "fp8", **settings: Any) -> dt.Result:
    settings = {
        "gpu_mode": "cpu",
        "num_workers": 0,
        "report": False,
        "checkpoint_every": 2,
        "loss_weighting": "samples",
        **settings,
    }
    return dt.train(job, dt.configure(output_dir=folder, precision=precision, **settings), quiet=True)


def weights(result: dt.Result) -> dict[str, Tensor]:
    return torch.load(dt.export(result, result.folder / "weights.pt"), weights_only=True)


@pytest.mark.parametrize("precision", ["fp8", "fp8-tensor"])
def test_it_learns_what_bf16_learns(tmp_path: Path, precision: str) -> None:
    plain, ours = trained(tmp_path / "a", job_of(), "bf16"), trained(tmp_path / "b", job_of(), precision)
    assert plain.last is not None
    assert ours.last is not None
    assert ours.last.loss != plain.last.loss
    assert ours.last.loss == pytest.approx(plain.last.loss, rel=0.01)
    assert list(weights(ours)) == list(weights(plain)) == list(Net().state_dict())
    assert {tensor.dtype for tensor in weights(ours).values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp8", "fp8-tensor"])
def test_going_on_equals_never_having_stopped(tmp_path: Path, precision: str) -> None:
    whole = trained(tmp_path / "a", job_of(), precision)
    with pytest.raises(PlantedError):
        trained(tmp_path / "b", job_of(loss=CrashingLoss(loss_of, 6)), precision)
    rest = trained(tmp_path / "b", job_of(), precision)
    assert 0 < rest.resumed_from < 6
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(rest)[name]), name


@pytest.mark.parametrize("precision", ["fp8", "fp8-tensor"])
def test_micro_batches_change_rounding_only(tmp_path: Path, precision: str) -> None:
    whole, parts = (trained(tmp_path / str(size), job_of(), precision, batch_size=size) for size in (32, 12))
    assert whole.last is not None
    assert parts.last is not None
    # Sums of bf16 gradients in another order; in bf16 it is as much.
    assert parts.last.loss == pytest.approx(whole.last.loss, rel=2e-3)


def on_a_rank(folder: str) -> float:
    fp8.LEAST_FEATURES = 16
    last = trained(Path(folder), job_of()).last
    assert last is not None
    return last.loss


def test_two_ranks_learn_what_one_does(gloo_pool: GlooPool, tmp_path: Path) -> None:
    alone = on_a_rank(str(tmp_path / "one"))
    for found in gloo_pool.run(on_a_rank, str(tmp_path / "two"), world=2):
        assert found == pytest.approx(alone, rel=2e-3)


def test_only_blocks_are_changed_and_an_instance_is_given_back(tmp_path: Path) -> None:
    model = Net()
    trained(tmp_path, job_of(model=model))
    changed = [name for name, module in model.named_modules() if type(module) is Fp8Linear]
    assert changed == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    trained(tmp_path / "again", job_of("plain", model=model), "bf16")
    assert not [module for module in model.modules() if type(module) is Fp8Linear]


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dt.DrivetrainError, match="no linear layer that it would speed up"):
        trained(tmp_path, job_of(model=lambda: nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 9))))


def test_an_old_gpu_is_refused() -> None:
    for precision, machine, capability in (("fp8", "4x-l4", "9.0"), ("fp8-tensor", "8x-a100-80gb", "8.9")):
        with pytest.raises(ConfigError, match=f"{precision} needs compute capability {capability}, which "):
            dt.configure(precision=precision, hardware=load(machine))
    assert dt.configure(precision="fp8-tensor", hardware=load("4x-l4")).precision.dtype == "fp8-tensor"
    assert dt.configure(precision="fp8", hardware=load("h200")).precision.dtype == "fp8"


def test_compiled_it_is_the_same(tmp_path: Path) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.__class__, layer.recipe = Fp8Linear, "fp8"
    inputs = torch.randn(32, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        eager, compiled = layer(inputs), torch.compile(layer, backend="aot_eager", fullgraph=True)(inputs)
    assert torch.equal(eager, compiled)


def test_the_plan_offers_it_with_its_gain_and_never_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is taken to have FP8, and its steps to be twice as fast; losses are really compared."""
    original = StepProbe.__call__

    def probe(self: StepProbe, way: Any, seconds: float, **how: bool) -> Any:
        found = original(self, way, seconds, **how)
        update = {"sample_seconds": 0.5 if way.precision == "fp8" else 1.0, "is_brief": False}
        return found.model_copy(update=update)

    monkeypatch.setattr(StepProbe, "__call__", probe)
    monkeypatch.setattr(planner, "_fp8_recipes", lambda run: ["fp8", "fp8-tensor"])
    monkeypatch.setattr(planner, "_why_no_fp8", lambda run, model, way: "")
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", plan_cache=False, num_workers=0, compile=False)
    assert "fp8 was not measured: some " in str(plan(job_of(), config, measure=True).notes)
    config = config.model_copy(update={"plan": config.plan.model_copy(update={"budget_seconds": 1e6})})
    found = plan(job_of(), config, measure=True)
    assert found.choices["precision.dtype"].value == "fp32"
    offered, refused = (note for note in found.notes if note.startswith("fp8"))
    moved = re.fullmatch(
        r"fp8 would be 2\.00 × as fast here \(measured\), and its loss differs by (.*)% after 20 steps; "
        r"say --precision fp8 to have it",
        offered,
    )
    assert moved is not None
    assert 0 <= float(moved[1]) < 2
    assert refused == "fp8-tensor is not offered: 1.00 × as fast here (measured)"
