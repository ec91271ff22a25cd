"""ResNet-50 on images of 224 × 224, 256 a step: no flags, against a loop with every flag right and trainers with none.

Batch normalization makes the micro-batch part of what is learned, so all of them take the 256 at once.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import resnet
from benchmarks.contest import Aim, Circumstances, Competitor, Contest, Measured
from benchmarks.plan_gpt2 import LIMITS_OF_LARGE_ONES
from benchmarks.rivals import Pace, Workload, by_hand, by_tuned_lightning, trainers_as_they_come, with_no_flags

NAMES = ("plan-resnet",)


def workload(smoke: bool) -> Workload:
    images, size, classes = (32, 32, 10) if smoke else (4096, 224, 1000)

    def model() -> resnet.ResNet50:
        return resnet.ResNet50((1, 1, 1, 1), 8, classes) if smoke else resnet.ResNet50()

    def data() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (images, 3, size, size), dtype=torch.uint8, generator=generator)
        return pixels, torch.randint(0, classes, (images,), generator=generator)

    return Workload(
        model=model,
        loss=resnet.loss_of,
        data=data,
        global_batch=8 if smoke else 256,
        pace=Pace(2, 1, 2) if smoke else Pace(16, 8, 6),
        job_steps=20 if smoke else 50_000,
        loader={} if smoke else loader_options(),
        compiler="eager" if smoke else "inductor",
    )


def loader_options() -> dict[str, Any]:
    """Loading is not what is compared: the trainers get pinned memory, and workers where their batches find room."""
    shared = Path("/dev/shm")  # 8 workers with 2 batches of 38 MB each, and what is on its way
    has_room = shared.exists() and shutil.disk_usage(shared).free > 2 * 2**30
    return {"pin_memory": True, **({"num_workers": 8, "persistent_workers": True} if has_room else {})}


def contest(name: str, smoke: bool = False) -> Contest:
    work = workload(smoke)
    size = work.global_batch
    slow = work if smoke else work.paced(warm_steps=4, window_steps=4, num_windows=3)

    def hand_tuned(told: Circumstances) -> Measured:
        paced = work.warming() if told.is_warming else work
        return by_hand(paced, micro_batch=size, compiled=True, channels_last=True, cudnn_benchmark=True)

    return Contest(
        name=name,
        module=__name__,
        workload={
            "model": "ResNet-50, 25.6 million weights" if not smoke else "a tiny residual network",
            "images": "224 × 224, bytes, a pool of 4096" if not smoke else "32 × 32, bytes",
            "global_batch": size,
            "data": "random images",
            "optimizer": "AdamW, learning rate 1e-4",
            "job": f"{work.job_steps} steps",
        },
        unit="images/s",
        units_per_step=size,
        competitors=(
            with_no_flags(work, cap_seconds=260),
            Competitor(
                "hand-tuned",
                "by hand: bf16 autocast, channels-last, torch.compile, cuDNN benchmark, fused AdamW, TF32 for the "
                "rest, data on the GPU",
                hand_tuned,
                cap_seconds=150,
            ),
            *trainers_as_they_come(slow, micro_batch=size, cap_seconds=60, loading="; pinned memory, 8 loader workers"),
            Competitor(
                "lightning-best",
                "Lightning: precision bf16-mixed, channels-last, torch.compile, benchmark, fused AdamW, TF32 for the "
                "rest, pinned memory, 8 loader workers, no logger, bar, summary or checkpoints",
                lambda _: by_tuned_lightning(work, micro_batch=size, channels_last=True, benchmark=True),
                cap_seconds=150,
                needs=("lightning",),
            ),
        ),
        order=("ours", "hand-tuned", "lightning-default", "accelerate-default", "lightning-best", "hand-tuned", "ours"),
        aims=(
            Aim("hand-tuned loop", ("hand-tuned",), 0.98),
            Aim("Lightning with its best flags", ("lightning-best",), 1.0),
            Aim("Lightning's defaults", ("lightning-default",), 1.0),
            Aim("Accelerate's defaults", ("accelerate-default",), 1.0),
        ),
        limits=LIMITS_OF_LARGE_ONES,
    )
