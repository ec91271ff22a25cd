"""Validation, early stopping, best checkpoints and the moving average, against plain loops over the whole set."""

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Aim, ConfigError, DrivetrainError, EarlyStopping, Job, LossSum, export, log
from drivetrain.api.training import Result, train
from drivetrain.checkpoint import Checkpoint
from drivetrain.config import configure
from drivetrain.run import assemble
from drivetrain.strategies.compiling import num_graphs
from tests.api.jobs import Mlp, Sentences, Variant, Vectors, make_job, token_loss
from tests.data.test_loader import started
from tests.gloo_pool import GlooPool

__all__ = ["started"]

FLOAT64 = Variant(steps=10, num_samples=40, global_batch=16, save_every=5)
NUM_VALID = 23  # divides by no number of ranks


def valid_set(variant: Variant = FLOAT64) -> Vectors:
    data = Vectors(Variant(dtype=variant.dtype, num_samples=NUM_VALID))
    data.inputs = data.inputs * 1.5
    return data


def correct(output: Tensor, batch: Any) -> Tensor:
    return output.argmax(1) == batch[1]


def squares(output: Tensor, batch: Any) -> Tensor:
    return (output - functional.one_hot(batch[1], 4)).square().sum(1)


def confidence(output: Tensor, batch: Any) -> Tensor:
    return output.softmax(1).amax(1).mean()


METRICS = {"accuracy": correct, "squares": squares, "confidence": confidence}


def trained(folder: Path | str, job: Job, micro_batch: int | None = None, **values: Any) -> Result:
    given = {"loss_weighting": "samples", "report": False, **values}  # loss functions here count their calls
    return train(job, configure(output_dir=folder, gpu_mode="cpu", batch_size=micro_batch, **given), quiet=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in found]


def by_hand(weights: dict[str, Tensor]) -> dict[str, float]:
    """The whole set at once, in float64."""
    model = Mlp(0.0).double()
    model.load_state_dict(weights)
    data = valid_set()
    with torch.no_grad():
        output = model(data.inputs)
    batch = (data.inputs, data.labels)
    return {
        "valid_loss": float(functional.cross_entropy(output, data.labels)),
        "valid_accuracy": int(correct(output, batch).sum()) / NUM_VALID,
        "valid_squares": float(squares(output, batch).mean()),
        "valid_confidence": float(confidence(output, batch)),
    }


def weights_at(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder / "checkpoints" / f"step-{step:08d}")
    return {key.removeprefix("model/"): checkpoint.read(key) for key in checkpoint.keys if key.startswith("model/")}


def run_world(folder: str, micro_batch: int | None) -> list[dict[str, Any]] | None:
    job = make_job(FLOAT64, valid=valid_set(), metrics=METRICS, valid_every=5, keep_last=5)
    result = trained(folder, job, micro_batch)
    return rows(result.folder) if result.is_main else None


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_metrics_are_those_of_the_whole_set_at_once(tmp_path: Path, micro_batch: int | None) -> None:
    found = run_world(str(tmp_path), micro_batch)
    assert found is not None
    assert [row["step"] for row in found] == [5, 10]
    for row in found:
        expected = by_hand(weights_at(tmp_path / "suite", row["step"]))
        assert row["valid_accuracy"] == expected["valid_accuracy"]
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-9), name


def correct_as_a_loss(model: Any, batch: Any) -> Tensor:
    return correct(model(batch[0]), batch)


def confidence_as_a_loss(model: Any, batch: Any) -> Tensor:
    return confidence(model.forward(batch[0]), batch)


def test_a_metric_may_be_written_as_the_loss_is(tmp_path: Path) -> None:
    """It is recognized by what it does with the output of the model: it calls it, or asks for what the model has."""
    ours = {"accuracy": correct, "confidence": confidence, "again": correct}
    theirs = {"accuracy": correct_as_a_loss, "confidence": confidence_as_a_loss, "again": correct}
    one, other = (
        trained(tmp_path / name, make_job(FLOAT64, valid=valid_set(), metrics=metrics, valid_every=5), 4)
        for name, metrics in (("ours", ours), ("theirs", theirs))
    )
    assert one.metrics == other.metrics
    assert one.last.loss == other.last.loss, "and the training is the same"


