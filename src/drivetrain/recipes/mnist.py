"""Loads pictures to learn from: MNIST and Fashion-MNIST from a folder or the network, and the bundled digits."""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.run_folder import write_atomically
from drivetrain.data.files import read_idx
from drivetrain.hardware.facts import cache_folder
from drivetrain.recipes.digits import load_digits

Name = Literal["digits", "mnist", "fashion-mnist"]
NAMES: tuple[Name, ...] = get_args(Name)
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class _Published:
    """The addresses of the files, and the MD5 sums that were published with them."""

    addresses: Sequence[str]
    sums: Mapping[str, str]


PUBLISHED = {
    "mnist": _Published(
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        {
            "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": _Published(
        ("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",),
        {
            "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
}


_DIGITS = tuple(map(str, range(10)))
_CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


@dataclass(frozen=True)
class Pictures:
    """Images are (samples, 1, size, size) from 0 to 1. What is chosen is chosen by `valid`; `test` is for the end."""

    train: TensorDataset
    valid: TensorDataset
    test: TensorDataset
    classes: tuple[str, ...] = _DIGITS

    @property
    def size(self) -> int:
        return int(self.train.tensors[0].shape[-1])


def load_pictures(name: Name, folder: Path | None = None) -> Pictures:
    """Load pictures. `folder` holds the four IDX files, compressed or not; else they are downloaded once, and kept."""
    if name == "digits":
        train, images, labels = load_digits()
        return _split(train.tensors[0], train.tensors[1], images, labels)
    if name not in PUBLISHED:
        raise ConfigError([Problem("--data", "there is no such data", name, allowed=", ".join(NAMES))])
    paths = _files(name, folder)
    images, labels, test_images, test_labels = found = [read_idx(path) for path in paths]
    for pictures, their_labels in ((images, labels), (test_images, test_labels)):
        if pictures.dim() != 3 or their_labels.dim() != 1 or len(pictures) != len(their_labels):
            raise DrivetrainError(
                f"{tuple(pictures.shape)} images and {tuple(their_labels.shape)} labels do not belong together",
                remedy="each file has to be under its own name: train-images-idx3-ubyte and so on",
            )
    _check_content(dict(zip(paths, found, strict=True)))
    split = _split(_scaled(images), labels.long(), _scaled(test_images), test_labels.long())
    return replace(split, classes=_CLOTHES) if name == "fashion-mnist" else split


def _check_content(found: Mapping[Path, Tensor]) -> None:
    """Refuse what would fail only in training: labels that are no class, pictures of another size."""
    size: int | None = None  # that of the first
    for path, array in found.items():
        if array.dim() == 1:
            if len(array) and not 0 <= array.min() <= array.max() < len(_DIGITS):
                what = f"labels from {array.min():g} to {array.max():g}, and classes are 0 to {len(_DIGITS) - 1}"
                raise DrivetrainError(f"{path} has {what}", remedy="bring files with ten classes, counted from 0")
            continue
        height, width = array.shape[1:]
        size = size or height
        if height != width or height != size:
            wanted = "they have to be as high as they are wide" if height != width else f"others have {size} × {size}"
            raise DrivetrainError(
                f"{path} has pictures of {height} × {width}, and {wanted}",
                remedy="bring training and test pictures of one data set, all of one size",
            )


def _scaled(images: Tensor) -> Tensor:
    return images.unsqueeze(1).float() / 255


def _split(images: Tensor, labels: Tensor, test_images: Tensor, test_labels: Tensor) -> Pictures:
    """Hold an eighth of the training pictures out for validation, at most 5,000: the same ones for every seed."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    count = min(5000, len(labels) // 8)
    train, valid = order[count:], order[:count]
    return Pictures(
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[valid], labels[valid]),
        TensorDataset(test_images, test_labels),
    )


def _files(name: str, folder: Path | None) -> list[Path]:
    kept = folder or cache_folder() / "data" / name
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            [Problem("--data-dir", "there is no such folder", str(folder), remedy="make it, or correct it")]
        )
    return [_there(kept, file) or _downloaded(name, file, kept) for file in PUBLISHED[name].sums]


def _there(folder: Path, file: str) -> Path | None:
    """Find a file as it was published, unpacked, or as torchvision keeps it."""
    places = [folder / inner / f"{file}{ending}" for inner in (".", "raw") for ending in ("", ".gz")]
    return next((path for path in places if path.is_file()), None)


def _downloaded(name: str, file: str, folder: Path) -> Path:
    """Download a file. It gets its name once it is complete: a partial download is never taken for the file."""
    published, target = PUBLISHED[name], folder / f"{file}.gz"
    failures = []
    for address in published.addresses:
        try:
            with urllib.request.urlopen(f"{address}{file}.gz", timeout=TIMEOUT_SECONDS) as answer:
                content = answer.read()
        except (urllib.error.URLError, OSError) as error:
            failures.append(f"{address}: {getattr(error, 'reason', error)}")
            continue
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != published.sums[file]:
            failures.append(f"{address}: what came has the MD5 sum {found}, not {published.sums[file]}")
            continue
        folder.mkdir(parents=True, exist_ok=True)
        return write_atomically(target, content, f".{os.getpid()}")
    raise DrivetrainError(
        f"{file}.gz of {name} is not in {folder}, and could not be downloaded ({'; '.join(failures)})",
        remedy="without a network: bring the four files (train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, "
        "t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz) and give their folder with --data-dir, or use "
        "--data digits, which is bundled",
    )
