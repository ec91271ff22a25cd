"""How long Muon trains until it has the validation loss that a tuned AdamW ends with, on a fixed text.

Both train the same GPT over bytes with `dt.train`: the sources of Python's standard library and of torch, in the order
of their names; every 20th file is held out. AdamW gets a few trials at its full length, each with another learning
rate. The best of their last validation losses is the target. Muon (`dt.muon_with_adamw`) gets as many trials, each of
`SHARE` of AdamW's steps, since its rate falls over its own length. A trial begins at the best rate so far and doubles
or halves it, or takes what is between. The seconds to the target are those of the training steps alone: the steps until
the first validation that is no worse, times the median of a step. Nothing is taken from between two validations.

A race counts only if AdamW learned something by its end: its loss stands beside that of a table of which byte follows
which. An AdamW that is no better has not begun to use its context, and any ratio against it says nothing about longer
runs.

`MUON_RACE_SIZE` is one of `SIZES`. `MUON_RACE_SECONDS` is the time for all of it: the number of steps follows from
what a few steps of each take in the beginning.
"""

import hashlib
import math
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from benchmarks.gpt2 import draw_weights
from benchmarks.rivals import rows, step_seconds
from drivetrain.core.muon import NOT_HIDDEN
from drivetrain.recipes.gpt import SmallGpt

KINDS = 256  # bytes
EVERY_FILE = 20  # is held out
TRIALS, SHARE, VALIDATIONS = 4, 0.75, 20
WARM_STEPS = 40  # the first trial of each: they compile, and show what a step takes
RUN_SECONDS = 3.0  # what a run takes besides its steps, validations included
MOST_STEPS = 2000
FIRST_RATES = {"adamw": 1.5e-3, "muon": 0.02}


@dataclass(frozen=True)
class Size:
    """The size of the model, and of a step."""

    width: int = 512
    layers: int = 10
    heads: int = 8
    length: int = 1024
    rows: int = 64
    held_out: int = 128  # windows
    most_bytes: int = 10**9

    def model(self) -> nn.Module:
        """Make the model with the weights that GPT-2 starts from: small, and smaller where blocks add up."""
        model = SmallGpt(self.width, self.layers, self.heads, KINDS, self.length)
        draw_weights(model, self.layers, ("_out.",))
        return model


SIZES = {
    "tiny": Size(16, 1, 2, 32, 8, 16, 60_000),
    "31M": Size(),
    "86M": Size(768, 12, 12),
}


@dataclass(frozen=True)
class Corpus:
    """The text, as rows of bytes, and the hash of all of it."""

    train: TensorDataset
    held_out: TensorDataset
    num_bytes: int
    digest: str
    pair_loss: float  # on what is held out, of a table of which byte follows which


@dataclass(frozen=True)
class Trial:
    """One training: its learning rate, its validation losses by step, and what a step took."""

    rate: float
    losses: dict[int, float]
    step_seconds: float

    @property
    def last(self) -> float:
        """The loss of the last validation; one that is not finite is the worst there is."""
        found = list(self.losses.values())[-1]
        return found if math.isfinite(found) else math.inf

    def seconds_until(self, loss: float) -> float | None:
        """Return the seconds of training until the first validation that is no worse; None where none is."""
        step = next((step for step, each in self.losses.items() if each <= loss), None)
        return None if step is None else step * self.step_seconds