def calls_a_number(output: Tensor, batch: Any) -> Tensor:
    return output + batch[1].shape[0](3)


def asks_for_more(output: Any, batch: Any) -> Tensor:
    return torch.as_tensor(output.logits)


@pytest.mark.parametrize("metric", [calls_a_number, asks_for_more])
def test_a_wrong_metric_is_told_what_it_gets(tmp_path: Path, metric: Any) -> None:
    with pytest.raises(DrivetrainError, match=r"the metric 'accuracy' raised (Type|Attribute)Error") as caught:
        trained(tmp_path, make_job(FLOAT64, valid=valid_set(), metrics={"accuracy": metric}))
    assert "it gets the model's output and the batch" in caught.value.remedy


def run_as_a_loss(folder: str) -> None:
    trained(folder, make_job(FLOAT64, valid=valid_set(), metrics={"accuracy": correct_as_a_loss}))


def test_in_several_processes_a_metric_does_not_call_the_model(tmp_path: Path, gloo_pool: GlooPool) -> None:
    """A rank without a sample would not, and the others would wait for it in a model whose forward communicates."""
    with pytest.raises(DrivetrainError, match="the metric 'accuracy' calls the model") as caught:
        gloo_pool.run(run_as_a_loss, str(tmp_path), world=2)
    assert "(output, batch)" in caught.value.remedy


def test_validation_has_a_batch_size_of_its_own(tmp_path: Path) -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not model.training:
            sizes.append(len(batch[0]))
        return functional.cross_entropy(model(batch[0]), batch[1])

    job = make_job(FLOAT64, valid=valid_set(), metrics=METRICS, valid_batch=9, valid_every=100, loss=loss)
    result = trained(tmp_path / "job", job, 4)
    assert sizes == [9, 9, 9, NUM_VALID - 18], "one batch tried before the first step, then the set"
    expected = by_hand(weights_at(result.folder, result.steps))
    assert dict(result.metrics) == pytest.approx(expected, rel=1e-9)
    sizes.clear()
    by_flag = trained(tmp_path / "flag", job, 4, valid_batch_size=20)
    assert dict(by_flag.metrics) == pytest.approx(expected, rel=1e-9)
    assert sizes == [20, 20, NUM_VALID - 20]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_count_every_sample_once(tmp_path: Path, gloo_pool: GlooPool, world: int) -> None:
    alone = run_world(str(tmp_path / "one"), None)
    together = gloo_pool.run(run_world, str(tmp_path / "many"), 4, world=world)[0]
    assert alone is not None
    for one, many in zip(alone, together, strict=True):
        assert one["valid_accuracy"] == many["valid_accuracy"]
        for name, value in one.items():
            assert many[name] == pytest.approx(value, rel=1e-9), name


def run_tiny_set(folder: str) -> dict[str, float]:
    data = valid_set()
    tiny = TensorDataset(data.inputs[:1], data.labels[:1])
    return dict(trained(folder, make_job(FLOAT64, valid=tiny, metrics=METRICS, max_steps=2)).metrics)


def test_a_set_smaller_than_the_world(tmp_path: Path, gloo_pool: GlooPool) -> None:
    alone = run_tiny_set(str(tmp_path / "one"))
    for found in gloo_pool.run(run_tiny_set, str(tmp_path / "many"), world=3):
        assert found == pytest.approx(alone, rel=1e-9)
        assert found["valid_accuracy"] in (0.0, 1.0)


def test_a_loss_over_tokens_is_over_all_tokens(tmp_path: Path) -> None:
    variant = Variant(kind="transformer", steps=3, num_samples=40, global_batch=16)
    data = Sentences(Variant(kind="transformer", num_samples=NUM_VALID))
    result = trained(tmp_path, make_job(variant, valid=data), 4)
    from tests.api.jobs import make_model

    model = make_model(variant)
    model.load_state_dict(weights_at(result.folder, 3))
    items = [data[index] for index in range(NUM_VALID)]
    with torch.no_grad():
        whole = token_loss(model, (torch.stack([a for a, _ in items]), torch.stack([b for _, b in items])))
    assert result.metrics["valid_loss"] == pytest.approx(float(whole.total / whole.count), rel=1e-9)


