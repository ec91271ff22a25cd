"""Tasks that follow each other, and the one long stream of samples that they make.

`permuted`: the pixels in another fixed order for each task. `rotated`: turned further for each. `split`: a few of the
classes each, and one set of outputs for all of them. At test time the task of a sample is not given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from drivetrain.core.errors import DrivetrainError

TaskKind = Literal["permuted", "rotated", "split"]
DEGREES = 30.0  # between two rotated tasks; five of them stay clear of 180°, where a 6 is a 9


@dataclass(frozen=True)
class Images:
    """Square pictures as rows of pixels, with their classes."""

    pixels: Tensor  # (samples, side × side)
    labels: Tensor
    side: int

    def picked(self, which: Tensor) -> "Images":
        return Images(self.pixels[which], self.labels[which], self.side)


@dataclass(frozen=True)
class Task:
    name: str
    train: Images
    test: Images


def make_tasks(
    kind: TaskKind, train: Images, test: Images, num_tasks: int, seed: int, *, degrees: float = DEGREES
) -> list[Task]:
    """Make the tasks. The seed decides orders of pixels, and which classes go together."""
    if num_tasks < 1:
        raise DrivetrainError(f"{num_tasks} tasks are none", remedy="at least 1")
    generator = torch.Generator().manual_seed(seed)
    if kind == "permuted":
        size = train.side**2
        orders = [torch.arange(size)] + [torch.randperm(size, generator=generator) for _ in range(num_tasks - 1)]
        return [
            Task(f"order {number}", _permuted(train, order), _permuted(test, order))
            for number, order in enumerate(orders, start=1)
        ]
    if kind == "rotated":
        angles = [degrees * number for number in range(num_tasks)]
        return [Task(f"{angle:g}°", rotated(train, angle), rotated(test, angle)) for angle in angles]
    return _split(train, test, num_tasks, generator)


def _permuted(images: Images, order: Tensor) -> Images:
    return Images(images.pixels[:, order], images.labels, images.side)


def rotated(images: Images, degrees: float) -> Images:
    """Rotate counter-clockwise, with linear interpolation between pixels; pixels from outside are 0."""
    if degrees % 360 == 0:
        return images
    angle = math.radians(degrees)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    pictures = images.pixels.view(-1, 1, images.side, images.side)
    grid = functional.affine_grid(turn.expand(len(pictures), 2, 3).to(pictures), list(pictures.shape), False)
    turned = functional.grid_sample(pictures, grid, mode="bilinear", align_corners=False)
    return Images(turned.flatten(1), images.labels, images.side)


def _split(train: Images, test: Images, num_tasks: int, generator: torch.Generator) -> list[Task]:
    classes = torch.tensor(sorted(set(train.labels.tolist())))
    if 2 * num_tasks > len(classes) and num_tasks > 1:
        raise DrivetrainError(
            f"{len(classes)} classes cannot be split into {num_tasks} tasks of at least 2",
            remedy=f"--num-tasks {len(classes) // 2} or fewer",
        )
    shuffled = classes[torch.randperm(len(classes), generator=generator)]
    tasks = []
    for own in shuffled.tensor_split(num_tasks):
        name = ", ".join(map(str, sorted(own.tolist())))
        parts = (images.picked(torch.isin(images.labels, own)) for images in (train, test))
        tasks.append(Task(name, *parts))
    return tasks


def held_out(images: Images, part: int = 5) -> tuple[Images, Images]:
    """Return the training set without every fifth sample, and these: to choose settings without the test set."""
    order = torch.randperm(len(images.labels), generator=torch.Generator().manual_seed(0))
    size = len(order) // part
    return images.picked(order[size:]), images.picked(order[:size])


class Stream(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Task after task, each for equally many steps, passing over its samples in a new order again and again.

    An item is pixels, label, and the number of the task. No batch has samples of two tasks. `mixed` has the same
    samples in an order that knows no tasks: what could be reached if all came at once.
    """

    def __init__(self, tasks: Sequence[Task], steps_per_task: int, batch: int, seed: int, *, mixed: bool = False):
        self.pixels = torch.cat([task.train.pixels for task in tasks])
        self.labels = torch.cat([task.train.labels for task in tasks])
        sizes = [len(task.train.labels) for task in tasks]
        self.which = torch.repeat_interleave(torch.arange(len(tasks)), torch.tensor(sizes))
        generator = torch.Generator().manual_seed(seed)
        wanted, begin, parts = steps_per_task * batch, 0, []
        for size in sizes:
            passes = [torch.randperm(size, generator=generator) for _ in range(-(-wanted // size))]
            parts.append(begin + torch.cat(passes)[:wanted])
            begin += size
        self.order = torch.cat(parts)
        if mixed:
            self.order = self.order[torch.randperm(len(self.order), generator=generator)]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        row = self.order[index]
        return self.pixels[row], self.labels[row], self.which[row]
