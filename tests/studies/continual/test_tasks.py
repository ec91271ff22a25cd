"""Tasks are what they say: permutations permute, rotations turn, splits part the classes; streams keep order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from studies.continual.tasks import Images, Stream, TaskKind, held_out, make_tasks
from torch import Tensor

from drivetrain.core.errors import DrivetrainError


def images(num_samples: int = 40, side: int = 6, num_classes: int = 10) -> Images:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(num_samples) % num_classes
    return Images(torch.rand(num_samples, side * side, generator=generator), labels, side)


@given(num_tasks=st.integers(1, 8), seed=st.integers(0, 2**40))
def test_permuted(num_tasks: int, seed: int) -> None:
    train, test = images(), images(20)
    tasks = make_tasks("permuted", train, test, num_tasks, seed)
    assert len(tasks) == num_tasks
    assert torch.equal(tasks[0].train.pixels, train.pixels)  # the first is the data as they are
    for task in tasks:
        order = _order(train.pixels[0], task.train.pixels[0])
        assert sorted(order.tolist()) == list(range(36))
        assert torch.equal(task.train.pixels, train.pixels[:, order])  # one order for all samples,
        assert torch.equal(task.test.pixels, test.pixels[:, order])  # of the test set too
        assert torch.equal(task.train.labels, train.labels)
    orders = {tuple(_order(train.pixels[0], task.train.pixels[0]).tolist()) for task in tasks}
    assert len(orders) == num_tasks


def _order(before: Tensor, after: Tensor) -> Tensor:
    return (after.unsqueeze(1) == before.unsqueeze(0)).double().argmax(1)


def test_rotated_by_right_angles_is_exact() -> None:
    train = images()
    tasks = make_tasks("rotated", train, train, 4, seed=0, degrees=90)
    for turns, task in enumerate(tasks):
        expected = torch.rot90(train.pixels.view(-1, 6, 6), turns, (1, 2)).flatten(1)
        assert task.train.pixels == pytest.approx(expected, abs=1e-5)
        assert task.name == f"{90 * turns}°"


def test_rotated_keeps_what_is_in_the_middle() -> None:
    picture = torch.zeros(1, 9, 9)
    picture[0, 4, 4] = 1.0
    tasks = make_tasks("rotated", *[Images(picture.flatten(1), torch.zeros(1, dtype=torch.long), 9)] * 2, 3, 0)
    assert all(float(task.train.pixels.view(9, 9)[4, 4]) == pytest.approx(1.0) for task in tasks)


@given(num_tasks=st.integers(1, 5), seed=st.integers(0, 2**40))
def test_split(num_tasks: int, seed: int) -> None:
    """Every class, and with it every sample, is in exactly one task; as evenly as may be."""
    train, test = images(), images(20)
    tasks = make_tasks("split", train, test, num_tasks, seed)
    classes = [set(task.train.labels.tolist()) for task in tasks]
    assert set.union(*classes) == set(range(10))
    assert sum(map(len, classes)) == 10
    assert max(map(len, classes)) - min(map(len, classes)) <= 1
    assert sum(len(task.train.labels) for task in tasks) == len(train.labels)
    for task, own in zip(tasks, classes, strict=True):
        assert set(task.test.labels.tolist()) == own
        for row, label in zip(task.train.pixels, task.train.labels, strict=True):
            where = (train.pixels == row).all(1).nonzero().item()
            assert train.labels[int(where)] == label


@pytest.mark.parametrize(("kind", "num_tasks"), [("split", 6), ("split", 0), ("rotated", 0)])
def test_too_many_or_too_few(kind: TaskKind, num_tasks: int) -> None:
    with pytest.raises(DrivetrainError, match="tasks"):
        make_tasks(kind, images(), images(), num_tasks, 0)


@given(batch=st.integers(1, 9), steps=st.integers(1, 12), seed=st.integers(0, 2**40))
def test_a_stream_gives_each_task_its_steps(batch: int, steps: int, seed: int) -> None:
    tasks = make_tasks("split", images(), images(), 3, seed=0)
    stream = Stream(tasks, steps_per_task=steps, batch=batch, seed=seed)
    assert len(stream) == 3 * steps * batch
    for number, task in enumerate(tasks):
        part = [stream[index] for index in range(number * steps * batch, (number + 1) * steps * batch)]
        assert {int(label) for _, label, _ in part} <= set(task.train.labels.tolist())
        assert {int(which) for _, _, which in part} == {number}
        size = len(task.train.labels)
        for begin in range(0, len(part) - size + 1, size):  # every pass has each sample once
            seen = torch.stack([pixels for pixels, _, _ in part[begin : begin + size]])
            assert len(seen.unique(dim=0)) == size


def test_a_stream_is_the_same_for_all_who_have_its_seed() -> None:
    tasks = make_tasks("rotated", images(), images(), 2, seed=0)
    first, again, other = (Stream(tasks, 5, 8, seed) for seed in (3, 3, 4))
    assert torch.equal(first.order, again.order)
    assert not torch.equal(first.order, other.order)


def test_mixed_together_every_task_is_everywhere() -> None:
    tasks = make_tasks("split", images(), images(), 5, seed=0)
    stream = Stream(tasks, 20, 8, seed=0, mixed=True)
    assert len(stream) == 5 * 20 * 8
    assert {int(stream[index][2]) for index in range(40)} == {0, 1, 2, 3, 4}


def test_what_is_held_out_for_tuning_is_in_neither_part_twice() -> None:
    train = images(50)
    kept, tried = held_out(train, part=5)
    assert len(tried.labels) == 10
    together = torch.cat([kept.pixels, tried.pixels])
    assert len(together.unique(dim=0)) == len(together) == 50
