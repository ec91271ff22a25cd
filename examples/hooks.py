"""Hooks: train the head first, log the weights, stop on a condition.

python examples/hooks.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import drivetrain as dt


class HeadFirst(dt.Hook):
    """Freeze the body for a while. What is frozen is in the checkpoint, so a resumed run goes on with it."""

    every = 20

    def check(self, context):
        if context.step == 0:
            context.freeze("0.*")

    def __call__(self, context):
        if context.step == 40:
            context.unfreeze("0.*")
            context.say("the body is trained from here on")


def look(context):
    dt.log("head", dt.Histogram(context.model[2].weight))
    dt.log("digit", dt.Image(context.batch()[0][0].view(8, 8)))


digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

job = dt.Job(
    name="hooks",
    model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    data=TensorDataset(images, labels),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    global_batch=64,
    epochs=20,
    hooks=[
        HeadFirst(),
        dt.every("epoch", look),
        dt.every(50, lambda context: dt.Verdict(stop=context.loss < 0.1)),
    ],
)

if __name__ == "__main__":
    result = dt.train(job)
    print(f"loss {result.last.loss:.3f} after {result.steps} steps")
