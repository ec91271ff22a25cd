"""Classify images, with augmentation, validation and a test set.

python examples/image_classification.py
drivetrain launch examples/image_classification.py       # on every GPU here
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, random_split

import drivetrain as dt


class Digits(Dataset):
    """Handwritten digits of 8 by 8 pixels; for training, each is shifted by up to a pixel, and noisy."""

    def __init__(self, augment):
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            image = image.roll(tuple(torch.randint(-1, 2, (2,)).tolist()), (1, 2)) + 0.05 * torch.randn(1, 8, 8)
        return image, self.labels[index]


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )


train, valid, test = (
    random_split(Digits(augment), [0.8, 0.1, 0.1], torch.Generator().manual_seed(0))[part]
    for part, augment in enumerate((True, False, False))
)

job = dt.Job(
    name="image-classification",
    model=make_model,
    data=train,
    valid=valid,
    test=test,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.05),
    metrics={"accuracy": lambda output, batch: output.argmax(1) == batch[1]},
    optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
    weight_decay=0.01,
    schedule=dt.WarmupCosine(warmup_steps=20),
    global_batch=64,
    epochs=10,
    best=dt.Aim("valid_accuracy"),
)

if __name__ == "__main__":
    result = dt.train(job)
    print(f"test accuracy {result.test['test_accuracy']:.3f}, with the weights of step {result.best.step}")