def test_validation_changes_nothing_of_the_training(tmp_path: Path) -> None:
    variant = Variant(steps=12, num_samples=40, global_batch=16, dropout=0.3, noisy_items=True)
    plain = trained(tmp_path / "without", make_job(variant))
    watched = trained(tmp_path / "with", make_job(variant, valid=valid_set(), metrics=METRICS, valid_every=1))
    for name, value in weights_at(plain.folder, 12).items():
        assert torch.equal(value, weights_at(watched.folder, 12)[name]), name


def test_workers_are_not_started_for_each_validation_of_a_small_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[str]
) -> None:
    """What is measured is what workers would give, to the bit: also what items and the model draw at random."""
    variant = Variant(steps=6, num_samples=40, global_batch=16, noisy_items=True)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        return functional.cross_entropy(output + torch.rand_like(output), batch[1])

    job = make_job(variant, loss=loss, valid=Vectors(replace(variant, num_samples=NUM_VALID)), valid_every=2)
    by_workers = rows(trained(tmp_path / "asked for", job, 8, num_workers=2).folder)
    assert len(started) == 2 + 3 * 2, "for the steps, and for each validation: as asked for"
    started.clear()
    monkeypatch.setattr(assemble, "_num_workers", lambda run, source: 2)  # as if it were measured
    assert rows(trained(tmp_path / "measured", job, 8).folder) == by_workers
    assert len(started) == 2, "for the steps alone"


def test_parts_in_evaluation_mode_stay_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), Mlp(0.1)).double()
    model[0].eval()
    seen: list[tuple[bool, bool]] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append((model[0].training, model[1].training))  # type: ignore[index]
        return functional.cross_entropy(model(batch[0]), batch[1])

    model.train = lambda mode=True: model  # type: ignore[method-assign,assignment]
    trained(tmp_path, make_job(FLOAT64, model=lambda: model, loss=loss, valid=valid_set(), valid_every=1, max_steps=3))
    assert (False, True) in seen
    assert (True, True) not in seen


