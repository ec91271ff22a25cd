"""What FP8 gains over bf16 on transformers, and how far it moves the loss: GPT-2 124M, and a GPT of 1.4 B weights.

Each precision trains the same job, compiled, on text that can be learned: the source of torch, two bytes a token.
`FP8_STEPS` says how many steps (the first 20 are not timed), `FP8_SIZES` which models, `FP8_PRECISIONS` what besides
bf16. Weights are drawn as GPT-2's were, gradients are clipped, and the rate warms up: the loss begins near the
logarithm of the vocabulary, so that a deviation means something. A run that is stopped counts for the steps it did.
"""

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.gpt2 import CONTEXT, VOCABULARY, Gpt2, draw_weights, loss_of
from benchmarks.rivals import rows, step_seconds
from drivetrain import Job, WarmupCosine, configure, train

STEPS, WARM_STEPS, LAST = int(os.environ.get("FP8_STEPS", "120")), 20, 50
PRECISIONS = ("bf16", *os.environ.get("FP8_PRECISIONS", "fp8,fp8-tensor").split(","))
# Width, depth, heads, and samples of a step.
SIZES = {"124M": (768, 12, 12, 64), "1.4B": (2048, 26, 16, 16)}


def measure() -> dict[str, list[float]]:
    if not torch.cuda.is_available():
        raise SystemExit("fp8 needs a GPU")
    data, found = text(), dict[str, list[float]]()
    for size in os.environ.get("FP8_SIZES", ",".join(SIZES)).split(","):
        for precision in PRECISIONS:
            seconds, losses = one(size, precision, data)
            batch = SIZES[size][3]
            found[f"{size}, {precision}: thousand tokens/s"] = [batch * CONTEXT / each / 1e3 for each in seconds]
            found[f"{size}, {precision}: losses"] = losses
            step = 1e3 * statistics.median(seconds)
            print(f"{size}, {precision}: {step:.1f} ms a step, loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
        trained = {precision: found.pop(f"{size}, {precision}: losses") for precision in PRECISIONS}
        num_steps = min(map(len, trained.values()))  # of which all have the losses, where one was stopped
        bf16 = found[f"{size}, bf16: thousand tokens/s"]
        for precision, losses in trained.items():
            found[f"{size}, {precision}: steps"] = [float(len(losses))]
            found[f"{size}, {precision}: loss of the last steps that all have"] = losses[num_steps - LAST : num_steps]
            if precision == "bf16":
                continue
            ours = found[f"{size}, {precision}: thousand tokens/s"]
            found[f"{size}, {precision} / bf16: speed"] = [statistics.median(ours) / statistics.median(bf16)]
            pairs = list(zip(losses, trained["bf16"], strict=False))[num_steps - LAST : num_steps]
            found[f"{size}, {precision} / bf16: loss, step by step (%)"] = [
                100 * (ours / bf16 - 1) for ours, bf16 in pairs
            ]
    return found


def text() -> TensorDataset:
    """Return windows of torch's own source, two bytes a token."""
    content, wanted = b"", 2 * 4096 * (CONTEXT + 1)
    for path in sorted(Path(torch.__file__).parent.rglob("*.py")):
        content += path.read_bytes()
        if len(content) > wanted:
            break
    pairs = torch.frombuffer(bytearray(content[: len(content) // 2 * 2]), dtype=torch.int16).long() % VOCABULARY
    windows = pairs[: len(pairs) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    return TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def drawn(width: int, depth: int, heads: int) -> Gpt2:
    """Return the model with the weights that GPT-2 starts from, and biases of 0."""
    model = Gpt2(width, depth, heads)
    draw_weights(model, depth, ("projection.weight", "down.weight"))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def one(size: str, precision: str, data: TensorDataset) -> tuple[list[float], list[float]]:
    """Return the seconds of the timed steps, and the losses of all."""
    width, depth, heads, batch = SIZES[size]
    job = Job(
        name="fp8",
        model=lambda: drawn(width, depth, heads),
        data=data,
        loss=loss_of,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=2e-4, fused=True),
        global_batch=batch,
        max_steps=STEPS,
        seed=0,
        clip_norm=1.0,
        schedule=WarmupCosine(warmup_steps=WARM_STEPS),
    )
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"compile": True, "compile_scope": "both", "batch_size": batch}
        settings |= {"auto_optimize": False, "report": False}
        done = train(job, configure(output_dir=folder, precision=precision, checkpoint_every=10**6, **settings))
        losses = [float(row["loss"]) for row in rows(done.folder / "steps.jsonl")]
        return step_seconds(done.folder)[WARM_STEPS:], losses
