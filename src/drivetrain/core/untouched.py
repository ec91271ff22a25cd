"""Runs something beside a training run without a trace: generators and cached memory are as before."""

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch's CPU on exit."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Restore the generators afterwards, the device's too, and give the memory that was used back."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    with generators_kept():
        try:
            yield
        finally:
            if device.type == "cuda":
                gc.collect()  # on a CPU the memory is not needed that soon
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
                assert on_device is not None
                torch.cuda.set_rng_state(on_device, device)
