"""Train a GAN: two networks, two losses and two optimizers in one job.

python examples/gan.py
drivetrain launch examples/gan.py       # on every GPU here
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import drivetrain as dt

NOISE = 16


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen = nn.Sequential(
            nn.Linear(NOISE, 128),
            nn.LeakyReLU(0.2),
            nn.Linear(128, 256),
            nn.LeakyReLU(0.2),
            nn.Linear(256, 64),
            nn.Sigmoid(),
        )
        self.disc = nn.Sequential(
            nn.Linear(64, 256),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(256, 128),
            nn.LeakyReLU(0.2),
            nn.Linear(128, 1),
        )

    def samples(self, count):
        return self.gen(torch.randn(count, NOISE, device=next(self.parameters()).device))


def loss_d(model, images):
    real, fake = model.disc(images), model.disc(model.samples(len(images)).detach())
    dt.log("told apart", ((real > 0).float().mean() + (fake < 0).float().mean()) / 2)
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def loss_g(model, images):
    return F.softplus(-model.disc(model.samples(len(images)))).mean()


def show(context):
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        rows = context.model.samples(32).reshape(4, 8, 8, 8).transpose(1, 2).reshape(32, 64)
    dt.log("samples", dt.Image(rows))


job = dt.Job(
    name="gan",
    model=Gan,
    data=torch.tensor(load_digits().data, dtype=torch.float32) / 16,
    loss={"d": loss_d, "g": loss_g},
    optimizer={
        "d": dt.Optim(lambda params: torch.optim.Adam(params, lr=2e-4, betas=(0.5, 0.999)), params="disc.*"),
        "g": dt.Optim(lambda params: torch.optim.Adam(params, lr=2e-4, betas=(0.5, 0.999)), params="gen.*"),
    },
    global_batch=64,
    epochs=100,
    hooks=[dt.every(500, show)],
    checkpoint_every=1000,
)

if __name__ == "__main__":
    result = dt.train(job)
    print(f"after {result.steps} steps: {result.folder}/media has the samples")
