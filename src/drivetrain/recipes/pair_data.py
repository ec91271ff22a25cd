"""Pairs of images with a label (first, second, similar): generated with a known ceiling, or from files of your own.

Images are dealt into folds by their content, so that no image, under whatever name, is in two folds.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.files import BadInput, read_image, read_table

LABELS = ("first", "second", "similar")
SWAPPED = (1, 0, 2)  # the label of a pair in the other order
NUM_FOLDS = 5
RATING_NOISE, SIMILAR_WITHIN = 0.06, 0.18  # of generated scores, which lie between 0 and 1
BETTER_FIRST = 0.8  # the part of the generated training pairs that differ and list the better image first


@dataclass(frozen=True)
class Pairs(Dataset[Any]):
    """Pairs as numbers of images, and a label each."""

    images: Tensor  # uint8, (number, channels, size, size)
    first: Tensor
    second: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.images[self.first[index]], self.images[self.second[index]], self.labels[index]

    def only(self, chosen: Tensor) -> "Pairs":
        return Pairs(self.images, self.first[chosen], self.second[chosen], self.labels[chosen])


def folds_of(images: Tensor) -> Tensor:
    """Deals images into folds in the order of their content's hash; equal images come into the same fold."""
    keys = [hashlib.blake2b(image.numpy().tobytes(), digest_size=16).digest() for image in images]
    place = {key: number for number, key in enumerate(sorted(set(keys)))}
    return torch.tensor([place[key] % NUM_FOLDS for key in keys])


def split(pairs: Pairs, fold: int) -> tuple[Pairs, Pairs, int]:
    """Returns pairs to learn from, pairs of the held-out fold, and how many go over the border and are left out."""
    held_out = folds_of(pairs.images) == fold
    first, second = held_out[pairs.first], held_out[pairs.second]
    return pairs.only(~first & ~second), pairs.only(first & second), int((first != second).sum())


def draw_pairs(
    images: Tensor, scores: Tensor, within: float, fold: int, counts: tuple[int, int]
) -> tuple[Pairs, Pairs]:
    """Draws pairs from the images of the other folds, and from those of the held-out one."""
    held_out = folds_of(images) == fold
    generator = torch.Generator().manual_seed(0)
    found = []
    for members, count in zip((~held_out, held_out), counts, strict=True):
        numbers = members.nonzero()[:, 0]
        if len(numbers) < 2:
            message = f"fold {fold} of {NUM_FOLDS} leaves fewer than two images on one side"
            raise ConfigError([Problem("--fold", message, fold, remedy="bring more images")])
        first = torch.randint(len(numbers), (count,), generator=generator)
        second = (first + torch.randint(1, len(numbers), (count,), generator=generator)) % len(numbers)
        found.append(
            Pairs(images, numbers[first], numbers[second], label_of(scores, numbers[first], numbers[second], within))
        )
    return found[0], found[1]


def label_of(scores: Tensor, first: Tensor, second: Tensor, within: float) -> Tensor:
    difference = scores[first] - scores[second]
    return torch.where(difference.abs() <= within, 2, torch.where(difference > 0, 0, 1))


