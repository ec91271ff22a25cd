"""Wait for a device. Each call is a host wait: it belongs where something is timed, never in the loop."""

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; a CPU already has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
