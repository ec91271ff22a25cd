"""Checks that model and batch are on their device, and that a tensor on another one is noticed."""

import torch
from torch import nn

from drivetrain.hardware import assert_on_device
from drivetrain.verify.probe import Outcome, Probe, ProbeSetup, failed, passed

PROBES = (
    Probe(name="placement", title="device placement", function="drivetrain.verify.probes.placement:probe", order=10),
)


class _TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(features) * self.scale)
        return result


def elsewhere(device: torch.device) -> torch.device:
    """Return a device that is not this one, on any machine: `meta` holds no data and always exists."""
    return torch.device("meta" if device.type == "cpu" else "cpu")


def probe(setup: ProbeSetup) -> Outcome:
    for name in setup.devices:
        device = torch.device(name)
        model = _TwoParts().to(device)
        batch = {
            "features": torch.randn(4, 8, device=device),
            "labels": torch.zeros(4, dtype=torch.long, device=device),
        }
        assert_on_device(device, model=model, batch=batch)
        result = model(batch["features"])
        if result.device != device:
            return failed(
                f"a model and a batch on {device} gave a result on {result.device}",
                remedy="pip install --force-reinstall torch",
            )
        model.head.to(elsewhere(device))
        if is_on_device(device, model, batch):
            return failed(
                f"a layer moved to {elsewhere(device)} was not noticed on {device}",
                remedy="pip install --force-reinstall drivetrain",
            )
    return passed(", ".join(setup.devices), detail="a planted misplaced layer is noticed and named")


def is_on_device(device: torch.device, model: nn.Module, batch: dict[str, torch.Tensor]) -> bool:
    """Return whether nothing misplaced was noticed. A complaint must name the layer to be of use."""
    try:
        assert_on_device(device, model=model, batch=batch)
    except Exception as error:  # noqa: BLE001  (whatever it raises, the name is what counts)
        return "head" not in str(error)
    return True
