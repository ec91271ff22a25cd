"""A user's own loop in plain PyTorch: give a step function, and the rest is written here as PyTorch's guides do it.

The rest: `DistributedDataParallel` on gloo, a `DataLoader` over the samples that the case names, `torch.save` of the
state's `state_dict()` every few steps ("Saving and Loading a General Checkpoint" of the PyTorch recipes).
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from drivetrain.core.run_folder import write_atomically
from drivetrain.proving.case import Case, Subject


@dataclass
class LoopState:
    """The state that a plain loop keeps between steps.

    Attributes:
        case: the configuration that is run.
        model: the model, inside `DistributedDataParallel` where several processes train.
        optimizer: the job's optimizer over the model.
        scheduler: the job's schedule; call its `step()` once after every optimizer step.
        step: optimizer steps done.
    """

    case: Case
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    step: int = 0

    @property
    def bare_model(self) -> nn.Module:
        """The model without its wrapper."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved: model, optimizer, schedule, step."""
        return {
            "model": self.bare_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bare_model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


Step = Callable[[LoopState, Sequence[Any]], None]
MakeState = Callable[[Case], LoopState]


def make_state(case: Case) -> LoopState:
    """Build model, optimizer and schedule of a case; with several processes, inside DistributedDataParallel."""
    model = case.model()
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer)
    wrapped = DistributedDataParallel(model) if case.world_size > 1 else model
    return LoopState(case, wrapped, optimizer, scheduler)


def tutorial_step(state: LoopState, micro_batches: Sequence[Any]) -> None:
    """Take one optimizer step the way guides on gradient accumulation write it: loss / number of micro-batches."""
    case, model = state.case, state.model
    state.optimizer.zero_grad()
    for number, batch in enumerate(micro_batches):
        is_last = number == len(micro_batches) - 1
        waits = isinstance(model, DistributedDataParallel) and not is_last
        with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
            loss = case.scalar_loss(model, batch, state.step) / len(micro_batches)
            loss.backward()  # type: ignore[no-untyped-call]
    if case.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
    state.optimizer.step()
    state.scheduler.step()


def plain_subject(
    step: Step = tutorial_step,
    make: MakeState = make_state,
    *,
    name: str = "plain loop",
    max_world: int = 2,
    resumes: bool = True,
) -> Subject:
    """Return a plain PyTorch loop as a trainer to prove.

    Args:
        step: takes one optimizer step, given the state and this process's micro-batches of it. Call
            `state.case.loss(state.model, batch)` for the job's loss, or `scalar_loss(state.model, batch, state.step)`
            for one number of a loss that is a `LossSum` or has named parts; the batches are what `collate` makes.
        make: builds the state; a subclass of `LoopState` may save and load more.
        name: what the certificate calls it.
        max_world: the most processes it is tried with.
        resumes: whether its checkpoints are tried, too.

    Example:
        >>> from drivetrain.proving.adapters.plain import plain_subject
        >>> def step(state, micro_batches):
        ...     state.optimizer.zero_grad()
        ...     for batch in micro_batches:
        ...         state.case.loss(state.model, batch).backward()
        ...     state.optimizer.step()
        >>> plain_subject(step, name="my loop", max_world=1).name
        'my loop'
    """
    run = partial(_run, step=step, make=make)
    return Subject(run, name, max_world=max_world, resumes=resumes, several_optimizers=False)


def _run(case: Case, *, step: Step, make: MakeState) -> nn.Module:
    if case.world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(case.seed)
    state = make(case)
    path = case.folder / "checkpoint.pt"
    if path.exists():
        state.load_state_dict(torch.load(path, weights_only=False))
    batches = _batches(case, state.step)
    while state.step < case.num_steps:
        step(state, list(islice(batches, _num_micro_batches(case, state.step))))
        state.step += 1
        if case.save_every and state.step % case.save_every == 0:
            if case.rank == 0:
                content = io.BytesIO()
                torch.save(state.state_dict(), content)
                write_atomically(path, content.getvalue())
            if case.world_size > 1:
                dist.barrier()
    return state.bare_model


def _num_micro_batches(case: Case, step: int) -> int:
    return sum(1 for numbers in case.micro_batches(step) if numbers)


def _batches(case: Case, first_step: int) -> Iterator[Any]:
    """Return an iterator over this process's micro-batches from a step to the end of the run."""
    chosen = [
        list(numbers) for step in range(first_step, case.num_steps) for numbers in case.micro_batches(step) if numbers
    ]
    return iter(DataLoader(case.data, batch_sampler=chosen, collate_fn=case.collate, num_workers=case.num_workers))
