"""One training through `drivetrain.train`, described as scripts for several GPUs do it: loaders, rates, patience."""

import asyncio
import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.api.training import Result, train
from drivetrain.config import Config, configure
from drivetrain.core.aims import EarlyStopping
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.log import notice
from drivetrain.core.processes import request_stop
from drivetrain.core.schedules import WarmupCosine
from drivetrain.core.world import World
from drivetrain.data.source import Source, source_of
from drivetrain.job import Job
from drivetrain.report import RunData
from drivetrain.run.session import given_on_command_line
from drivetrain.strategies.layers import repeated_blocks

MOST_WARMUP_STEPS, WARMUP_SHARE = 1000, 0.1


@dataclass(frozen=True)
class TrainingSpec:
    """The model to train, and how long; each field is documented where users set it (`OptimizedTrainingOptimizer`)."""

    model: nn.Module
    train_loader: Any
    val_loader: Any = None
    experiment_name: str = "multi_gpu"
    max_epochs: int = 100
    learning_rate: float = 1e-3
    weight_decay: float = 1e-5
    gradient_clip: float | None = 1.0
    early_stopping_patience: int | None = None
    early_stopping_min_delta: float = 1e-4
    batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    enable_mixed_precision: bool | None = None
    enable_gradient_checkpointing: bool = False
    loss: Callable[[nn.Module, Any], Any] | None = None
    criterion: Callable[[Any, Tensor], Tensor] | None = None
    metrics: Mapping[str, Any] | None = None
    seed: int = 0
    output_dir: str | Path = "runs"
    quiet: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def source(self) -> Source:
        if self.train_loader is None:
            raise DrivetrainError(
                "there is no data to train on",
                remedy="call setup_dataloader(dataset, batch_size=64) first, or give train_loader=DataLoader(...)",
            )
        return source_of(self.train_loader)

    def job(self, world_size: int) -> Job:
        """Return the job. A loader's batch size is per process, as with DistributedSampler, so a step has more.

        Args:
            world_size: how many processes train together.
        """
        source, batch = self.source, self.batch_size or self.source.global_batch
        is_free = source.batch_sampler is None and batch is not None
        global_batch = (batch or 0) * self.gradient_accumulation_steps * world_size if is_free else None
        if is_free and source.is_keyed:
            global_batch = min(global_batch or 1, len(source.dataset))
        steps = source.steps_per_epoch(global_batch or 1)
        warmup = 0 if steps is None else min(MOST_WARMUP_STEPS, int(WARMUP_SHARE * steps * self.max_epochs))
        stopping = None
        if self.early_stopping_patience is not None and self.val_loader is not None:
            stopping = EarlyStopping(self.early_stopping_patience, self.early_stopping_min_delta)
        return Job(
            name=self.experiment_name,
            model=self.model,
            data=self.train_loader,
            valid=self.val_loader,
            loss=self.loss or _supervised(self.criterion),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=self.learning_rate),
            global_batch=global_batch,
            epochs=self.max_epochs,
            seed=self.seed,
            schedule=WarmupCosine(warmup_steps=warmup),
            clip_norm=self.gradient_clip,
            weight_decay=self.weight_decay,
            metrics=self._metrics(),
            early_stopping=stopping,
        )

    def config(self, **values: Any) -> Config:
        """Return the configuration of the run; what the command line says goes before it.

        Args:
            values: settings by any of their names, besides those that follow from this.
        """
        if self.enable_mixed_precision is not None:
            values["mixed_precision"] = self.enable_mixed_precision
        if self.gradient_accumulation_steps > 1:
            values["accumulation_steps"] = self.gradient_accumulation_steps
        if self.enable_gradient_checkpointing and repeated_blocks(self.model):
            values["activations"] = "recompute"
        values |= {"output_dir": self.output_dir, "quiet": self.quiet, **self.settings}
        own, base, default = configure(**values), given_on_command_line(), Config()
        sections = {
            name: {
                field: value
                for field, value in getattr(base, name).model_dump().items()
                if value != getattr(getattr(default, name), field)
            }
            for name in (Config.model_fields if base is not None else ())
        }
        changed = {name: getattr(own, name).model_copy(update=fields) for name, fields in sections.items() if fields}
        return own.model_copy(update=changed)

    def notes(self) -> list[str]:
        """Return what of this is not done as asked for, a line each."""
        found = []
        if self.early_stopping_patience is not None and self.val_loader is None:
            found.append("early_stopping_patience needs val_loader, and there is none: all epochs are trained")
        if self.enable_gradient_checkpointing and not repeated_blocks(self.model):
            found.append("enable_gradient_checkpointing: the model has no repeated blocks to recompute; none is")
        return found

    def _metrics(self) -> Mapping[str, Any]:
        if self.val_loader is None or self.metrics is not None:
            return {} if self.val_loader is None else self.metrics or {}
        return {"accuracy": _accuracy} if self.loss is None and _has_classes(self.source) else {}


