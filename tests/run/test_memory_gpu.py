"""On a GPU that is really out of memory, by an allocation that torch refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.api.jobs import plain_loop, run, vector_loss
from tests.run.test_memory import VARIANT, events

pytestmark = pytest.mark.gpu


def test_half_the_samples_fit(tmp_path: Path) -> None:
    """From step 11 on a sample needs a twentieth of what the process may have: 32 do not fit, 16 do."""
    share = 0.05
    torch.cuda.set_per_process_memory_fraction(share)
    per_sample = int(share * torch.cuda.get_device_properties(0).total_memory / 20)
    num_samples = 0

    def hungry(model: nn.Module, batch: Any) -> Tensor:
        nonlocal num_samples
        num_samples += len(batch[0])
        if num_samples > 350:
            torch.empty(len(batch[0]) * per_sample, dtype=torch.uint8, device="cuda")
        return vector_loss(model, batch)

    try:
        found = run(str(tmp_path), VARIANT, gpu_mode="single_gpu", settings={"precision": "fp32"}, loss=hungry)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found is not None
    np.testing.assert_allclose(found.losses, plain_loop(VARIANT)[0], rtol=0, atol=1e-12)
    assert events(tmp_path / "suite", "micro-batch capped")[-1]["micro_batch"] == 16
    assert not found.resumed_from, "the step was repeated, not the run"