def generate(count: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns images of a disc, the true score of each (how large the disc is), and its rating: the score with noise.

    Colors, place, background and pixels vary and say nothing.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    scores = draw(count)
    axis = torch.linspace(-1, 1, size)
    across, down = axis.view(1, -1), axis.view(-1, 1)
    slope = 0.4 * ((draw(count, 1, 1) - 0.5) * across + (draw(count, 1, 1) - 0.5) * down)
    background = 0.1 + 0.5 * draw(count, 3, 1, 1) + slope.unsqueeze(1)
    x, y = (0.5 * (draw(count, 1, 1) - 0.5) for _ in range(2))
    inside = torch.sigmoid(15 * (0.2 + 0.5 * scores.view(-1, 1, 1) - torch.hypot(across - x, down - y))).unsqueeze(1)
    disc = 0.6 + 0.4 * draw(count, 3, 1, 1)
    pixels = background * (1 - inside) + disc * inside
    pixels = pixels + 0.05 * torch.randn(pixels.shape, generator=generator)
    ratings = scores + RATING_NOISE * torch.randn(count, generator=generator)
    return (255 * pixels.clamp(0, 1)).to(torch.uint8), scores, ratings


def better_first(pairs: Pairs, part: float = BETTER_FIRST) -> Pairs:
    """Puts the better image first in that part of the pairs that differ, as lists made by people tend to."""
    drawn = torch.rand(len(pairs), generator=torch.Generator().manual_seed(1))
    turned = (pairs.labels == 1) & (drawn < 2 * part - 1)
    first, second = torch.where(turned, pairs.second, pairs.first), torch.where(turned, pairs.first, pairs.second)
    return Pairs(pairs.images, first, second, torch.where(turned, 0, pairs.labels))


def ceiling(scores: Tensor, pairs: Pairs) -> float:
    """Returns the accuracy to expect of one who knows the true scores, but not the noise of the ratings."""
    difference = (scores[pairs.first] - scores[pairs.second]).double()
    spread = RATING_NOISE * math.sqrt(2)
    first = torch.special.ndtr((difference - SIMILAR_WITHIN) / spread)
    second = torch.special.ndtr((-difference - SIMILAR_WITHIN) / spread)
    best = torch.stack([first, second, 1 - first - second]).max(0).values
    return float(best.mean())


def read_pairs(path: Path, size: int, within: float, fold: int, counts: tuple[int, int]) -> tuple[Pairs, Pairs, int]:
    """Reads a table of pairs (first, second, label) or of scores (image, score); images lie beside the table.

    Returns pairs to learn from, held-out ones, and how many of the table go over the border of the folds.
    """
    bad = BadInput()
    images = _Images(path, size, bad)
    if _has_scores(path):
        scores = []
        for row in read_table(path, ("image", "score"), bad):
            score = _number(row["score"])
            if score is None:
                bad.add(path, f"the score {row['score']!r} is no finite number", line=row.line)
            scores.append((images.number(row["image"], row.line), score))
        bad.raise_if_any("correct or remove these rows, and replace the images")
        values = torch.zeros(len(images.tensors))
        for number, score in scores:
            values[number] = score if score is not None else 0.0
        return *draw_pairs(torch.stack(images.tensors), values, within, fold, counts), 0
    found = []
    for row in read_table(path, ("first", "second", "label"), bad):
        label = row["label"].strip()
        if label not in LABELS:
            bad.add(path, f"the label {label!r} is none of {', '.join(LABELS)}", line=row.line)
        elif row["first"] == row["second"]:
            bad.add(path, f"both images are {row['first']}", line=row.line)
        else:
            found.append((images.number(row["first"], row.line), images.number(row["second"], row.line), label))
    bad.raise_if_any("correct or remove these rows, and replace the images")
    first, second, labels = zip(*found, strict=True)
    numbers = torch.tensor([LABELS.index(label) for label in labels])
    train, valid, left_out = split(
        Pairs(torch.stack(images.tensors), torch.tensor(first), torch.tensor(second), numbers), fold
    )
    for name, side in (("to learn from", train), ("in the held-out fold", valid)):
        if not len(side):
            message = f"{path} has no pair {name} whose images are both on that side"
            raise ConfigError([Problem("--fold", message, fold, remedy="another fold, or more pairs")])
    return train, valid, left_out


class _Images:
    """Images by name, each decoded once; one that cannot be is reported with the first line that names it."""

    def __init__(self, table: Path, size: int, bad: BadInput) -> None:
        self._table, self._size, self._bad = table, size, bad
        self._numbers: dict[str, int] = {}
        self.tensors: list[Tensor] = []

    def number(self, name: str, line: int) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.tensors)
            image = read_image(self._table.parent / name, self._size, self._bad, named_in=(self._table, line))
            self.tensors.append(torch.empty(0) if image is None else image)
        return self._numbers[name]


def _has_scores(path: Path) -> bool:
    """Returns whether the first line names a score. A file that cannot be read is reported by `read_table`."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            return {"image", "score"} <= set(re.findall(r"\w+", file.readline()))
    except OSError:
        return False


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