@dataclass
class Race:
    """The trainings of both, all on one text."""

    size: Size
    corpus: Corpus
    folder: Path
    settings: dict[str, Any]
    adamw_rate: float = FIRST_RATES["adamw"]  # of what Muon does not train
    done: int = field(default=0, init=False)

    def run(self, kind: str, rate: float, num_steps: int) -> Trial:
        self.done += 1
        job = dt.Job(
            name=f"{kind}-{self.done}",
            model=self.size.model,
            data=self.corpus.train,
            valid=self.corpus.held_out,
            valid_every=max(1, num_steps // VALIDATIONS),
            loss=loss_of,
            optimizer=self._optimizer(kind, rate),
            schedule=dt.WarmupCosine(warmup_steps=num_steps // 20),
            clip_norm=1.0,
            weight_decay=0.1 if kind == "adamw" else None,
            global_batch=self.size.rows,
            max_steps=num_steps,
            checkpoint_every=10**9,
            seed=0,
        )
        result = dt.train(job, dt.configure(output_dir=str(self.folder), **self.settings), quiet=True)
        seconds = step_seconds(result.folder)
        found = Trial(
            rate,
            {int(row["step"]): float(row["valid_loss"]) for row in rows(result.folder / "metrics.jsonl")},
            statistics.median(seconds[len(seconds) // 4 :]),
        )
        took = f"{num_steps} steps of {1e3 * found.step_seconds:.2f} ms"
        print(f"  {kind}, learning rate {rate:.3g}: validation loss {found.last:.4f} after {took}", flush=True)
        return found

    def _optimizer(self, kind: str, rate: float) -> Any:
        if kind == "muon":
            others = (*NOT_HIDDEN, "bytes.*", "out.*")
            return dt.muon_with_adamw(rate, self.adamw_rate, not_hidden=others, weight_decay=0.01)
        return lambda groups: torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens = batch[0].long()
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def measure() -> dict[str, list[float]]:
    size = os.environ.get("MUON_RACE_SIZE", "31M")
    if size not in SIZES:
        raise SystemExit(f"MUON_RACE_SIZE={size}: there is {', '.join(SIZES)}")
    if not torch.cuda.is_available() and size != "tiny":
        raise SystemExit("muon-race needs a GPU; MUON_RACE_SIZE=tiny runs anywhere, and proves nothing")
    settings = {"compile": torch.cuda.is_available(), "batch_size": SIZES[size].rows, "auto_optimize": False}
    if torch.cuda.is_available():
        settings["precision"] = "bf16"
    seconds = float(os.environ.get("MUON_RACE_SECONDS", "220"))
    return race(SIZES[size], corpus_of(sources(), SIZES[size]), seconds, settings)


def race(
    size: Size,
    corpus: Corpus,
    budget_seconds: float,
    settings: dict[str, Any],
    *,
    trials: int = TRIALS,
    warm_steps: int = WARM_STEPS,
) -> dict[str, list[float]]:
    """Train all trials of both; return what is kept."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runs = Race(size, corpus, Path(folder), {**settings, "report": False, "monitor_gpu": False})
        warm = {kind: runs.run(kind, rate, warm_steps) for kind, rate in FIRST_RATES.items()}
        left = budget_seconds - (time.monotonic() - began) - 2 * trials * RUN_SECONDS
        num_steps = steps_that_fit(left / trials, warm["adamw"].step_seconds, warm["muon"].step_seconds)
        adamw = tuned(lambda rate: runs.run("adamw", rate, num_steps), FIRST_RATES["adamw"], trials)
        runs.adamw_rate = adamw[0].rate
        muon = tuned(lambda rate: runs.run("muon", rate, int(SHARE * num_steps)), FIRST_RATES["muon"], trials)
    named = {f"corpus (MB; sha256 {corpus.digest[:16]})": [corpus.num_bytes / 1e6]}
    return {**named, **figures(adamw, muon, corpus.pair_loss)}


def steps_that_fit(seconds: float, adamw: float, muon: float) -> int:
    """Return AdamW's number of steps in a trial, so that one trial of each takes so long together."""
    return max(VALIDATIONS, min(MOST_STEPS, int(seconds / (adamw + SHARE * muon))))


def tuned(run: Callable[[float], Trial], first: float, trials: int) -> list[Trial]:
    """Return some trials, the best first: at one learning rate, and then next to the best so far."""
    found = [run(first)]
    while len(found) < trials:
        best, known = found[0].rate, [trial.rate for trial in found]
        steps = (2.0, 0.5, math.sqrt(2), math.sqrt(0.5))
        rate = next((best * by for by in steps if not any(math.isclose(best * by, one) for one in known)), None)
        if rate is None:
            break
        found = sorted([*found, run(rate)], key=lambda trial: trial.last)
    return found


def figures(adamw: Sequence[Trial], muon: Sequence[Trial], pair_loss: float) -> dict[str, list[float]]:
    """Return the rows of the table, from the trials of both, the best first."""
    target, best = adamw[0].last, adamw[0]
    times = [(seconds, trial) for trial in muon if (seconds := trial.seconds_until(target)) is not None]
    told: dict[str, list[float]] = {}
    for name, trials in (("AdamW", adamw), ("Muon", muon)):
        told[f"{name}: learning rates tried"] = [trial.rate for trial in trials]
        told[f"{name}: best learning rate"] = [trials[0].rate]
        told[f"{name}: last validation losses"] = [trial.last for trial in trials if trial.last < math.inf]
        told[f"{name}: steps of a trial"] = [max(trials[0].losses)]
        told[f"{name}: step (ms)"] = [1e3 * trial.step_seconds for trial in trials]
    told["AdamW: best last validation loss"] = [target]
    told["loss of a table of byte pairs"] = [pair_loss]
    told["AdamW: its loss is below 0.75 of that table's (1: the race counts)"] = [float(target < 0.75 * pair_loss)]
    whole = best.seconds_until(target)
    assert whole is not None, "it is its own"
    told["AdamW: seconds of training to that loss"] = [whole]
    if times:
        seconds, trial = min(times, key=lambda each: each[0])
        told["Muon: seconds of training to that loss"] = [seconds]
        told["Muon: its learning rate there"] = [trial.rate]
        told["Muon / AdamW: seconds to the loss (goal: at most 0.8)"] = [seconds / whole]
        told["Muon / AdamW: steps to the loss"] = [seconds / trial.step_seconds / max(best.losses)]
    told["Muon: trials that reached the loss"] = [len(times)]
    return told


def sources() -> list[Path]:
    """Return the files of the text: Python's standard library and torch, as they are installed, by name."""
    standard, installed = Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent
    found = [path for path in standard.rglob("*.py") if "site-packages" not in path.parts]
    return [*sorted(found), *sorted(installed.rglob("*.py"))]


def corpus_of(files: Sequence[Path], size: Size) -> Corpus:
    """Return the text of some files; every 20th is held out."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    read = 0
    for number, path in enumerate(files):
        if read >= size.most_bytes:
            break
        content = path.read_bytes()
        read += len(content)
        parts[number % EVERY_FILE == 0].append(content)
    train, held_out = (b"".join(part) for part in parts)
    rows_of_both = [_rows(text, size.length + 1) for text in (train, held_out)]
    kept = _spread(rows_of_both[1], size.held_out)
    return Corpus(
        TensorDataset(rows_of_both[0]),
        TensorDataset(kept),
        len(train) + len(held_out),
        hashlib.sha256(train + held_out).hexdigest(),
        pair_loss(rows_of_both[0], kept),
    )


def pair_loss(train: Tensor, held_out: Tensor) -> float:
    """Return the loss of a table of which byte follows which, counted in one text, on another, in nats per byte."""

    def pairs(of: Tensor) -> Tensor:
        return (of[:, :-1].long() * KINDS + of[:, 1:].long()).flatten()

    counts = torch.bincount(pairs(train), minlength=KINDS**2).view(KINDS, KINDS).double() + 0.1  # no pair is impossible
    return float(-(counts / counts.sum(1, keepdim=True)).log().flatten()[pairs(held_out)].mean())


def _rows(text: bytes, length: int) -> Tensor:
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return whole[: len(whole) // length * length].view(-1, length)


def _spread(found: Tensor, number: int) -> Tensor:
    """Return so many rows from all over the text, in the same distance."""
    chosen = torch.linspace(0, len(found) - 1, min(number, len(found))).long()
    return found[chosen]
