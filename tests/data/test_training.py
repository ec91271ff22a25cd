"""Training on every shape of data: the same as on the map-style data set of the same items, stopped or not."""

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
)

import drivetrain as dt
from drivetrain import ConfigError, Constant, DrivetrainError
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.data.division import key_of
from drivetrain.data.keyed_items import seed_all
from tests.api.jobs import Trained, Variant, Vectors, make_job, make_model, read, run, vector_loss
from tests.api.test_resume import CrashingLoss, PlantedError, assert_identical
from tests.gloo_pool import GlooPool

VARIANT = Variant(global_batch=16, steps=6, num_samples=60, save_every=3)  # 4 steps per epoch, the last of 12 samples
MICRO_BATCH = 3


class Stream(IterableDataset[Any]):
    """The items of the map-style data set, one after the other."""

    def __init__(self) -> None:
        self.vectors = Vectors(VARIANT)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.vectors[index] for index in range(len(self.vectors)))


class ResumableStream(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.position < len(self.vectors):
            self.position += 1
            yield self.vectors[self.position - 1]
        self.position = 0


class InOrder(Sampler[int]):
    def __len__(self) -> int:
        return VARIANT.num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(VARIANT.num_samples))


class Batches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(start, min(start + 16, 60))) for start in range(0, 60, 16)])


class Ragged(Sampler[list[int]]):
    """Batches of 2 to 19 samples, drawn anew in each epoch: where one ends, and how many there are, is not known."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(60).tolist()
        while order:
            size = 2 + int(torch.randint(18, ()))
            yield order[:size]
            order = order[size:]


def ragged_loop(seed: int, epochs: int) -> tuple[list[float], dict[str, Any]]:
    """Plain torch over the sampler's own batches."""
    vectors = Vectors(VARIANT)
    torch.manual_seed(seed)
    model = make_model(VARIANT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(epochs):
        seed_all(key_of(seed, epoch))  # docs/guide/data.md: what samplers draw is keyed by (seed, epoch)
        for batch in list(Ragged()):
            optimizer.zero_grad()
            columns = (torch.stack(column) for column in zip(*(vectors[index] for index in batch), strict=True))
            loss = vector_loss(model, tuple(columns))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, {f"model/{name}": value.numpy() for name, value in model.state_dict().items()}


def run_ragged(folder: str, at_call: int = 0, num_workers: int = 0) -> Trained | None:
    loss = CrashingLoss(vector_loss, at_call)
    changes: dict[str, Any] = {"max_steps": None, "epochs": 2, "global_batch": None, "schedule": Constant()}
    changes |= {"clip_norm": None, "weight_decay": None, "loss": loss}
    changes["optimizer"] = lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    data = DataLoader(Vectors(VARIANT), batch_sampler=Ragged())
    try:
        return run(folder, VARIANT, None, num_workers, data=data, **changes)
    except PlantedError:
        return None


@pytest.mark.parametrize(("world", "num_workers"), [(1, 1), (2, 0)])
def test_batches_of_varying_size_train_and_go_on_as_in_a_plain_loop(
    gloo_pool: GlooPool, tmp_path: Path, world: int, num_workers: int
) -> None:
    losses, weights = ragged_loop(VARIANT.seed, 2)
    gloo_pool.run(run_ragged, str(tmp_path), 9, num_workers, world=world)
    trained = gloo_pool.run(run_ragged, str(tmp_path), 0, num_workers, world=world)[0]
    assert trained.resumed_from > 0
    assert trained.losses == pytest.approx(losses, abs=1e-10)
    for name, value in weights.items():
        assert trained.weights[name] == pytest.approx(value, abs=1e-10)


def make_data(kind: str) -> Any:
    vectors = Vectors(VARIANT)
    return {
        "map": lambda: vectors,
        "list": lambda: [vectors[index] for index in range(60)],
        "loader": lambda: DataLoader(vectors, 16),
        "sampler": lambda: DataLoader(vectors, 16, sampler=InOrder()),
        "sequential": lambda: DataLoader(vectors, 16, sampler=SequentialSampler(vectors)),
        "batch sampler": lambda: DataLoader(vectors, batch_sampler=Batches()),
        "iterable": Stream,
        "loader of an iterable": lambda: DataLoader(Stream(), 16),
        "iterable with state": ResumableStream,
        "generator": lambda: (item for _ in range(3) for item in Stream()),
    }[kind]()


KINDS = (
    "list", "loader", "sampler", "sequential", "batch sampler", "iterable", "loader of an iterable",
    "iterable with state",
)  # fmt: skip


def run_on(folder: str, kind: str, num_workers: int = 0, at_call: int = 0, **changes: Any) -> Trained | None:
    """Train on that kind of data; fail at a call of the loss, if one is given."""
    if kind in ("batch sampler", "loader", "sampler", "sequential", "loader of an iterable"):
        changes["global_batch"] = None
    loss = CrashingLoss(make_job(VARIANT).loss, at_call)
    try:
        return run(folder, VARIANT, MICRO_BATCH, num_workers, data=make_data(kind), shuffle=False, loss=loss, **changes)
    except PlantedError:
        return None


@pytest.fixture(scope="module")
def map_style(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    trained = run(str(tmp_path_factory.mktemp("map")), VARIANT, data=Vectors(VARIANT), shuffle=False)
    assert trained is not None
    return trained


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """What a run on a kind of data comes to that is never stopped, in this process."""

    @functools.cache
    def trained_on(kind: str) -> Trained:
        trained = run_on(str(tmp_path_factory.mktemp("whole")), kind)
        assert trained is not None
        return trained

    return trained_on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "num_workers"), [(1, 0), (2, 0), (3, 1)])
