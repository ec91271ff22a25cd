"""Keeps learning rates where the optimizer reads them: numbers on the host, or tensors on the device.

A captured step reads its rate from the device, since it has to change between replays. There it is a float32, for all
types of weights. Rates on the host are rounded likewise for GPUs, so that a run is the same with and without capture.
"""

import ctypes
from typing import Any

import torch
from torch.optim import Optimizer

ON_HOST = "lr_on_host"  # of a group whose rate is on the device: its value, without a copy from the device


def rounded(rate: float) -> float:
    """Round a rate to float32."""
    return ctypes.c_float(rate).value


def are_rounded(optimizer: Optimizer) -> bool:
    """Return whether the rates of its parameters are rounded: on a GPU, unless the weights are float64."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not parameters:  # they are somewhere else between steps, as with DeepSpeed's third stage
        return False
    return all(parameter.device.type == "cuda" and parameter.dtype is not torch.float64 for parameter in parameters)


def put_rates_on_device(optimizer: Optimizer) -> None:
    """Move the rates to the device. Called after a checkpoint was loaded, which makes numbers of them again."""
    for group in optimizer.param_groups:
        rate = rounded(float(group.get(ON_HOST, group["lr"])))
        group["lr"] = torch.tensor(rate, dtype=torch.float32, device=group["params"][0].device)
        group[ON_HOST] = rate


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of the next step. On the device the fill is enqueued after the earlier steps, without waiting."""
    if ON_HOST not in group:
        group["lr"] = rate
    elif group[ON_HOST] != rate:
        group["lr"].fill_(rate)
        group[ON_HOST] = rate
