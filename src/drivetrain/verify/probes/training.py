"""Checks two training steps: the loss falls, stays finite, and the same seed gives the same bits."""

import math
import os

import torch
from torch import nn

from drivetrain.verify.probe import Outcome, Probe, ProbeSetup, failed, passed

PROBES = (
    Probe(name="training", title="two training steps", function="drivetrain.verify.probes.training:probe", order=150),
)


def train_two_steps(device: torch.device, *, seed: int, learning_rate: float = 0.05) -> list[float]:
    """Return the loss before, after one and after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    features = torch.randn(64, 16, device=device)
    labels = torch.randint(0, 4, (64,), device=device)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), labels)
        losses.append(loss.item())
        if step < 2:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return losses


def judge(first: list[float], second: list[float]) -> str:
    """Return what is wrong with two runs from one seed; empty if nothing is."""
    if not all(map(math.isfinite, first)):
        return f"the loss is not finite: {first}"
    if not first[0] > first[1] > first[2]:
        return f"the loss does not fall: {first}"
    if first != second:
        return f"two runs from one seed differ: {first} and {second}"
    return ""


def probe(setup: ProbeSetup) -> Outcome:
    # cuBLAS repeats itself only with a fixed workspace; it has to be set before the first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    losses: list[float] = []
    for name in setup.devices:
        device = torch.device(name)
        losses = train_two_steps(device, seed=7)
        if problem := judge(losses, train_two_steps(device, seed=7)):
            return failed(
                f"{name}: {problem}", remedy="drivetrain verify --only matmul shows whether its arithmetic is right"
            )
    return passed(f"loss {losses[0]:.3f} to {losses[-1]:.3f}", detail="2 steps, twice from one seed: the same bits")
