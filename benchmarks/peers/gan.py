"""Handwritten digits, a generator, a discriminator and their losses, shared by the scripts that train a GAN."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers.digits import train_set as _digits

train_set = _digits.tensors[0]


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(16, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.Sigmoid())
        self.disc = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))

    def samples(self, count):
        return self.gen(torch.randn(count, 16, device=next(self.parameters()).device))


def loss_d(model, images):
    real, fake = model.disc(images), model.disc(model.samples(len(images)).detach())
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def loss_g(model, images):
    return F.softplus(-model.disc(model.samples(len(images)))).mean()


def told_apart(model):
    """Return the share of images that the discriminator is right about."""
    with torch.no_grad():
        real, fake = model.disc(train_set), model.disc(model.samples(len(train_set)))
    return ((real > 0).float().mean() + (fake < 0).float().mean()).item() / 2
