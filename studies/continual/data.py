"""Loads pictures to make tasks of: the digits that scikit-learn brings along, or MNIST and Fashion-MNIST from files."""

from pathlib import Path

import torch

from drivetrain.recipes.digits import load_digits
from drivetrain.recipes.mnist import Name, load_pictures
from studies.continual.tasks import Images


def load_images(name: Name, folder: Path | None) -> tuple[Images, Images]:
    """Return the training set and the test set. Tuning holds samples of the first out by itself."""
    if name == "digits":
        train, pictures, labels = load_digits()
        return Images(train.tensors[0].flatten(1), train.tensors[1], 8), Images(pictures.flatten(1), labels, 8)
    found = load_pictures(name, folder)
    both = [torch.cat(parts) for parts in zip(found.train.tensors, found.valid.tensors, strict=True)]
    images, labels = found.test.tensors
    return Images(both[0].flatten(1), both[1], found.size), Images(images.flatten(1), labels, found.size)
