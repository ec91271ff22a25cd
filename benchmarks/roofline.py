"""Where the time of a step of GPT-2 124M goes, and how long each kind of kernel would take at the device's peak.

A run of ours, compiled, bf16, 64 sequences of 1,024 tokens, is profiled for a few steps. What a kind of kernel has to
do is counted: multiplications of matrix products and of attention from the model's shape, bytes of compiled kernels by
the compiler, those of the optimizer from the number of weights. The peaks are what this device reaches on a large
product and on a large copy, measured beside it.
"""

import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch._inductor import metrics
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpt2
from benchmarks.plan_gpt2 import workload
from benchmarks.rivals import job_of, step_seconds
from drivetrain import Verdict, configure, train

FIRST, STEPS, LAST = 20, 4, 40  # the first that is profiled, how many are, and the last that is run
WIDTH, DEPTH = 768, 12
BYTES_PER_WEIGHT = 28  # AdamW reads a weight, its gradient and two moments, and writes all but the gradient
KINDS = {  # by parts of a kernel's name; the first that fits counts
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "attention": ("flash", "fmha", "sdpa"),
    "optimizer": ("multi_tensor_apply", "adam"),
    "compiled kernels": ("triton",),
}
REST = "everything else"


class Profiled:
    """Profiles some steps in the middle of a run."""

    every = 1

    def __init__(self) -> None:
        self._profile: Any = None
        self.seconds: dict[str, float] = {}  # of a step, by kind of kernel

    def __call__(self, context: Any) -> Verdict:
        if context.step == FIRST:
            torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
        elif context.step == FIRST + STEPS:
            torch.cuda.synchronize()
            self._profile.stop()
            for event in self._profile.events():
                if event.device_type != DeviceType.CUDA or event.is_user_annotation:
                    continue  # a launch, or a span around kernels
                kind = kind_of(event.name)
                self.seconds[kind] = self.seconds.get(kind, 0.0) + event.device_time_total / 1e6 / STEPS
        return Verdict(stop=context.step >= LAST)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), REST)


def measure() -> dict[str, list[float]]:
    if not torch.cuda.is_available():
        raise SystemExit("roofline needs a GPU")
    work, hook = workload(smoke=False), Profiled()
    job = job_of(work, max_steps=work.job_steps)
    job.hooks.append(hook)
    metrics.reset()
    torch._logging.set_logs(inductor_metrics=True)  # else it does not count
    with tempfile.TemporaryDirectory() as folder, torch._inductor.config.patch(force_disable_caches=True):
        settings: dict[str, Any] = {"auto_optimize": False, "compile": True, "compile_scope": "loss", "report": False}
        settings |= {"precision": "bf16", "resident": "on", "capture": "off", "batch_size": work.global_batch}
        done = train(job, configure(output_dir=folder, **settings))
        steps = sorted(step_seconds(done.folder)[FIRST + STEPS + 2 :])
    step = steps[len(steps) // 2]
    flops, copied = peaks()
    least = least_seconds(work.global_batch * gpt2.CONTEXT, flops, copied)
    found = {
        "peak, product of 8192 x 8192 (TFLOP/s)": [flops / 1e12],
        "peak, copy on the device (TB/s)": [copied / 1e12],
        "a step (ms)": [1e3 * each for each in steps],
        "thousand tokens/s": [work.global_batch * gpt2.CONTEXT / step / 1e3],
    }
    for kind in (*KINDS, REST):
        seconds = hook.seconds.get(kind, 0.0)
        found[f"{kind} (ms)"] = [1e3 * seconds]
        found[f"{kind}, of the step (%)"] = [100 * seconds / step]
        if kind in least:
            found[f"{kind}, at the peak (ms)"] = [1e3 * least[kind]]
            found[f"{kind}, of the peak (%)"] = [100 * least[kind] / seconds]
    idle = step - sum(hook.seconds.values())
    found["between kernels (ms)"] = [1e3 * idle]
    found["a step at the peak (ms)"] = [1e3 * sum(least.values())]
    found["a step, of the peak (%)"] = [100 * sum(least.values()) / step]
    return found


def least_seconds(tokens: int, flops: float, copied: float) -> dict[str, float]:
    """Return how long a step takes for each kind of kernel where it runs at the peak."""
    model = gpt2.Gpt2()
    weights = sum(parameter.numel() for parameter in model.parameters())
    in_products = weights - model.positions.weight.numel()  # tokens are embedded without, but end in a product
    pairs = tokens * gpt2.CONTEXT / 2  # of a token and one before it
    attention = DEPTH * pairs * WIDTH * 2 * (2 + 5)  # two products forward, five backward
    compiled = sum(
        4 * number for node, number in metrics.nodes_num_elem if not isinstance(node, ExternKernelSchedulerNode)
    )
    return {
        "matrix products": 6 * in_products * tokens / flops,
        "attention": attention / flops,
        "optimizer": BYTES_PER_WEIGHT * weights / copied,
        "compiled kernels": compiled / copied,
    }


def peaks() -> tuple[float, float]:
    """Return operations a second of a large product in bf16, and bytes a second of a large copy, read and written."""
    one, two = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    product = best_seconds(lambda: torch.mm(one, two))
    copy = best_seconds(lambda: target.copy_(source))
    return 2 * 8192**3 / product, 2 * source.numel() / copy


def best_seconds(work: Any) -> float:
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 5)
    return min(times)
