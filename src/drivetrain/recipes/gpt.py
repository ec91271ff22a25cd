"""A small GPT that learns to write like a text file, byte by byte."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drivetrain.api import Result
from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.loss import LossSum
from drivetrain.job import Job, WarmupCosine

CONTEXT = 128
VOCABULARY = 256  # bytes
LEAST_HELD_OUT = 4 * CONTEXT


def job(config: Config) -> Job:
    text, held_out = _split(_read(config.data.path))
    rate = config.optimizer.learning_rate or 1e-3
    return Job(
        name="gpt",
        model=SmallGpt,
        data=Windows(text),
        valid=Windows(held_out) if held_out else None,
        loss=next_byte_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95)),
        global_batch=None if config.batch_asked.is_set else min(32, len(Windows(text))),
        default_batch=min(32, len(Windows(text))),
        epochs=config.budget.epochs or 1,
        max_steps=config.budget.max_steps,
        seed=config.run.seed,
        schedule=WarmupCosine(warmup_steps=20, floor=0.1),
        clip_norm=1.0,
        weight_decay=0.1,
    )


def _split(text: bytes) -> tuple[bytes, bytes]:
    """What is learnt from, and the last twentieth to try it on; nothing of a text that is too short to spare it."""
    num_held_out = len(text) // 20
    return (text[:-num_held_out], text[-num_held_out:]) if num_held_out >= LEAST_HELD_OUT else (text, b"")


def _read(path: Path | None) -> bytes:
    if path is None:
        raise ConfigError([Problem("--data", "this recipe learns from a text file", remedy="--data book.txt")])
    try:
        text = path.read_bytes()
    except OSError as error:
        problem = Problem("--data", f"{path}: {error.strerror}", str(path), remedy="give the path of a text file")
        raise ConfigError([problem]) from None
    if len(text) < 2:
        raise ConfigError([Problem("--data", f"{path} holds no text", str(path), remedy="give a longer file")])
    return text


class Windows(Dataset[Any]):
    """The text in pieces of CONTEXT bytes, each with the byte that follows. The last may be shorter: padding does
    not count in the loss."""

    def __init__(self, text: bytes) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return -(-(len(self._text) - 1) // CONTEXT)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self._text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        inputs, targets = torch.zeros(CONTEXT, dtype=torch.long), torch.full((CONTEXT,), -1)
        inputs[: len(piece) - 1], targets[: len(piece) - 1] = piece[:-1], piece[1:]
        return inputs, targets


def next_byte_loss(model: nn.Module, batch: list[Tensor]) -> LossSum:
    """Summed over bytes and counted in bytes, so that short pieces weigh what they hold."""
    inputs, targets = batch
    logits = model(inputs)
    total = functional.cross_entropy(
        logits.view(-1, VOCABULARY).float(), targets.view(-1), ignore_index=-1, reduction="sum"
    )
    return LossSum(total, (targets >= 0).sum())


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = self.attention_in(self.before_attention(hidden)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = hidden + self.mlp_out(functional.gelu(self.mlp_in(self.before_mlp(hidden))))
        return added


class SmallGpt(nn.Module):
    def __init__(self, width: int = 128, num_layers: int = 4, num_heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.last_norm, self.out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.bytes(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.out(self.last_norm(hidden))
        return logits


def show(result: Result) -> None:
    if result.last is not None:
        print(f"\nLoss of the last step: {result.last.loss:.3f} nats per byte (a blind guess has 5.545).")
    if "valid_loss" in result.metrics:
        print(f"Loss on the last twentieth of the text, which it did not see: {result.metrics['valid_loss']:.3f}.")
    print(f"Results are in {result.folder}; `dt.export` makes a plain safetensors file of the weights.")
