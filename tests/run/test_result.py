"""What `dt.train` returns: the weights in a model again, the best validation, the report."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import drivetrain as dt
from drivetrain.report.run_data import RunData, summary
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


def test_the_test_set_is_measured_once_with_the_best_weights(tmp_path: Path) -> None:
    sets = {"near": Vectors(SMALL), "far": Vectors(Variant(num_samples=7))}
    model = Rising()
    result = run_rising(str(tmp_path), model=model, test=sets, metrics={"twice": lambda output, batch: 2 * output})
    expected = {"loss": 2.0, "twice": 4.0}
    names = {f"test_{of}{name}": value for of in ("", "near_", "far_") for name, value in expected.items()}
    assert result.test == pytest.approx(names)
    assert model.weight.item() == 6.0  # it goes on with the last ones
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    (tested,) = [row for row in rows if "test_loss" in row]
    assert (tested["step"], tested["weights_of_step"]) == (6, 2)
    assert tested["test_far_twice"] == pytest.approx(4.0)
    data = RunData.read(result.folder)
    assert not any(name.startswith("test_") for name in (*data.metric_names, *data.logged_names))
    assert "test loss" in summary(data)


def test_a_test_without_validation_and_with_an_average(tmp_path: Path) -> None:
    data = Vectors(SMALL)
    result = trained(tmp_path, test=data, ema=0.5)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(result.model(data.inputs), data.labels)
    assert result.test == {"test_loss": pytest.approx(float(loss), rel=1e-9)}
    assert result.metrics == {}
    with pytest.raises(dt.ConfigError, match="the test set is empty"):
        make_job(SMALL, test=[])


def run_tested(folder: str, strategy: str) -> dict[str, float]:
    config = dt.configure(
        output_dir=folder, gpu_mode="cpu", loss_weighting="samples", report=False, parallel_strategy=strategy
    )
    job = make_job(SMALL, valid=Vectors(SMALL), valid_every=2, best=dt.Aim("valid_loss", "max"), test=Vectors(SMALL))
    return dict(dt.train(job, config, quiet=True).test)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_test_together(tmp_path: Path, gloo_pool: GlooPool, strategy: str) -> None:
    one, other = gloo_pool.run(run_tested, str(tmp_path), strategy, world=2)
    assert one == other
    rows = [json.loads(line) for line in (tmp_path / "suite" / "metrics.jsonl").read_text().splitlines()]
    worst = max(rows[:-1], key=lambda row: row["valid_loss"])
    assert worst["step"] < 6
    assert one["test_loss"] == pytest.approx(worst["valid_loss"], rel=1e-9)
