"""For tests on a GPU: whatever makes the host wait for the device inside the loop is an error."""

from typing import Any

import pytest
import torch

from drivetrain.loop import Stepper
from drivetrain.loop.read_back import Reading

Place = tuple[type, str]  # a class, and the name of its method

READINGS: Place = (Reading, "__init__")  # where a step's outcome is put on its way
IN_A_STEP: tuple[Place, ...] = ((Stepper, "run"), READINGS)


def refuse_waits(monkeypatch: pytest.MonkeyPatch, *places: Place, num_spared: int = 2) -> list[str]:
    """In these places, or in a step; the first calls, which set things up, aside. Returns the calls there were."""
    calls: list[str] = []

    def watched(original: Any, name: str) -> Any:
        def call(*args: Any) -> Any:
            calls.append(name)
            torch.cuda.set_sync_debug_mode("error" if len(calls) > num_spared else "default")
            try:
                return original(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    for owner, name in places or IN_A_STEP:
        monkeypatch.setattr(owner, name, watched(getattr(owner, name), name))
    return calls
