"""`dt.predict` and `dt.evaluate` on other data than the job's, against a plain loop over the data set."""

import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drivetrain as dt
from tests.api.jobs import Mlp, Variant, Vectors, make_job
from tests.gloo_pool import GlooPool

SMALL = Variant(steps=4, num_samples=40, global_batch=16)
Pair = namedtuple("Pair", "high low")


def config(folder: Path | str, **values: Any) -> dt.Config:
    return dt.configure(output_dir=folder, gpu_mode="cpu", loss_weighting="samples", report=False, **values)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dt.Result:
    job = make_job(SMALL, valid=Vectors(SMALL), metrics={"accuracy": correct}, valid_every=2)
    return dt.train(job, config(tmp_path_factory.mktemp("predict")), quiet=True)


def correct(output: Tensor, batch: Any) -> Tensor:
    return output.argmax(1) == batch[1]


def other_data(num_samples: int = 23) -> Vectors:
    data = Vectors(Variant(num_samples=num_samples))
    data.inputs = data.inputs * -1.5
    return data


def by_hand(result: dt.Result, data: Vectors, which: str) -> Tensor:
    """A plain loop, sample by sample."""
    model = Mlp(0.0).double()
    path = result.folder / f"by-hand-{which}.pt"
    model.load_state_dict(torch.load(dt.export(result, path, which=which)))  # type: ignore[arg-type]
    with torch.no_grad():
        return torch.cat([model(data[index][0][None]) for index in range(len(data))])


def nested(model: nn.Module, batch: Any) -> Any:
    output = model(batch[0])
    return {"pair": Pair(output.amax(1), output.amin(1)), "which": [output.argmax(1) == 1], "none": None}


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_outputs_are_those_of_a_plain_loop(result: dt.Result, tmp_path: Path, micro_batch: int | None) -> None:
    data = other_data()
    found = dt.predict(result, data, config=config(tmp_path, batch_size=micro_batch))
    torch.testing.assert_close(found, by_hand(result, data, "best"), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(found, result.model(data.inputs), rtol=1e-12, atol=1e-12)
    last = dt.predict(result.folder, data, job=result.job, which="last", config=config(tmp_path))
    torch.testing.assert_close(last, by_hand(result, data, "last"), rtol=1e-12, atol=1e-12)


def predict_on_rank(folder: str, num_samples: int, micro_batch: int) -> tuple[Any, Any]:
    job = make_job(SMALL, valid=Vectors(SMALL))
    data, settings = other_data(num_samples), config(Path(folder).parent, batch_size=micro_batch)
    return (
        dt.predict(folder, data, job=job, config=settings),
        dt.predict(folder, data, job=job, config=settings, forward=nested),
    )


@pytest.mark.parametrize(("num_samples", "micro_batch"), [(23, 4), (9, 4), (1, 4)])
def test_ranks_share_the_rows(result: dt.Result, gloo_pool: GlooPool, num_samples: int, micro_batch: int) -> None:
    expected = by_hand(result, other_data(num_samples), "best")
    for found, parts in gloo_pool.run(predict_on_rank, str(result.folder), num_samples, micro_batch, world=2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert type(parts["pair"]) is Pair
        torch.testing.assert_close(parts["pair"].low, expected.amin(1), rtol=1e-12, atol=1e-12)
        assert torch.equal(parts["which"][0], expected.argmax(1) == 1)
        assert parts["none"] is None


def fail_on_one(folder: str) -> None:
    def forward(model: nn.Module, batch: Any) -> Tensor:
        if torch.distributed.get_rank() == 1:
            raise ValueError("no luck")
        return model(batch[0])

    dt.predict(folder, other_data(), job=make_job(SMALL), forward=forward, config=config(Path(folder).parent))


def test_a_rank_that_fails_ends_all(result: dt.Result, gloo_pool: GlooPool) -> None:
    with pytest.raises((ValueError, dt.DrivetrainError), match="no luck"):
        gloo_pool.run(fail_on_one, str(result.folder), world=2)


def test_outputs_in_files(result: dt.Result, tmp_path: Path) -> None:
    path = tmp_path / "new" / "outputs.pt"
    data, settings = other_data(), config(tmp_path)
    assert dt.predict(result, data, path, config=settings) == path
    assert torch.equal(torch.load(path), dt.predict(result, data, config=settings))
    with pytest.raises(dt.DrivetrainError, match=r"ends in '\.csv'"):
        dt.predict(result, data, tmp_path / "outputs.csv", config=settings)


def test_outputs_in_a_parquet_file(result: dt.Result, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    data, settings = other_data(), config(tmp_path)

    def forward(model: nn.Module, batch: Any) -> Any:
        return {**nested(model, batch), "rows": model(batch[0]).bfloat16()}

    table = parquet.read_table(dt.predict(result, data, tmp_path / "outputs.parquet", forward=forward, config=settings))
    expected = dt.predict(result, data, forward=forward, config=settings)
    assert table.column_names == ["pair.high", "pair.low", "which.0", "rows"]
    assert table["pair.low"].to_pylist() == expected["pair"].low.tolist()
    assert table["which.0"].to_pylist() == expected["which"][0].tolist()
    assert table["rows"].to_pylist() == expected["rows"].tolist()


def test_parquet_without_pyarrow(result: dt.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(dt.DrivetrainError, match="needs pyarrow") as found:
        dt.predict(result, other_data(), tmp_path / "outputs.parquet")
    assert found.value.remedy == "pip install pyarrow, or give a path that ends in .pt"


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (None, "which knows how the model is called, raised"),
        (lambda model, batch: model(batch).mean(), r"the output has the shape \(\) for a batch of 8 samples"),
        (lambda model, batch: {"name": "x"}, r"the output\['name'\] is of type str"),
        (lambda model, batch: model(batch)[:, : 1 + int(len(batch) == 8)], "rows of different shapes"),
    ],
)
def test_outputs_without_rows(result: dt.Result, tmp_path: Path, forward: Any, words: str) -> None:
    inputs = other_data(13).inputs
    with pytest.raises(dt.DrivetrainError, match=words):
        dt.predict(result, inputs, forward=forward, config=config(tmp_path, batch_size=8))


def test_data_without_order_and_runs_without_job(result: dt.Result) -> None:
    with pytest.raises(dt.ConfigError, match="no length"):
        dt.predict(result, iter([1]))
    with pytest.raises(dt.DrivetrainError, match="expected a Job") as found:
        dt.predict(result.folder, other_data())
    assert "job=job" in str(found.value.remedy)
    with pytest.raises(dt.DrivetrainError, match="no run is given"):
        dt.evaluate(result.job)


def test_evaluation_on_other_data(result: dt.Result, tmp_path: Path) -> None:
    data, settings = other_data(), config(tmp_path, batch_size=5)
    output = by_hand(result, data, "last")
    loss, share = functional.cross_entropy(output, data.labels), correct(output, (None, data.labels)).double().mean()
    expected = {"valid_loss": float(loss), "valid_accuracy": float(share)}
    assert dt.evaluate(result, data=data, config=settings) == pytest.approx(expected, rel=1e-9)
    assert dt.evaluate(result.job, result.folder, settings, data=data) == pytest.approx(expected, rel=1e-9)
    named = dt.evaluate(result, data={"own": Vectors(SMALL), "other": data}, config=settings)
    assert named["valid_other_loss"] == pytest.approx(expected["valid_loss"], rel=1e-9)
    assert named["valid_own_loss"] == named["valid_loss"] == pytest.approx(result.metrics["valid_loss"], rel=1e-9)
