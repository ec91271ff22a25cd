"""Models that come compiled or wrapped: weights keep the model's own names, in every direction."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.checkpoint.weights import renamed
from drivetrain.run.model_factory import unwrapped
from tests.core.test_optimizers import StopAt

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[1](torch.relu(self.blocks[0](x)))
        return out


NAMES = {"blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"}


def compiled() -> Any:
    return torch.compile(Net(), backend="eager")


def partly_compiled() -> nn.Module:
    net = Net()
    net.blocks[0] = torch.compile(net.blocks[0], backend="eager")  # type: ignore[assignment]
    return net


def parallel() -> nn.Module:
    return nn.DataParallel(Net())


def both() -> Any:
    return torch.compile(nn.DataParallel(Net()), backend="eager")


WRAPPED = {"compiled": compiled, "partly": partly_compiled, "parallel": parallel, "both": both}


def job(model: Any, name: str = "wrapped", stop_at: int = 0, **changes: Any) -> dt.Job:
    values: dict[str, Any] = {
        "name": name,
        "model": model,
        "data": TensorDataset(X, Y),
        "valid": TensorDataset(X, Y),
        "loss": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda groups: torch.optim.AdamW(groups, lr=0.01),
        "global_batch": 8,
        "epochs": 2,
        "checkpoint_every": 3,
        "hooks": [StopAt(stop_at)],
    }
    return dt.Job(**{**values, **changes})


@pytest.mark.parametrize("kind", WRAPPED)
def test_weights_have_the_models_own_names(kind: str, tmp_path: Path) -> None:
    config = dt.configure(output_dir=tmp_path, report=False)
    plain = load_file(dt.export(dt.train(job(Net, "plain"), config, quiet=True)))
    with pytest.raises(RuntimeError, match="planted"):
        dt.train(job(WRAPPED[kind], stop_at=5), config, quiet=True)
    result = dt.train(job(Net), config, quiet=True)  # goes on without the wrapper
    assert result.resumed_from >= 3
    found = load_file(dt.export(result))
    assert found.keys() == NAMES == plain.keys()
    for name in NAMES:
        torch.testing.assert_close(found[name], plain[name])
    assert dt.evaluate(job(WRAPPED[kind]), result)["valid_loss"] == pytest.approx(result.metrics["valid_loss"])


def test_an_instance_stays_the_one_that_was_handed_in(tmp_path: Path) -> None:
    net = Net()
    wrapper = torch.compile(net, backend="eager")
    before = net.blocks[0].weight.detach().clone()
    dt.train(job(wrapper), dt.configure(output_dir=tmp_path, report=False), quiet=True)
    assert not torch.equal(net.blocks[0].weight, before)
    model, _ = unwrapped(torch.compile(Net(), backend="eager"))  # type: ignore[arg-type]
    assert type(model) is Net
    assert model._compiled_call_impl is not None  # what was asked for is still done


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", ""])
def test_weights_of_wrapped_models_are_taken(prefix: str, tmp_path: Path) -> None:
    net = Net()
    file = tmp_path / "weights.safetensors"
    save_file({f"{prefix}{name}": value for name, value in net.state_dict().items()}, file)
    made: list[nn.Module] = []

    def remembered() -> nn.Module:
        made.append(compiled())
        return made[-1]

    changes = {"init_from": file, "max_steps": 1, "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.0)}
    result = dt.train(job(remembered, **changes), dt.configure(output_dir=tmp_path, report=False), quiet=True)
    found = load_file(dt.export(result))
    assert all(torch.equal(found[name], value) for name, value in net.state_dict().items())


def test_a_part_that_is_called_module_keeps_its_name() -> None:
    assert renamed(["module.weight"], ["module.weight"]) == {"module.weight": "module.weight"}
    assert renamed(["module.weight"], ["weight"]) == {"module.weight": "weight"}
    assert renamed(["a._orig_mod.weight"], ["a.weight"]) == {"a._orig_mod.weight": "a.weight"}


def test_checkpoints_of_before_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints used to hold the names of the wrapper."""
    config = dt.configure(output_dir=tmp_path, report=False)
    expected = load_file(dt.export(dt.train(job(Net, "plain"), config, quiet=True)))
    with monkeypatch.context() as patch:
        patch.setattr("drivetrain.run.model_factory.unwrapped", lambda model: (model, []))
        with pytest.raises(RuntimeError, match="planted"):
            dt.train(job(compiled, stop_at=5), config, quiet=True)
        assert set(load_file(dt.export(tmp_path / "wrapped"))) == NAMES
    result = dt.train(job(compiled), config, quiet=True)
    assert result.resumed_from >= 3
    found = load_file(dt.export(result))
    assert found.keys() == NAMES
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name])


def test_weights_without_values_are_named(tmp_path: Path) -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Net()

    for model in (on_meta, on_meta()):
        with pytest.raises(
            dt.DrivetrainError, match=r"4 of the model's 4 tensors are on the meta device.*blocks\.0"
        ) as e:
            dt.train(job(model), dt.configure(output_dir=tmp_path, report=False), quiet=True)
        assert "to_empty" in e.value.remedy