class Planned(nn.Module):
    """A model whose validation loss is whatever the test wants, by the number of steps before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def planned_job(values: list[float], **changes: Any) -> Job:
    def loss(model: Any, batch: Any) -> Tensor:
        if model.training:
            model.steps += 1
            return model.weight.square() + batch[0].mean() * 0
        return torch.tensor(values[min(max(int(model.steps) - 1, 0), len(values) - 1)])

    made: dict[str, Any] = {
        "name": "planned",
        "model": Planned,
        "data": TensorDataset(torch.zeros(4, 1)),
        "valid": TensorDataset(torch.zeros(2, 1)),
        "loss": loss,
        "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1),
        "global_batch": 2,
        "max_steps": 12,
        "valid_every": 1,
        "checkpoint_every": 100,
        "keep_last": 1,
    }
    return Job(**{**made, **changes})


@pytest.mark.parametrize(
    ("values", "stopping", "steps"),
    [
        ([5, 4, 3, 3, 3, 3], EarlyStopping(patience=2), 5),
        ([5, 4, 3, 2.95, 2.92, 1], EarlyStopping(patience=2, min_delta=0.1), 5),
        ([5, 4, 3, 2.5, 2.2, 2.1, 1, 1, 1, 1, 1, 1], EarlyStopping(patience=5), 12),
        ([1, 2, 3, 3, 2], EarlyStopping(patience=2, mode="max"), 5),
        ([math.nan, math.nan, 3], EarlyStopping(patience=2), 2),
        ([5, math.nan, 3, math.nan, math.nan], EarlyStopping(patience=2), 5),
        ([5] * 12, None, 12),
    ],
)
def test_early_stopping(tmp_path: Path, values: list[float], stopping: EarlyStopping | None, steps: int) -> None:
    result = trained(tmp_path, planned_job(values, early_stopping=stopping))
    assert result.steps == steps
    assert result.finished
    again = trained(tmp_path, planned_job(values, early_stopping=stopping))
    assert again.folder.name == "planned-2", "a run that stopped early is done, and not gone on with"


def test_patience_on_the_command_line(tmp_path: Path) -> None:
    assert trained(tmp_path, planned_job([5, 4, 4, 4, 4, 4]), patience=3).steps == 5


def test_the_best_checkpoint_stays_however_old(tmp_path: Path) -> None:
    result = trained(tmp_path, planned_job([5, 4, 1, 3, 2, 2, 2, 2, 2, 2, 2, 2], checkpoint_every=2))
    steps = sorted(int(path.name[5:]) for path in (result.folder / "checkpoints").iterdir())
    assert result.best_step == 3
    assert steps == [3, 12]


def test_the_best_is_remembered_over_a_restart(tmp_path: Path) -> None:
    values = [5.0, 4.0, 1.0, 3.0, 2.0, 2.0, 2.0, 2.0]
    failing = planned_job([*values, *values], checkpoint_every=2, max_steps=12)
    calls = [0]

    def dies(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 16:
            raise RuntimeError("the machine went away")
        return failing.loss(model, batch)  # type: ignore[return-value]

    with pytest.raises(RuntimeError, match="went away"):
        trained(tmp_path, replace(failing, loss=dies))
    result = trained(tmp_path, failing)
    assert result.resumed_from > 3
    assert result.best_step == 3
    assert (result.folder / "checkpoints" / "step-00000003").is_dir()
    exported = export(result, tmp_path / "best.safetensors", which="best")
    assert exported.is_file()


def test_aims() -> None:
    assert Aim("valid_accuracy").wants_more
    assert not Aim("valid_loss").wants_more
    for loss in ("valid_loss_dice", "valid_dice_loss", "valid_accents_loss", "loss_score"):
        assert not Aim(loss).wants_more
        assert Aim(loss, "max").wants_more
    assert Aim("valid_lossless_accuracy").wants_more
    assert Aim("valid_accuracy", "min").is_better(0.1, 0.2)
    assert Aim("valid_loss").is_better(1.0, math.nan)
    assert not Aim("valid_loss").is_better(math.nan, 1.0)
    assert not Aim("valid_loss").is_better(0.95, 1.0, by=0.1)


# The moving average


def averaged_by_hand(folder: Path, decay: float, steps: int) -> dict[str, Tensor]:
    torch.manual_seed(FLOAT64.seed)
    average = {name: value.clone() for name, value in Mlp(0.0).double().state_dict().items()}
    for step in range(1, steps + 1):
        now = min(decay, (1 + step) / (10 + step))
        for name, value in weights_at(folder, step).items():
            average[name] = now * average[name] + (1 - now) * value
    return average


def test_the_average_follows_the_weights(tmp_path: Path) -> None:
    job = make_job(FLOAT64, ema=0.7, checkpoint_every=1, keep_last=100, valid=valid_set(), max_steps=8)
    result = trained(tmp_path, job)
    expected = averaged_by_hand(result.folder, 0.7, 8)
    checkpoint = Checkpoint.latest_in(result.folder / "checkpoints")
    assert checkpoint is not None
    for name, value in expected.items():
        assert torch.allclose(checkpoint.read(f"ema/{name}"), value, rtol=0, atol=1e-14), name
    assert result.metrics["valid_loss"] == pytest.approx(by_hand(expected)["valid_loss"], rel=1e-9)
    from safetensors.torch import load_file

    exported = load_file(export(result, tmp_path / "ema.safetensors"))
    assert exported.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(exported[name], value, rtol=0, atol=1e-14), name
    plain = load_file(export(result, tmp_path / "plain.safetensors", average=False))
    assert torch.equal(plain["layers.0.weight"], weights_at(result.folder, 8)["layers.0.weight"])


def test_the_average_does_not_change_the_weights_and_survives_a_restart(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", make_job(FLOAT64))
    whole = trained(tmp_path / "whole", make_job(FLOAT64, ema=0.9, valid=valid_set(), valid_every=3))
    calls = [0]

    def dies(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 10:
            raise RuntimeError("the machine went away")
        return functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(RuntimeError, match="went away"):
        trained(tmp_path / "cut", make_job(FLOAT64, ema=0.9, valid=valid_set(), valid_every=3, loss=dies))
    cut = trained(tmp_path / "cut", make_job(FLOAT64, ema=0.9, valid=valid_set(), valid_every=3))
    assert cut.resumed_from == 5
    for name, value in weights_at(plain.folder, 10).items():
        assert torch.equal(value, weights_at(whole.folder, 10)[name])
    first, second = (Checkpoint.latest_in(result.folder / "checkpoints") for result in (whole, cut))
    assert first is not None
    assert second is not None
    assert all(torch.equal(first.read(key), second.read(key)) for key in first.keys)
    assert rows(whole.folder) == rows(cut.folder)


# torchmetrics, and wrong input


def run_torchmetrics(folder: str, num_classes_by_rank: bool = False) -> dict[str, float]:
    import torch.distributed as dist
    import torchmetrics

    rank = dist.get_rank() if dist.is_initialized() else 0
    if num_classes_by_rank:

        class Bins(torchmetrics.Metric):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.add_state("bins", default=torch.zeros(4 + rank), dist_reduce_fx="sum")

            def update(self, output: Tensor, target: Tensor) -> None:
                self.bins += len(target)

            def compute(self) -> Tensor:
                return self.bins.sum()

        return dict(trained(folder, make_job(FLOAT64, valid=valid_set(), metrics={"each": Bins()})).metrics)
    classes = 4
    metrics = {
        "accuracy": torchmetrics.classification.MulticlassAccuracy(num_classes=classes, average="micro"),
        "each": torchmetrics.classification.MulticlassRecall(num_classes=classes, average=None),
        "ours": correct,
    }
    return dict(trained(folder, make_job(FLOAT64, valid=valid_set(), metrics=metrics), 4).metrics)


@pytest.mark.skipif(find_spec("torchmetrics") is None, reason="the package torchmetrics is not here")
def test_torchmetrics_objects(tmp_path: Path, gloo_pool: GlooPool) -> None:
    alone = gloo_pool.run(run_torchmetrics, str(tmp_path / "one"), world=1)[0]  # there it is imported anyway
    assert alone["valid_accuracy"] == pytest.approx(alone["valid_ours"], rel=1e-6)
    assert {"valid_each_0", "valid_each_3"} <= alone.keys()
    for found in gloo_pool.run(run_torchmetrics, str(tmp_path / "two"), world=2):
        assert found == pytest.approx(alone, rel=1e-6)


@pytest.mark.skipif(find_spec("torchmetrics") is None, reason="the package torchmetrics is not here")
def test_torchmetrics_that_differ_between_ranks(tmp_path: Path, gloo_pool: GlooPool) -> None:
    with pytest.raises(
        DrivetrainError, match=r"'each' has a state 'bins' of shape \[4\] on rank 0 and of \[5\] on rank 1"
    ):
        gloo_pool.run(run_torchmetrics, str(tmp_path), True, world=2)


def run_failing_on_one(folder: str) -> None:
    import torch.distributed as dist

    def fails(output: Tensor, batch: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("no such column")
        return correct(output, batch)

    trained(folder, make_job(FLOAT64, valid=valid_set(), metrics={"accuracy": fails}))


def test_a_metric_that_fails_on_one_rank_stops_all_with_its_words(tmp_path: Path, gloo_pool: GlooPool) -> None:
    with pytest.raises(DrivetrainError, match="rank 1: the metric 'accuracy' raised ValueError: no such column"):
        gloo_pool.run(run_failing_on_one, str(tmp_path), world=2)


def run_differing_types(folder: str) -> None:
    import torch.distributed as dist

    def differs(output: Tensor, batch: Any) -> Tensor:
        found = correct(output, batch)
        return found if dist.get_rank() == 0 else found.double()

    trained(folder, make_job(FLOAT64, valid=valid_set(), metrics={"accuracy": differs}))


def test_metrics_of_different_types_on_ranks(tmp_path: Path, gloo_pool: GlooPool) -> None:
    with pytest.raises(DrivetrainError, match="whole numbers on rank 0 and real ones on rank 1"):
        gloo_pool.run(run_differing_types, str(tmp_path), world=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"valid": TensorDataset(torch.zeros(0, 6))}, "the validation set is empty"),
        ({"valid": iter([1])}, "has no length or no items"),
        ({"valid": None, "metrics": METRICS}, "there is no validation set"),
        ({"valid": None, "early_stopping": EarlyStopping()}, "there is no validation set"),
        ({"metrics": {"accuracy": 3}}, "'accuracy': it cannot be called"),
        ({"metrics": {"loss": correct}}, "the loss is measured anyway"),
        ({"early_stopping": EarlyStopping(patience=0)}, "patience from 1"),
        ({"best": Aim("valid_loss", "best")}, "auto, min or max"),
        ({"ema": 1.0}, "a number between 0 and 1"),
        ({"valid_every": 0}, "got 0"),
    ],
)
def test_a_job_that_cannot_be_validated(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_job(FLOAT64, **{"valid": valid_set(), **changes})


@pytest.mark.parametrize("given", [{"best": Aim("valid_f1")}, {"early_stopping": EarlyStopping(metric="valid_f1")}])
def test_an_aim_that_is_not_measured_is_refused_before_the_first_step(tmp_path: Path, given: dict[str, Any]) -> None:
    job = make_job(FLOAT64, valid=valid_set(), metrics=METRICS, **given)
    with pytest.raises(ConfigError, match=r"'valid_f1' is none of the metrics that are measured\n.*valid_loss, valid_"):
        trained(tmp_path, job)
    assert not list(tmp_path.rglob("steps.jsonl"))


def test_an_aim_whose_direction_is_not_known_is_refused(tmp_path: Path) -> None:
    """Else the checkpoint that is kept as the best may be the worst."""
    job = make_job(FLOAT64, valid=valid_set(), metrics={"spread": correct}, best=Aim("valid_spread"))
    with pytest.raises(ConfigError, match="does not say whether more or less of it is better"):
        trained(tmp_path, job)
    assert trained(tmp_path, replace(job, best=Aim("valid_spread", "max"))).best_step


def test_directions_by_name() -> None:
    more = ("valid_accuracy", "valid_old_top2", "valid_mAP", "valid_ndcg_10", "valid_mean_return")
    less = ("valid_loss", "valid_word_error", "valid_rmse", "valid_perplexity", "valid_loss_dice")
    assert [Aim(name.lower()).wants_more for name in (*more, *less)] == [True] * len(more) + [False] * len(less)
    assert all(Aim(name.lower()).is_clear for name in (*more, *less))


def test_metrics_that_cannot_be_measured(tmp_path: Path) -> None:
    def fails(words: str, **changes: Any) -> None:
        with pytest.raises(DrivetrainError, match=words) as caught:
            trained(tmp_path, make_job(FLOAT64, **{"valid": valid_set(), **changes}), name=f"x{abs(hash(words))}")
        assert caught.value.remedy

    fails("returned float", metrics={"accuracy": lambda output, batch: 0.5})
    fails("ZeroDivisionError", metrics={"accuracy": lambda output, batch: 1 / 0})
    fails(
        "did not call the model",
        metrics=METRICS,
        loss=lambda model, batch: functional.cross_entropy(model.layers(batch[0]), batch[1]),
    )


def test_a_loss_sum_as_a_metric(tmp_path: Path) -> None:
    metrics = {"share": lambda output, batch: LossSum(correct(output, batch).sum(), batch[1].numel())}
    result = trained(tmp_path, make_job(FLOAT64, valid=valid_set(), metrics={**metrics, **METRICS}), 3)
    assert result.metrics["valid_share"] == result.metrics["valid_accuracy"]


def two_sets() -> dict[str, Any]:
    """A set that is `valid_set()`, and one with other samples in columns."""
    data = valid_set()
    return {"clean": data, "noisy": {"0": data.inputs[:7] * -2, "1": data.labels[:7]}}


def loss_of_either(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch.values() if isinstance(batch, dict) else batch
    return functional.cross_entropy(model(inputs), labels)


def correct_of_either(output: Tensor, batch: Any) -> Tensor:
    return output.argmax(1) == (batch["1"] if isinstance(batch, dict) else batch[1])


def run_two_sets(folder: str, micro_batch: int | None = None) -> tuple[dict[str, float], int | None]:
    job = make_job(
        FLOAT64,
        loss=loss_of_either,
        valid=two_sets(),
        metrics={"accuracy": correct_of_either},
        valid_every=2,
        best=Aim("valid_noisy_accuracy"),
        early_stopping=EarlyStopping(100, metric="valid_noisy_loss"),
        keep_last=9,
    )
    result = trained(folder, job, micro_batch, report=False)
    return dict(result.metrics), result.best_step


def test_several_sets_by_name(tmp_path: Path, gloo_pool: GlooPool) -> None:
    found, best_step = run_two_sets(str(tmp_path / "one"), 3)
    model = Mlp(0.0).double()
    folder = tmp_path / "one" / "suite"
    model.load_state_dict(weights_at(folder, 10))
    noisy = two_sets()["noisy"]
    with torch.no_grad():
        output = model(noisy["0"])
    clean = by_hand(weights_at(folder, 10))
    expected = {
        "valid_loss": clean["valid_loss"],
        "valid_accuracy": clean["valid_accuracy"],
        "valid_clean_loss": clean["valid_loss"],
        "valid_clean_accuracy": clean["valid_accuracy"],
        "valid_noisy_loss": float(functional.cross_entropy(output, noisy["1"])),
        "valid_noisy_accuracy": float((output.argmax(1) == noisy["1"]).double().mean()),
    }
    assert found == pytest.approx(expected, rel=1e-9)
    assert found["valid_noisy_loss"] != pytest.approx(found["valid_clean_loss"])
    best = max(rows(folder), key=lambda row: (row["valid_noisy_accuracy"], -row["step"]))
    assert best_step == best["step"]
    for together in gloo_pool.run(run_two_sets, str(tmp_path / "two"), 2, world=2):
        assert together[0] == pytest.approx(found, rel=1e-9)
        assert together[1] == best_step


def test_the_name_of_a_set_does_not_turn_a_metric_around() -> None:
    job = make_job(FLOAT64, valid={"accents": valid_set(), "other": valid_set()}, metrics={"accuracy": correct})
    assert job.settled(Aim("valid_accents_loss")).mode == "min"
    assert job.settled(Aim("valid_accents_accuracy")).mode == "max"
    assert job.settled(Aim("valid_accents_accuracy", "min")).mode == "min"
    assert job.settled(Aim("valid_accuracy")).mode == "max"


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"clean": valid_set(), "noisy": torch.zeros(3)}, "columns of one data set, or data sets by name"),
        ({"inputs": [[1.0], [2.0]], "labels": [0, 1]}, "'inputs' is a list of list: is it a column"),
        ({"clean": valid_set(), "noisy": []}, r"Job.valid\['noisy'\] .*: the validation set is empty"),
        ({"clean": valid_set(), "noisy": iter([])}, "has no length or no items"),
        ({"clean": valid_set(), "noisy": "noisy.csv"}, "'noisy': expected a Dataset, got str"),
        ({"clean set": valid_set()}, "'clean set' cannot be the name of a data set"),
        ({"loss": valid_set()}, "'loss' cannot be the name"),
    ],
)
def test_sets_that_cannot_be_told(sets: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_job(FLOAT64, valid=sets)


def test_a_metric_with_the_name_of_a_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'noisy_loss' is also the name of a metric over one of the validation sets"):
        make_job(FLOAT64, valid={"clean": valid_set(), "noisy": valid_set()}, metrics={"noisy_loss": squares})
    job = make_job(FLOAT64, valid={"clean": valid_set()}, best=Aim("valid_noisy_loss"))
    with pytest.raises(ConfigError, match="valid_loss, valid_clean_loss"):
        trained(tmp_path, job)


def logging_loss(model: nn.Module, batch: Any) -> Tensor:
    log("inputs", batch[0].mean())
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.usefixtures("no_kernels")
def test_compiled_validation_measures_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of the full size are compiled, the last one is not; metrics and logged values are those of eager runs."""
    valid: dict[str, Any] = {"valid": valid_set(), "metrics": METRICS, "valid_batch": 5, "valid_every": 5}
    even = replace(FLOAT64, num_samples=48)  # whole steps of training, which are compiled whatever is enough
    job = replace(make_job(even), loss=logging_loss, **valid)
    found, graphs = [], []
    for enough in (10**9, 1):
        torch._dynamo.reset()
        monkeypatch.setattr(assemble, "ENOUGH_TO_COMPILE", enough)
        before = num_graphs()
        result = trained(tmp_path / str(enough), job, 16, compile=True)
        graphs.append(num_graphs() - before)
        found.append(rows(result.folder))
    assert graphs[1] == graphs[0] + 1, "one graph for both validations"
    assert len(found[0]) == 2
    for row, other in zip(*found, strict=True):
        assert row.keys() == other.keys()
        assert {"valid_loss", "valid_accuracy", "valid_inputs"} <= row.keys()
        assert [other[name] for name in row if name != "time"] == pytest.approx(
            [row[name] for name in row if name != "time"], abs=1e-10
        )
