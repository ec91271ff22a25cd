"""GPT-2 124M, sequence 1024, 64 sequences a step: no flags, against loops with every flag right and with none."""

from functools import partial

import torch
from torch import Tensor

from benchmarks import gpt2
from benchmarks.contest import Aim, Circumstances, Competitor, Contest, Limit, Measured
from benchmarks.rivals import Pace, Workload, by_hand, by_tuned_lightning, trainers_as_they_come, with_no_flags

NAMES = ("plan-gpt2",)
GRID = (64, 32, 16, 8)
USERS_MICRO_BATCH = 8


def workload(smoke: bool) -> Workload:
    sequences, context, vocabulary = (128, 16, 64) if smoke else (1024, gpt2.CONTEXT, gpt2.VOCABULARY)

    def model() -> gpt2.Gpt2:
        return gpt2.Gpt2(16, 1, 2, context, vocabulary) if smoke else gpt2.Gpt2()

    def data() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, vocabulary, (sequences, context + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Workload(
        model=model,
        loss=gpt2.loss_of,
        data=data,
        global_batch=64,
        pace=Pace(2, 1, 3) if smoke else Pace(10, 10, 8),
        job_steps=20 if smoke else 20_000,
        compiler="eager" if smoke else "inductor",
    )


def contest(name: str, smoke: bool = False) -> Contest:
    work = workload(smoke)
    context = 16 if smoke else gpt2.CONTEXT
    slow = work if smoke else work.paced(warm_steps=2, window_steps=1, num_windows=4)
    eager = work if smoke else work.paced(warm_steps=2, window_steps=2, num_windows=3)
    return Contest(
        name=name,
        module=__name__,
        workload={
            "model": "GPT-2, 124 million weights, 12 layers, vocabulary 50304" if not smoke else "a tiny transformer",
            "sequence": context,
            "global_batch": work.global_batch,
            "data": "random tokens",
            "optimizer": "AdamW, learning rate 1e-4",
            "job": f"{work.job_steps} steps",
        },
        unit="tokens/s",
        units_per_step=work.global_batch * context,
        competitors=(
            with_no_flags(work, cap_seconds=260),
            *(_by_hand(work, eager, size, compiled=compiled) for compiled in (True, False) for size in GRID),
            Competitor(
                "lightning-best",
                "Lightning: precision bf16-mixed, torch.compile, fused AdamW, TF32 for the rest, 4 pinned loader "
                "workers, no logger, bar, summary or checkpoints; the micro-batch that is best by hand",
                partial(_lightning_best, work),
                cap_seconds=90,
                needs=("lightning",),
            ),
            *trainers_as_they_come(
                slow, micro_batch=USERS_MICRO_BATCH, cap_seconds=45, details="micro-batch 8 × 8 accumulated, "
            ),
        ),
        order=(
            "ours",
            *(f"raw-compiled-{size}" for size in GRID),
            "lightning-best",
            "lightning-default",
            "accelerate-default",
            *(f"raw-eager-{size}" for size in GRID),
            "best:raw-compiled",
            "lightning-best",
            "ours",
        ),
        aims=(
            Aim("hand-tuned loop, best micro-batch", tuple(f"raw-compiled-{size}" for size in GRID), 0.98),
            Aim("Lightning with its best flags", ("lightning-best",), 1.0),
            Aim("Lightning's defaults", ("lightning-default",), 9.0),
            Aim("Accelerate's defaults", ("accelerate-default",), 9.0),
            Aim(
                "best of {8, 16, 32, 64} × {eager, compiled}",
                tuple(f"raw-{way}-{size}" for way in ("compiled", "eager") for size in GRID),
                0.97,
            ),
        ),
        limits=LIMITS_OF_LARGE_ONES,
    )


LIMITS_OF_LARGE_ONES = (
    Limit("planning, without compiling (s)", "planning_without_compiling_seconds", 60),
    Limit("planning, with compiling (s)", "planning_seconds", 180),
    Limit("probes that ran out of memory", "out_of_memory_probes", 2),
    Limit("forecast of peak memory, off by (%)", "forecast_error_percent", 5),
)


def _by_hand(work: Workload, eager: Workload, size: int, *, compiled: bool) -> Competitor:
    def measure(told: Circumstances) -> Measured:
        paced = work.warming() if told.is_warming else work if compiled else eager
        return by_hand(paced, micro_batch=size, compiled=compiled)

    how = "compiled" if compiled else "eager"
    words = "torch.compile" if compiled else "eager"
    return Competitor(
        f"raw-{how}-{size}",
        f"by hand: bf16 autocast, {words}, fused AdamW, TF32 for the rest, data on the GPU, micro-batch {size}",
        measure,
        cap_seconds=100 if compiled else 40,
        may_be_warmed=compiled,
    )


def _lightning_best(work: Workload, told: Circumstances) -> Measured:
    best = told.best_of("raw-compiled", "raw-compiled-64")
    workers = {} if told.smoke else {"num_workers": 4, "pin_memory": True, "persistent_workers": True}
    return by_tuned_lightning(work, micro_batch=int(best.rsplit("-", 1)[1]), loader=workers)
