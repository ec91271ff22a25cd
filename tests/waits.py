"""For tests on a GPU: whatever makes the host wait for the device inside the loop is an error."""

from typing import Any

import pytest
import torch

from drivetrain.core.records import Reading
from drivetrain.step import Stepper


def refuse_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a step, and where its outcome is put on its way; the first step, which sets things up, aside."""
    steps = []

    def watched(original: Any) -> Any:
        def call(*args: Any) -> Any:
            steps.append(1)
            torch.cuda.set_sync_debug_mode("error" if len(steps) > 2 else "default")
            try:
                return original(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    monkeypatch.setattr(Stepper, "run", watched(Stepper.run))
    monkeypatch.setattr(Reading, "__init__", watched(Reading.__init__))
