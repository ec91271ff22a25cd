"""Checks a step with autocast and gradient scaling: it moves the weights, and a gradient that overflowed does not."""

import torch
from torch import nn

from drivetrain.verify.probe import Outcome, Probe, ProbeSetup, failed, passed

PROBES = (
    Probe(
        name="autocast", title="autocast, scaler", function="drivetrain.verify.probes.mixed_precision:probe", order=60
    ),
)

REINSTALL = "pip install --force-reinstall torch"


def probe(setup: ProbeSetup) -> Outcome:
    for name in setup.devices:
        device = torch.device(name)
        for dtype in (torch.bfloat16, torch.float16):
            if dtype == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
                continue
            if problem := scaled_step(device, dtype):
                return failed(f"{name}, {dtype}: {problem}", remedy=REINSTALL)
    return passed("weights move, overflow is skipped", detail="autocast in bf16 and fp16 with a gradient scaler")


def scaled_step(device: torch.device, dtype: torch.dtype) -> str:
    """Return what is wrong with a good step and a step with a planted overflow; empty if nothing is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    features = torch.randn(32, 16, device=device)

    def backward() -> torch.dtype:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):
            output = model(features)
            loss = output.float().square().mean()
        scaler.scale(loss).backward()
        return torch.as_tensor(output).dtype

    def weights() -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in model.parameters()]

    before = weights()
    computed_in = backward()
    if computed_in != dtype:
        return f"autocast computed in {computed_in}"
    scaler.step(optimizer)
    scaler.update()
    after = weights()
    if not all(parameter.isfinite().all() for parameter in after):
        return "the weights are not finite after a step"
    if all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
        return "a step did not move the weights"

    scale_before = scaler.get_scale()
    backward()
    planted = next(model.parameters()).grad
    if planted is None:
        return "backward left no gradient"
    planted[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    if not all(torch.equal(old, new) for old, new in zip(after, weights(), strict=True)):
        return "a step with an infinite gradient was taken, not skipped"
    if not scaler.get_scale() < scale_before:
        return f"the scale stayed at {scaler.get_scale():g} after an overflow"
    return ""
