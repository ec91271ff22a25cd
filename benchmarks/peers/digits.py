"""Handwritten digits and a small network, shared by the scripts of this folder that classify images."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

_digits = load_digits()
_order = torch.randperm(len(_digits.target), generator=torch.Generator().manual_seed(0))
_images = torch.tensor(_digits.data, dtype=torch.float32)[_order] / 16
_labels = torch.tensor(_digits.target)[_order]
train_set = TensorDataset(_images[:1472], _labels[:1472])
valid_set = TensorDataset(_images[1472:], _labels[1472:])


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