def _supervised(criterion: Callable[[Any, Tensor], Tensor] | None) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise DrivetrainError(
                f"a batch is {type(batch).__name__}, and without a loss function it has to be (inputs, targets)",
                remedy="give loss=lambda model, batch: ...",
            )
        inputs, targets = batch
        if criterion is not None:
            return criterion(model(inputs), targets)
        if targets.is_floating_point():
            return functional.mse_loss(model(inputs), targets)
        return functional.cross_entropy(model(inputs), targets)

    return loss


def _accuracy(output: Tensor, batch: Any) -> Tensor:
    return output.argmax(1).eq(batch[1])


def _has_classes(source: Source) -> bool:
    """Return whether targets are numbers of classes, as far as the first sample tells."""
    if source.is_iterable or not len(source.dataset):
        return False
    item = source.dataset[0]
    if not isinstance(item, (list, tuple)) or len(item) != 2:
        return False
    target = torch.as_tensor(item[1])
    return target.dim() == 0 and not target.is_floating_point()


@dataclass(frozen=True)
class TrainingOutcome:
    """The outcome of a training, on every rank alike."""

    result: Result
    figures: dict[str, Any]  # the results without those of devices
    rows: list[dict[str, Any]]  # what the devices did, of gpu.jsonl


async def run_beside(job: Job, config: Config, world: World, notes: list[str], *, quiet: bool) -> TrainingOutcome:
    """Train in a separate thread, so that the event loop goes on. Cancelled, it saves a checkpoint and ends.

    Args:
        job: what to train.
        config: how.
        world: the processes that take part, joined by the caller.
        notes: lines to print first, on the main process.
        quiet: prints nothing.
    """
    for note in notes if world.is_main and not quiet else ():
        notice(note)
    context = contextvars.copy_context()  # holds what the command line says
    task = asyncio.get_running_loop().run_in_executor(None, context.run, _run, job, config, world)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():  # it may be planning still, and hear of it only later
            request_stop()
            await asyncio.wait([task], timeout=0.1)
        raise


def _run(job: Job, config: Config, world: World) -> TrainingOutcome:
    result = train(job, config)
    read = world.agree(_figures(result) if world.is_main else None)
    return TrainingOutcome(result, read["figures"], read["rows"])


def _figures(result: Result) -> dict[str, Any]:
    data = RunData.read(result.folder)
    validations = {row["epoch"]: row for row in data.metrics}
    rates = {row["epoch"]: row["lr"] for row in data.steps}
    history = [
        {
            "epoch": epoch.number,
            "loss": epoch.loss,
            "learning_rate": rates[epoch.number - 1],
            "epoch_duration": epoch.seconds,
            "validation_loss": validations.get(epoch.number - 1, {}).get("valid_loss"),
            "validation_accuracy": validations.get(epoch.number - 1, {}).get("valid_accuracy"),
        }
        for epoch in data.epochs
    ]
    judged = "loss" if not validations else "validation_loss"
    known = [row for row in history if row[judged] is not None]
    best = min(known, key=lambda row: row[judged], default=None)
    seconds = sum(row["seconds"] for row in data.steps)
    because = str(data.event("finish", "stop").get("because") or "")
    return {
        "figures": {
            "total_epochs": len(history),
            "best_epoch": best["epoch"] if best else None,
            "best_metric": best[judged] if best else None,
            "final_training_loss": history[-1]["loss"] if history else None,
            "final_validation_loss": known[-1]["validation_loss"] if known and validations else None,
            "early_stopping_triggered": bool(because),
            "finished": result.finished,
            "resumed_from": result.resumed_from,
            "history": history,
            "folder": str(result.folder),
            "performance_summary": {
                "throughput": sum(row["samples"] for row in data.steps) / seconds if seconds else None,
                "memory_efficiency": _memory_efficiency(data.devices),
                "training_time": seconds,
                "num_steps": len(data.steps),
                "step_time": seconds / len(data.steps) if data.steps else None,
                "phases": data.phases,
            },
        },
        "rows": data.devices,
    }


def _memory_efficiency(rows: list[dict[str, Any]]) -> float | None:
    """Return how much of the memory that torch held on a GPU tensors needed at the peak; None without one."""
    peak = max((row["memory_peak_gib"] for row in rows if "memory_peak_gib" in row), default=0.0)
    reserved = max((row["memory_peak_reserved_gib"] for row in rows if "memory_peak_reserved_gib" in row), default=0.0)
    return peak / reserved if reserved else None
