"""Wait for a device. Each call is a host wait: it belongs where something is timed, never in the loop."""

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was enqueued; a CPU already has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
