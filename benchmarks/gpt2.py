"""What the trainer costs on GPT-2 124M, bf16, on a GPU: against the same loop written by hand, interleaved."""

import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Job
from drivetrain.api.training import train
from drivetrain.config import configure

ROUNDS = 5
STEPS = 60
BATCH = 8
CONTEXT = 1024
VOCABULARY = 50304


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = self.qkv(self.norm_1(hidden)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = hidden + self.down(functional.gelu(self.up(self.norm_2(hidden)), approximate="tanh"))
        return result


class Gpt2(nn.Module):
    """A GPT-2, of 124 million weights unless told otherwise."""

    def __init__(
        self,
        width: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        context: int = CONTEXT,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(self.norm(hidden), self.tokens.weight)


def draw_weights(model: nn.Module, num_blocks: int, ends: tuple[str, ...]) -> None:
    """Draw a model's matrices as GPT-2 does: normal with 0.02, and smaller where blocks add to the residual stream.

    Args:
        model: the model, whose other weights are left as they are.
        num_blocks: how many blocks it has, each of which adds twice.
        ends: parts of the names of the matrices that add.
    """
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            adds = any(part in name for part in ends)
            nn.init.normal_(weight, std=0.02 / (2 * num_blocks) ** 0.5 if adds else 0.02)


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def measure() -> dict[str, list[float]]:
    if not torch.cuda.is_available():
        raise SystemExit("gpt2 needs a GPU")
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCABULARY, (BATCH * 16, CONTEXT + 1), generator=generator)
    data = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    samples: dict[str, list[float]] = {"by hand (ms per step)": [], "drivetrain (ms per step)": []}
    by_hand(data), by_drivetrain(data)
    for _ in range(ROUNDS):
        samples["by hand (ms per step)"].append(by_hand(data) * 1e3)
        samples["drivetrain (ms per step)"].append(by_drivetrain(data) * 1e3)
    hand, ours = samples.values()
    samples["overhead (%)"] = [100 * (b / a - 1) for a, b in zip(hand, ours, strict=True)]
    return samples


def by_hand(data: TensorDataset) -> float:
    """Train with bf16 autocast, fused AdamW, pinned memory, the loss read one step late: lean, and not compiled."""
    torch.manual_seed(0)
    model = Gpt2().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = (tensor.pin_memory() for tensor in data.tensors)
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        log = os.open(Path(folder) / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        host = [torch.empty((), pin_memory=True) for _ in range(2)]
        events = [torch.cuda.Event() for _ in range(2)]
        for step in range(STEPS):
            start = step * BATCH % len(data)
            batch = [tensor[start : start + BATCH].cuda(non_blocking=True) for tensor in (inputs, targets)]
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            host[step % 2].copy_(loss.detach(), non_blocking=True)
            events[step % 2].record()
            if step:
                events[(step - 1) % 2].synchronize()
                os.write(log, (json.dumps({"step": step, "loss": float(host[(step - 1) % 2])}) + "\n").encode())
            marks.append(time.perf_counter())
        torch.cuda.synchronize()
        os.close(log)
    return _median(marks)


def by_drivetrain(data: TensorDataset) -> float:
    marks: list[float] = []

    def timed_loss(model: nn.Module, batch: Any) -> Tensor:
        marks.append(time.perf_counter())
        return loss_of(model, batch)

    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            name="gpt2",
            model=Gpt2,
            data=data,
            loss=timed_loss,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4),
            global_batch=BATCH,
            max_steps=STEPS,
            checkpoint_every=STEPS,
        )
        train(job, configure(output_dir=folder, gpu_mode="single_gpu", precision="bf16"), quiet=True)
    return _median(marks)


def _median(marks: list[float]) -> float:
    return statistics.median([b - a for a, b in pairwise(marks)][10:])
