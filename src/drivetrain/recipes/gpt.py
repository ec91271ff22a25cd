"""A GPT that learns to write like a text file: byte by byte, or by the tokens of a BPE file."""

import statistics
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drivetrain.api.training import Result
from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.metrics import LossSum
from drivetrain.core.run_folder import read_rows, read_yaml
from drivetrain.core.schedules import WarmupCosine
from drivetrain.job import Job
from drivetrain.recipes.recipe import Recipe

CONTEXT = 128
VOCABULARY = 256  # bytes
LEAST_HELD_OUT = 4  # windows


@dataclass(frozen=True)
class GptSize:
    """The size of the model, and of what a step sees."""

    context: int
    width: int
    num_layers: int
    num_heads: int
    batch: int
    rate: float


# The full one has the layers of GPT-2's smallest: 86 million weights with bytes, 163 with GPT-2's vocabulary (its
# output layer has weights of its own).
SIZES = {"small": GptSize(CONTEXT, 128, 3, 4, 16, 2e-3), "full": GptSize(1024, 768, 12, 12, 64, 6e-4)}


def job(config: Config) -> Job:
    size = SIZES[config.recipe.size]
    tokens, vocabulary = _tokens(_read(config.data.path), config.recipe.tokenizer)
    text, held_out = _split(tokens, size.context)
    windows = Windows(text, size.context)
    rate = config.optimizer.learning_rate or size.rate
    batch = min(size.batch, len(windows))
    return Job(
        name="gpt",
        model=lambda: SmallGpt(size.width, size.num_layers, size.num_heads, vocabulary, size.context),
        data=windows,
        valid=Windows(held_out, size.context) if len(held_out) else None,
        loss=next_token_loss,
        items="bytes" if config.recipe.tokenizer is None else "tokens",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95)),
        global_batch=None if config.batch_asked.is_set else batch,
        default_batch=batch,
        epochs=config.budget.epochs or (None if config.budget.max_steps else 1),
        max_steps=config.budget.max_steps,
        seed=config.run.seed,
        schedule=WarmupCosine(warmup_steps=20, floor=0.1),
        clip_norm=1.0,
        weight_decay=0.1,
    )


def _split(tokens: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return the training tokens and the last twentieth, held out; nothing of a text that is too short to spare it."""
    num_held_out = len(tokens) // 20
    cut = len(tokens) - (num_held_out if num_held_out >= LEAST_HELD_OUT * context else 0)
    return tokens[:cut], tokens[cut:]


def _tokens(text: bytes, tokenizer: Path | None) -> tuple[Tensor, int]:
    """Return the text as numbers, and how many there may be: bytes, or the tokens of a `tokenizer.json`."""
    if tokenizer is None:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8), VOCABULARY
    if find_spec("tokenizers") is None:
        problem = Problem("--tokenizer", "reading it takes the package tokenizers", remedy="pip install tokenizers")
        raise ConfigError([problem])
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(str(tokenizer))
        numbers = found.encode(text.decode("utf-8", errors="replace")).ids
    except Exception as error:  # noqa: BLE001  (the package raises nothing narrower)
        remedy = "give the tokenizer.json of a byte-pair encoding"
        raise ConfigError([Problem("--tokenizer", f"{tokenizer}: {error}", str(tokenizer), remedy=remedy)]) from None
    if len(numbers) < 2:
        raise ConfigError([Problem("--data", "the text is a single token", remedy="give a longer file")])
    vocabulary = -(-found.get_vocab_size() // 64) * 64  # a multiple of 64: matrix products are faster
    return torch.tensor(numbers, dtype=torch.int32), vocabulary


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
    """The text in pieces of `context` tokens, each with the token that follows. The last may be shorter: padding does
    not count in the loss."""

    def __init__(self, text: bytes | Tensor, context: int = CONTEXT) -> None:
        self._text = text if isinstance(text, Tensor) else torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return -(-(len(self._text) - 1) // self._context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self._text[index * self._context : (index + 1) * self._context + 1].long()
        inputs, targets = torch.zeros(self._context, dtype=torch.long), torch.full((self._context,), -1)
        inputs[: len(piece) - 1], targets[: len(piece) - 1] = piece[:-1], piece[1:]
        return inputs, targets


def next_token_loss(model: nn.Module, batch: list[Tensor]) -> LossSum:
    """Sum over tokens and count them, so that short pieces weigh what they hold."""
    inputs, targets = batch
    logits = model(inputs)
    total = functional.cross_entropy(
        logits.view(-1, logits.shape[-1]).float(), targets.view(-1), ignore_index=-1, reduction="sum"
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
    def __init__(
        self,
        width: int = 128,
        num_layers: int = 3,
        num_heads: int = 4,
        vocabulary: int = VOCABULARY,
        context: int = CONTEXT,
    ) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.last_norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.bytes(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.out(self.last_norm(hidden))
        return logits


def show(result: Result) -> None:
    rows, _ = read_rows(result.folder / "speed.jsonl")
    rates = [row["items_per_second"] for row in rows if "items_per_second" in row]
    items = str(read_yaml(result.folder / "plan.yaml").get("items", "tokens"))
    if result.last is not None:
        print(f"\nLoss of the last step: {result.last.loss:.3f} nats per {items.rstrip('s')}.")
    if rates:
        shares = [row["mfu"] for row in rows if row.get("mfu") is not None]
        mfu = f", MFU {statistics.median(shares):.1%}" if shares else ""
        print(f"Speed: {statistics.median(rates):,.0f} {items}/s (median){mfu}.")
    if "valid_loss" in result.metrics:
        print(f"Loss on the last twentieth of the text, which it did not see: {result.metrics['valid_loss']:.3f}.")
    print(f"Results are in {result.folder}; `dt.export` makes a plain safetensors file of the weights.")


RECIPE = Recipe(
    make=job,
    about="a small language model on a text file (--data FILE)",
    show=show,
    reads=(
        "data.path",
        "recipe.size",
        "recipe.tokenizer",
    ),
)
