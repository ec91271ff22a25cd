"""What `dt.train` returns: the weights in a model again, the best validation, the report."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import drivetrain as dt
from drivetrain.run import Best
from tests.api.jobs import Mlp, Variant, Vectors, make_job
from tests.gloo_pool import GlooPool

SMALL = Variant(steps=6, num_samples=40, global_batch=16)


def trained(folder: Path | str, **changes: Any) -> dt.Result:
    config = dt.configure(output_dir=folder, gpu_mode="cpu", loss_weighting="samples", report=False)
    return dt.train(make_job(SMALL, **changes), config, quiet=True)


class Rising(nn.Module):
    """Its validation gets worse with each step: the first one is the best."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen", torch.rand(3), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight + inputs[:, 0] * 0


def rising_loss(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0]).mean()
    return -output if model.training else output * 0 + output.detach().abs()


def run_rising(folder: str, **changes: Any) -> dt.Result:
    sgd = {"optimizer": lambda groups: torch.optim.SGD(groups, lr=1.0), "schedule": dt.Constant()}
    job = {"model": Rising, "loss": rising_loss, "valid": Vectors(SMALL), "valid_every": 2, "clip_norm": None, **sgd}
    return trained(folder, **job | changes)


def test_the_model_has_the_best_weights(tmp_path: Path) -> None:
    result = run_rising(str(tmp_path))
    assert result.best == Best(2.0, 2, "valid_loss")
    assert result.best_step == 2
    assert result.metrics == {"valid_loss": 6.0}
    assert result.model.weight.item() == 2.0
    assert not result.model.training
    assert result.model is result.model
    torch.manual_seed(SMALL.seed)
    assert torch.equal(result.model.seen, torch.rand(3))  # buffers that no file has are those of the run


def test_without_validation_it_has_the_last_weights(tmp_path: Path) -> None:
    given = Mlp(0.0).double()
    result = trained(tmp_path, model=given)
    assert result.best is None
    assert result.model is not given
    for name, value in load_file(dt.export(result)).items():
        assert torch.equal(result.model.state_dict()[name], value)
        assert torch.equal(given.state_dict()[name], value)


def test_it_has_the_average_where_one_is_kept(tmp_path: Path) -> None:
    result = trained(tmp_path, ema=0.5)
    averaged, plain = (load_file(dt.export(result, tmp_path / f"{way}.safetensors", average=way)) for way in (1, 0))
    found = dict(result.model.named_parameters())
    assert all(torch.equal(found[name], averaged[name]) for name in found)
    assert not all(torch.equal(found[name], plain[name]) for name in found)


def test_the_report(tmp_path: Path) -> None:
    assert trained(tmp_path / "without").report is None
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", loss_weighting="samples", report=True)
    result = dt.train(make_job(Variant(steps=1, num_samples=16, global_batch=16)), config, quiet=True)
    assert result.report == result.folder / "report.html"
    assert result.report.is_file()


def test_a_pickled_result_has_no_model(tmp_path: Path) -> None:
    result = trained(tmp_path)
    assert result.model is not None
    again = pickle.loads(pickle.dumps(result))
    assert again == result
    with pytest.raises(dt.DrivetrainError, match="without the job"):
        _ = again.model


def model_on_ranks(folder: str, strategy: str) -> float:
    config = dt.configure(
        output_dir=folder, gpu_mode="cpu", loss_weighting="samples", report=False, parallel_strategy=strategy
    )
    result = dt.train(make_job(SMALL, valid=Vectors(SMALL)), config, quiet=True)
    return float(sum(parameter.double().sum() for parameter in result.model.parameters()))


def test_each_rank_has_the_whole_model(tmp_path: Path, gloo_pool: GlooPool) -> None:
    found = gloo_pool.run(model_on_ranks, str(tmp_path), "fsdp", world=2)
    weights = load_file(dt.export(tmp_path / "suite", tmp_path / "best.safetensors", which="best"))
    assert found == [pytest.approx(float(sum(value.double().sum() for value in weights.values())))] * 2
