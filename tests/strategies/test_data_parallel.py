"""DataParallel behind the seven verbs: what `single` and `ddp` pass, and how batches are cut.

Here on a CPU, where copies of the model share its weights: all but the copying itself is what runs on GPUs, whose tests
are in `test_data_parallel_gpu.py`.
"""

from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain import Job, LossSum
from drivetrain.config import configure
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.core.world import World
from drivetrain.run import Session
from drivetrain.run.job_settings import refuse_strategy
from drivetrain.strategies import DataParallelStrategy, StrategyParts, Trial
from drivetrain.strategies.single import part_of
from tests.api import test_loss_parts as loss_parts
from tests.api.jobs import Trained, Variant, make_job, make_model, plain_loop, run
from tests.api.test_equivalence import difference
from tests.api.test_resume import BASE, MICRO_BATCH, assert_identical, call_in, run_until_crash
from tests.gloo_pool import GlooPool
from tests.hardware_fixtures import load

CPU = torch.device("cpu")


def shared_copies(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    return [module] * len(devices)


def two_copies(self: Session, **changes: Any) -> DataParallelStrategy:
    self.strategy = DataParallelStrategy.name
    return DataParallelStrategy(self.world, [CPU] * 2, shared_copies)


@pytest.fixture(params=[2, 3])
def several_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every run in this process uses the strategy, with so many copies."""

    def made(self: Session, **changes: Any) -> DataParallelStrategy:
        self.strategy = DataParallelStrategy.name
        return DataParallelStrategy(self.world, [CPU] * request.param, shared_copies)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "make_strategy", made)
        yield


@pytest.mark.usefixtures("several_devices")
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize(("global_batch", "micro_batch"), [(32, 32), (32, 7), (37, 4), (31, 1)])
def test_float64_equals_the_plain_loop(tmp_path: Path, kind: str, global_batch: int, micro_batch: int) -> None:
    """Parts of unequal size, batches smaller than the number of devices, unequal counts of tokens."""
    variant = Variant(kind, torch.float64, global_batch, steps=7)  # an epoch has 5, the last one ragged
    trained = run(str(tmp_path), variant, micro_batch)
    assert trained is not None
    of_losses, of_weights = difference(trained, *plain_loop(variant))
    assert of_losses < 1e-10, of_losses
    assert of_weights < 1e-10, of_weights


@pytest.mark.usefixtures("several_devices")
def test_named_parts_equal_the_plain_loop(tmp_path: Path) -> None:
    """Each copy has its own share of what a part counts, and may lack a part."""
    job = loss_parts.make_job(loss=loss_parts.loss_of_means)
    loss_parts.assert_same(loss_parts.trained(tmp_path, job, 5).folder, loss_parts.plain_loop(job))


@pytest.mark.usefixtures("several_devices")
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_bit_identical_after_a_stop(tmp_path: Path, kind: str) -> None:
    """With dropout in every copy, and noise in every item. The loss is called twice per micro-step, for two samples."""
    variant = replace(BASE, kind=kind, noisy_items=kind == "mlp")
    whole = run(str(tmp_path / "whole"), variant, MICRO_BATCH)
    assert run_until_crash(str(tmp_path / "broken"), variant, 0, 100)
    mended = run(str(tmp_path / "broken"), variant, MICRO_BATCH)
    assert whole is not None
    assert mended is not None
    assert mended.resumed_from > 0
    assert_identical(mended, whole)


def test_a_checkpoint_of_it_loads_under_single_and_ddp(
    gloo_pool: GlooPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = replace(BASE, dtype=torch.float64, dropout=0.0)
    whole = run(str(tmp_path / "whole"), variant, MICRO_BATCH)
    assert whole is not None
    for world in (1, 2):
        folder = str(tmp_path / f"{world}")
        with monkeypatch.context() as patch:
            patch.setattr(Session, "make_strategy", two_copies)
            # The user's function is called twice per micro-step, once for each part.
            assert run_until_crash(folder, variant, 0, 2 * call_in(5, 0, 1))
        moved: Trained = gloo_pool.run(run, folder, variant, MICRO_BATCH, world=world)[0]
        assert moved.resumed_from > 0
        assert moved.losses == pytest.approx(whole.losses, abs=1e-10)
        assert moved.weights.keys() == whole.weights.keys()
        assert not any("module." in key for key in (*moved.weights, *moved.state))


# The loss over parts


def prepared(loss: Any, batch: Any, num_samples: int, num_devices: int) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = make_model(Variant())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = DataParallelStrategy(World(), [CPU] * num_devices, shared_copies)
    return strategy.prepare(StrategyParts(model, loss, optimizer), Trial(batch, num_samples)), model


def gradients(loss: Any, batch: Any, num_samples: int, num_devices: int) -> list[Tensor]:
    objective, model = prepared(loss, batch, num_samples, num_devices)
    torch.autograd.backward(objective(batch, num_samples, num_samples, 1))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


Pair = namedtuple("Pair", ["inputs", "labels"])


@dataclass
class Held:
    inputs: Tensor
    labels: Tensor
    names: list[str]


INPUTS, LABELS = torch.randn(7, 6, dtype=torch.float64), torch.arange(7) % 4
BATCHES: dict[str, tuple[Any, Any]] = {
    "a list": ([INPUTS, LABELS], lambda batch: (batch[0], batch[1])),
    "a dictionary": ({"x": INPUTS, "y": LABELS}, lambda batch: (batch["x"], batch["y"])),
    "nested": ({"in": {"x": (INPUTS,)}, "y": [LABELS]}, lambda batch: (batch["in"]["x"][0], batch["y"][0])),
    "a named tuple": (Pair(INPUTS, LABELS), lambda batch: (batch.inputs, batch.labels)),
    "a dataclass with texts": (Held(INPUTS, LABELS, list("abcdefg")), lambda batch: (batch.inputs, batch.labels)),
    "with a constant": ([INPUTS, LABELS, torch.tensor(2.0), 3], lambda batch: (batch[0], batch[1])),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("num_devices", [2, 3, 9])
def test_batches_of_any_structure(name: str, num_devices: int) -> None:
    batch, fields = BATCHES[name]
    seen = []

    def loss(model: nn.Module, part: Any) -> Tensor:
        inputs, labels = fields(part)
        if isinstance(part, Held):
            assert len(part.names) == len(labels)
        seen.append(len(labels))
        return functional.cross_entropy(model(inputs), labels)

    parts = gradients(loss, batch, 7, num_devices)
    assert sum(seen) == 14  # the trial's, and the step's
    assert len(seen) == 2 * min(7, num_devices)
    whole = gradients(lambda model, part: functional.cross_entropy(model(INPUTS), LABELS), batch, 7, 1)
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_unequal_counts_are_weighted() -> None:
    """Items of parts: 1, then many. A mean of means would weigh them alike."""
    kept = torch.tensor([True, False, False, False, True, True, True])

    def loss(model: nn.Module, part: Any) -> LossSum:
        inputs, labels, keep = part
        values = functional.cross_entropy(model(inputs), labels, reduction="none")
        return LossSum((values * keep).sum(), keep.sum())

    strategy = DataParallelStrategy(World(), [CPU] * 2, shared_copies)
    torch.manual_seed(0)
    model = make_model(Variant())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = [INPUTS, LABELS, kept]
    objective = strategy.prepare(StrategyParts(model, loss, optimizer), Trial(batch, 7))
    reference = functional.cross_entropy(model(INPUTS[kept]), LABELS[kept])
    expected = [value.detach() for value in torch.autograd.grad(reference, list(model.parameters()))]
    strategy.backward(objective(batch, 7, 7, 1))
    outcome = strategy.step(stop=False)
    (total, factor), *_ = outcome.losses
    assert total.item() * factor / float(outcome.num_items) == pytest.approx(reference.item(), abs=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)


def test_what_cannot_be_cut_is_said() -> None:
    with pytest.raises(DrivetrainError, match=r"shape \(5, 2\) in a batch of 4 samples"):
        part_of({"packed": torch.zeros(5, 2)}, 4, 0, 2)
    with pytest.raises(DrivetrainError, match="Graph cannot be cut"):
        part_of([Graph()], 2, 0, 1)


class Graph:
    """Something that moves itself to a device, and holds no row for each sample."""

    def to(self, device: Any) -> "Graph":
        return self


def test_losses_of_two_kinds_are_refused() -> None:
    def loss(model: nn.Module, part: Any) -> Any:
        value = functional.cross_entropy(model(part[0]), part[1])
        return value if len(part[1]) == 3 else LossSum(value, 1)

    with pytest.raises(DrivetrainError, match="LossSum and Tensor for parts of one batch"):
        gradients(loss, [INPUTS, LABELS], 7, 2)


def test_a_loss_that_is_no_scalar() -> None:
    with pytest.raises(DrivetrainError, match="not that of a scalar"):
        gradients(lambda model, part: model(part[0]), [INPUTS, LABELS], 7, 2)


@pytest.mark.parametrize("how", ["compiled", "recomputed"])
def test_what_cannot_be_copied_is_refused(how: str) -> None:
    model = make_model(Variant())
    if how == "recomputed":
        model.forward = lambda inputs: inputs  # type: ignore[method-assign]
    called = model if how == "compiled" else None
    parts = StrategyParts(
        model, make_job(Variant()).loss, torch.optim.SGD(model.parameters(), lr=0.1), called_model=called
    )
    strategy = DataParallelStrategy(World(), [CPU] * 2, shared_copies)
    with pytest.raises(DrivetrainError, match=r"compiled model|forward of the model was replaced") as caught:
        strategy.prepare(parts, Trial([INPUTS, LABELS], 7))
    assert "ddp" in caught.value.remedy


# Asking for it


@pytest.mark.parametrize(
    ("machine", "values", "words"),
    [
        ("cpu-2core", {}, "there is none"),
        ("h200", {}, "there is one"),
        ("4x-l4", {"gpu_mode": "cpu"}, "gpu_mode: cpu leaves none"),
        ("4x-l4", {"gpu_mode": "single_gpu"}, "gpu_mode: single_gpu leaves one"),
        ("4x-l4", {"device_ids": [1]}, "leaves one"),
        ("4x-l4", {"compile": True}, "a compiled one cannot be copied"),
        ("4x-l4", {"activations": "recompute"}, "recompute cannot be copied"),
    ],
)
def test_what_contradicts_it_is_a_configuration_error(machine: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(hardware=load(machine), parallel_strategy="data_parallel", **values)
    [problem] = caught.value.problems
    assert words in problem.message
    assert problem.remedy


def test_it_is_taken_where_it_can_be() -> None:
    config = configure(hardware=load("4x-l4"), parallel_strategy="data_parallel", device_ids=[0, 2])
    assert config.distributed.strategy == "data_parallel"


def test_single_beside_several_gpus() -> None:
    with pytest.raises(ConfigError, match="uses one GPU"):
        configure(hardware=load("4x-l4"), parallel_strategy="single", gpu_mode="multi_gpu")


@pytest.mark.parametrize("strategy", ["data_parallel", "ddp"])
def test_one_process_on_a_cpu_says_the_remedy(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(ConfigError, match=r"parallel.strategy") as caught:
        run(str(tmp_path), Variant(steps=2), settings={"parallel_strategy": strategy})
    assert caught.value.problems[0].remedy
    assert not (tmp_path / "suite").exists()


def strategies_under_a_launcher(folder: str) -> list[str]:
    found = []
    for strategy in ("single", "data_parallel"):
        try:
            run(folder, Variant(steps=2), gpu_mode="auto", settings={"parallel_strategy": strategy})
        except ConfigError as error:
            found.append(error.problems[0].message)
    run(folder, Variant(steps=2), settings={"parallel_strategy": "ddp"})
    return found


def test_under_a_launcher(gloo_pool: GlooPool, tmp_path: Path) -> None:
    for messages in gloo_pool.run(strategies_under_a_launcher, str(tmp_path), world=2):
        assert messages == [
            "single runs in one process, and a launcher started 2",
            "data_parallel runs in one process, and a launcher started 2",
        ]
    assert "strategy: ddp" in (tmp_path / "suite" / "plan.yaml").read_text()


def test_a_pinned_batch_size_is_per_device(tmp_path: Path) -> None:
    """global batch = size × accumulation × devices, whether the devices are of one process or of several."""
    job = Job(
        "sizes",
        make_model(Variant()),
        [(INPUTS[0], LABELS[0])] * 100,
        make_job(Variant()).loss,
        lambda groups: torch.optim.SGD(groups, lr=0.1),
        epochs=1,
    )
    gpus = [torch.device("cuda", index) for index in range(4)]
    config = configure(output_dir=tmp_path, parallel_strategy="data_parallel", batch_size=3, accumulation_steps=2)
    setup = Session(job, config, load("4x-l4"), World(), gpus, quiet=True)
    assert setup.job.global_batch == 24
    assert setup.way.micro_batch == 12
    assert setup.make_strategy().name == "data_parallel"
    assert setup.settings.strategy.value == "data_parallel"


def test_auto_never_contradicts() -> None:
    refuse_strategy(configure(), World(), [CPU])
    refuse_strategy(configure(parallel_strategy="single"), World(), [CPU])
