"""A perceptron 784-256-256-10 on data of MNIST's size, 128 a step: no flags, against a captured step by hand."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.contest import Aim, Competitor, Contest, Limit
from benchmarks.rivals import (
    QUIET,
    Pace,
    Workload,
    by_hand,
    by_lightning,
    captured,
    trainers_as_they_come,
    with_no_flags,
)

NAMES = ("plan-mlp",)
NUM_SAMPLES = {True: 1_120, False: 60_000}  # tiny or not; both leave 96 for an epoch's last step


def workload(smoke: bool) -> Workload:
    num_samples = NUM_SAMPLES[smoke]
    width, hidden = (16, 8) if smoke else (784, 256)

    def model() -> nn.Module:
        inner = (nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        return nn.Sequential(nn.Linear(width, hidden), *inner, nn.Linear(hidden, 10))

    def data() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(num_samples, width, generator=generator)
        return pixels, torch.randint(0, 10, (num_samples,), generator=generator)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    return Workload(
        model=model,
        loss=loss,
        data=data,
        global_batch=128,
        learning_rate=1e-3,
        pace=Pace(5, 5, 3) if smoke else Pace(2_000, 1_000, 10),
        job_steps=45 if smoke else 46_900,  # 100 epochs
    )


def contest(name: str, smoke: bool = False) -> Contest:
    work = workload(smoke)
    size = work.global_batch
    slow = work if smoke else work.paced(warm_steps=100, window_steps=100, num_windows=6)
    return Contest(
        name=name,
        module=__name__,
        workload={
            "model": "perceptron 16-8-8-10" if smoke else "perceptron 784-256-256-10",
            "samples": NUM_SAMPLES[smoke],
            "global_batch": size,
            "data": "random, of MNIST's size",
            "optimizer": "AdamW, learning rate 1e-3",
            "job": f"{work.job_steps} steps",
        },
        unit="steps/s",
        units_per_step=1,
        competitors=(
            with_no_flags(work, cap_seconds=90),
            Competitor(
                "captured-tf32",
                "by hand: data on the GPU, the whole step in a CUDA graph, fused AdamW, fp32 with TF32 matmuls",
                lambda _: captured(work),
                cap_seconds=40,
            ),
            Competitor(
                "captured-bf16",
                "the same in bf16 autocast",
                lambda _: captured(work, precision="bf16"),
                cap_seconds=40,
            ),
            Competitor(
                "resident-eager",
                "by hand: data on the GPU, fused AdamW, fp32 with TF32 matmuls, no graph",
                lambda _: by_hand(slow, micro_batch=size, precision="fp32"),
                cap_seconds=40,
            ),
            *trainers_as_they_come(slow, micro_batch=size, cap_seconds=40, details="DataLoader over a TensorDataset, "),
            Competitor(
                "lightning-lean",
                "Lightning, fp32, fused AdamW, no logger, bar, summary or checkpoints",
                lambda _: by_lightning(slow, micro_batch=size, fused=True, **QUIET),
                cap_seconds=40,
                needs=("lightning",),
            ),
        ),
        order=(
            "ours",
            "captured-tf32",
            "captured-bf16",
            "resident-eager",
            "lightning-default",
            "lightning-lean",
            "accelerate-default",
            "captured-tf32",
            "ours",
        ),
        aims=(
            Aim("captured step by hand, the faster precision", ("captured-tf32", "captured-bf16"), 0.95),
            Aim("Lightning", ("lightning-default", "lightning-lean"), 12.0),
            Aim("Accelerate", ("accelerate-default",), 12.0),
        ),
        limits=(Limit("planning (s)", "planning_seconds", 5),),
    )
