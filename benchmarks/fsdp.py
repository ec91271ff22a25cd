"""What sharding costs where there is nothing to share: GPT-2 124M on one GPU, fsdp on one rank against single."""

import gc
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.gpt2 import CONTEXT, VOCABULARY, Gpt2, loss_of
from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure

ROUNDS = 2
STEPS = 20
WARM_STEPS = 6
BATCH = 32


def measure() -> dict[str, list[float]]:
    if not torch.cuda.is_available():
        raise SystemExit("fsdp needs a GPU")
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCABULARY, (BATCH * 8, CONTEXT + 1), generator=generator)
    data = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    samples: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for strategy, cast in (("single", ""), ("fsdp", "operations"), ("fsdp", "blocks")):
            seconds, peak = run(data, strategy, cast)
            name = f"{strategy} {cast}".strip()
            samples.setdefault(f"{name} (tokens/s)", []).append(BATCH * CONTEXT / seconds)
            samples.setdefault(f"{name} (peak GB)", []).append(peak / 1e9)
    for cast in ("operations", "blocks"):
        pairs = zip(samples[f"fsdp {cast} (tokens/s)"], samples["single (tokens/s)"], strict=True)
        samples[f"fsdp {cast} / single"] = [ours / single for ours, single in pairs]
    return samples


def run(data: TensorDataset, strategy: str, cast: str) -> tuple[float, int]:
    """Return the seconds of the usual step, and the most memory that was held."""
    marks: list[float] = []

    def timed_loss(model: nn.Module, batch: Any) -> Tensor:
        marks.append(time.perf_counter())
        return loss_of(model, batch)

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            name="fsdp",
            model=Gpt2,
            data=data,
            loss=timed_loss,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4),
            global_batch=BATCH,
            max_steps=STEPS,
            checkpoint_every=STEPS,
        )
        config = configure(
            output_dir=folder,
            gpu_mode="single_gpu",
            precision="bf16",
            batch_size=BATCH,
            auto_optimize=False,
            report=False,
            parallel_strategy=strategy,
            **({"fsdp_cast": cast} if cast else {}),
        )
        train(job, config, quiet=True)
    return statistics.median([b - a for a, b in pairwise(marks)][WARM_STEPS:]), torch.cuda.max_memory_allocated()