def test_equal_to_the_map_style_run(
    gloo_pool: GlooPool, map_style: Trained, tmp_path: Path, kind: str, world: int, num_workers: int
) -> None:
    trained = gloo_pool.run(run_on, str(tmp_path / "other"), kind, num_workers, world=world)[0]
    assert trained.losses == pytest.approx(map_style.losses, abs=1e-10)
    assert [(row["epoch"], row["samples"]) for row in trained.rows] == [
        (row["epoch"], row["samples"]) for row in map_style.rows
    ]
    for key, value in map_style.weights.items():
        assert np.allclose(trained.weights[key], value, rtol=0, atol=1e-10), key


@pytest.mark.parametrize("kind", [*KINDS, "generator"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_bit_identical_after_a_stop(
    whole: Callable[[str], Trained], tmp_path: Path, kind: str, num_workers: int
) -> None:
    assert run_on(str(tmp_path / "broken"), kind, num_workers, at_call=1 + 4 * 6 + 3) is None
    mended = run_on(str(tmp_path / "broken"), kind, num_workers)
    assert mended is not None
    assert mended.resumed_from == 3
    assert_identical(mended, whole(kind))


def mixed(items: list[Any]) -> Any:
    """Mix pairs of a batch's samples, as MixUp does in a collate function."""
    inputs, labels = default_collate(items)
    part = random.random()
    return part * inputs + (1 - part) * inputs[torch.randperm(len(items))], labels


@pytest.mark.parametrize("kind", ["list", "batch sampler", "iterable"])
def test_what_a_collate_function_draws_is_drawn_again_after_a_stop(tmp_path: Path, kind: str) -> None:
    expected = run_on(str(tmp_path / "whole"), kind, collate=mixed)
    assert run_on(str(tmp_path / "broken"), kind, 1, at_call=1 + 4 * 6 + 3, collate=mixed) is None
    mended = run_on(str(tmp_path / "broken"), kind, collate=mixed)
    assert mended is not None
    assert mended.resumed_from == 3
    assert_identical(mended, expected)


@pytest.mark.parametrize("kind", ["batch sampler", "iterable", "iterable with state"])
def test_another_world_goes_on(gloo_pool: GlooPool, tmp_path: Path, kind: str) -> None:
    reference = run(str(tmp_path / "map"), VARIANT, data=Vectors(VARIANT), shuffle=False)
    folder = str(tmp_path / "moved")
    assert gloo_pool.run(run_on, folder, kind, 0, 1 + 5 * 3 + 1, world=2)[0] is None
    moved = gloo_pool.run(run_on, folder, kind, 1, world=3)[0]
    assert reference is not None
    assert moved.resumed_from == 3
    assert moved.losses == pytest.approx(reference.losses, abs=1e-10)


@pytest.mark.parametrize("kind", ["iterable", "batch sampler"])
def test_epochs_end_where_the_data_does(tmp_path: Path, kind: str) -> None:
    """No length beforehand: saved, told to hooks and finished at the end of each epoch and of the job."""

    class Ends:
        every = "epoch"

        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def __call__(self, context: Any) -> None:
            self.seen.append((context.step, context.epoch))

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    ends = Ends()
    changes = {"max_steps": None, "epochs": 2, "schedule": Constant(), "checkpoint_every": "epoch", "hooks": [ends]}
    if kind == "batch sampler":
        changes["global_batch"] = None
    job = make_job(VARIANT, data=make_data(kind), **changes)
    assert job.num_steps is None
    result = train(job, configure(output_dir=tmp_path, gpu_mode="cpu", report=False), quiet=True)
    assert (result.steps, result.finished) == (8, True)
    assert ends.seen == [(4, 1), (8, 2)]
    checkpoints = sorted(path.name for path in (tmp_path / "suite" / "checkpoints").iterdir())
    assert checkpoints == ["step-00000004", "step-00000008"]
    assert [row["epoch"] for row in read(result.folder).rows] == [0] * 4 + [1] * 4


class SaysLength(Batches):
    """A batch sampler whose length is an estimate."""

    def __init__(self, said: int) -> None:
        self.said = said

    def __len__(self) -> int:
        return self.said


@pytest.mark.parametrize(("said", "told"), [(2, True), (9, True), (4, False)])
def test_a_length_that_the_data_does_not_have_is_told(
    tmp_path: Path, said: int, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The schedule ends where the length says: steps after it would have a learning rate of 0."""
    loader = DataLoader(Vectors(VARIANT), batch_sampler=SaysLength(said))
    job = make_job(VARIANT, data=loader, global_batch=None, max_steps=None, epochs=2)
    result = train(job, configure(output_dir=tmp_path, gpu_mode="cpu", report=False))
    assert (result.steps, job.num_steps) == (8, 2 * said)
    words = f"epoch 1 ends with step 4, and len() of SaysLength says {said}: "
    assert capsys.readouterr().out.count(words) == told


def test_what_was_taken_is_said_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(VARIANT, data=DataLoader(Stream(), 16), global_batch=None)
    result = train(job, configure(output_dir=tmp_path, gpu_mode="cpu", report=False))
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    (notes,) = [event["notes"] for event in events if event["event"] == "data"]
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("taken from the DataLoader", "batch size of 16 is the global batch", "reads again"):
        assert any(words in note for note in notes)
        assert words in shown


class ShardsItself(Stream):
    """Divides itself over the ranks, as data sets for other trainers do."""

    def __iter__(self) -> Iterator[Any]:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return (self.vectors[index] for index in range(rank, len(self.vectors), size))


def run_sharded(folder: str, num_workers: int) -> str:
    try:
        run(folder, VARIANT, MICRO_BATCH, num_workers, data=ShardsItself())
    except DrivetrainError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_that_read_different_data_are_found_out(gloo_pool: GlooPool, tmp_path: Path, num_workers: int) -> None:
    for message in gloo_pool.run(run_sharded, str(tmp_path), num_workers, world=2):
        assert "the ranks do not read the same data in the same order" in message
        assert "remedy" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": (number for number in range(3)), "epochs": 2}, "generator can be read only once"),
        ({"data": Stream(), "max_steps": None, "epochs": 2}, "steps in an epoch is not known beforehand"),
        ({"data": DataLoader(Vectors(VARIANT), batch_sampler=[[1, 2]]), "global_batch": 9}, "are the global batches"),
        (
            {
                "data": DataLoader(Vectors(VARIANT), batch_sampler=Batches()),
                "global_batch": None,
                "max_steps": None,
                "epochs": 2,
            },
            "steps in an epoch is not known beforehand",
        ),
        ({"data": DataLoader(Vectors(VARIANT), 80), "global_batch": None}, "batch size is 80"),
        ({"data": DataLoader(Vectors(VARIANT), None)}, "batch_size=None"),
        ({"valid": Stream()}, "has no length or no items"),
    ],
)
def test_a_job_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_job(VARIANT, **changes)
    assert all(problem.remedy for problem in caught.value.problems)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_without_items(tmp_path: Path, num_workers: int) -> None:
    class Nothing:
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=num_workers, report=False)
    with pytest.raises(DrivetrainError, match="yields nothing to train on in epoch 0") as caught:
        train(make_job(VARIANT, data=Nothing()), config, quiet=True)
    assert caught.value.remedy == "check the path or the filter it was made with"
    assert "worker process" not in str(caught.value)


def test_a_generator_that_ends_too_early_keeps_its_last_checkpoint(tmp_path: Path) -> None:
    """60 items are 4 steps; the job wants 12. Nothing of the 4 is lost."""
    config = configure(output_dir=tmp_path, gpu_mode="cpu", checkpoint_every=2, report=False)
    with pytest.raises(DrivetrainError, match="can be read only once"):
        train(make_job(VARIANT, data=iter(list(Stream()))), config, quiet=True)
    assert (tmp_path / "suite" / "checkpoints" / "step-00000004").is_dir()


def test_a_loss_that_changes_its_batch_does_not_change_what_the_first_step_gets(tmp_path: Path) -> None:
    def changing(model: Any, batch: Any) -> Tensor:
        batch[0].mul_(2)
        return vector_loss(model, batch)

    runs = [
        run(str(tmp_path / name), VARIANT, data=data, shuffle=False, loss=changing)
        for name, data in {"map": Vectors(VARIANT), "iterable": Stream()}.items()
    ]
    assert runs[0] is not None
    assert runs[1] is not None
    assert runs[0].losses == runs[1].losses


def test_a_validation_set_in_every_shape(tmp_path: Path) -> None:
    vectors = Vectors(VARIANT)
    found = []
    for name, valid in {"map": vectors, "list": list(Stream()), "loader": DataLoader(vectors, 7)}.items():
        job = make_job(VARIANT, name=name, valid=valid)
        result = train(job, configure(output_dir=tmp_path, gpu_mode="cpu", report=False), quiet=True)
        found.append(result.metrics["valid_loss"])
    assert found == [found[0]] * 3


def moved(items: list[Any]) -> Any:
    """Make a batch whose inputs are others: an augmentation that belongs to the training."""
    inputs, labels = default_collate(items)
    return inputs + 1, labels


@pytest.mark.parametrize("own", [None, moved])
@pytest.mark.parametrize("of_job", [False, True])
def test_a_validation_loader_has_its_own_batches(tmp_path: Path, own: Any, of_job: bool) -> None:
    """That of the training made them, with its augmentation, and of all samples, whatever the sampler chose."""
    vectors = Vectors(VARIANT)
    data = vectors if of_job else DataLoader(vectors, 16, collate_fn=default_collate if own else moved)
    loader = DataLoader(vectors, 7, collate_fn=own, sampler=SubsetRandomSampler([9, 2, 30]))
    job = make_job(VARIANT, data=data, valid=loader, max_steps=1)
    result = train(job, configure(output_dir=tmp_path, gpu_mode="cpu", report=False), quiet=True)
    expected = vector_loss(result.model, (own or default_collate)([vectors[sample] for sample in (2, 9, 30)]))
    assert result.metrics["valid_loss"] == pytest.approx(expected.item(), abs=1e-12)
    rows = dt.predict(result, loader)
    assert len(rows) == 3
