"""How far runs that must mean the same are apart: every division of the work against a plain loop.

The largest difference over 50 steps of per-step losses, and of final weights, in float64; of losses relative to 1 in
float32. The cases are those of `tests/api/test_equivalence.py`.
"""

import tempfile

import numpy as np
import torch
from tests.api.jobs import Variant, plain_loop, run
from tests.api.test_equivalence import CASES, difference
from tests.gloo_pool import GlooPool


def measure() -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    pool = GlooPool()
    try:
        for kind in ("mlp", "transformer"):
            for case, (world, global_batch, micro_batch, num_samples) in CASES.items():
                for dtype in (torch.float64, torch.float32):
                    variant = Variant(kind, dtype, global_batch, num_samples=num_samples)
                    with tempfile.TemporaryDirectory() as folder:
                        trained = pool.run(run, folder, variant, micro_batch, world=world)[0]
                    losses, weights = plain_loop(variant)
                    if dtype == torch.float64:
                        of_losses, of_weights = difference(trained, losses, weights)
                        samples[f"{kind}, {case}: losses, float64"] = [of_losses]
                        samples[f"{kind}, {case}: weights, float64"] = [of_weights]
                    else:
                        apart = np.abs(np.array(trained.losses) - np.array(losses)).max()
                        samples[f"{kind}, {case}: losses, float32"] = [float(apart)]
    finally:
        pool.close()
    return samples
