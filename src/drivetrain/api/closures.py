"""Steps of a driven loop with a closure: LBFGS, SAM and other optimizers that compute the loss several times.

Each evaluation is over all batches of the step, with the strategy's own reduction, weighting and clipping.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.api.driven_run import DrivenRun
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.logged import collecting
from drivetrain.core.metrics import LossSum, NamedLosses
from drivetrain.core.optimizers import JointOptimizer, closure_error, needs_closure, wants_gradients_first
from drivetrain.core.records import StepOutcome
from drivetrain.core.widths import widened
from drivetrain.data.batch import MicroBatch
from drivetrain.loop.trainer import Begun
from drivetrain.run import Session
from drivetrain.strategies.base import check_objective

Closure = Callable[[Any], Tensor | LossSum | NamedLosses]  # of a batch; returns its loss


def step_with(
    closure: Closure,
    driven: DrivenRun,
    session: Session,
    begun: Begun,
    kept: Sequence[MicroBatch],
    inside: Callable[[MicroBatch], AbstractContextManager[None]],
) -> StepOutcome:
    """Have the optimizer step with a closure over all batches of a step. The record is that of the first call.

    Args:
        closure: Returns the loss of a batch.
        driven: The run.
        session: The same, with its settings.
        begun: The step.
        kept: Its batches.
        inside: Returns the context of a batch's forward.
    """
    outcomes: list[StepOutcome] = []
    parts, strategy = driven.parts.given, driven.parts.strategy
    optimizer = parts.optimizer

    def learn(micro: MicroBatch) -> None:
        batch = driven.stepper.begin(begun.place, micro)  # with the batch's own random draws
        with collecting() as logged, inside(micro):
            loss = closure(batch)
        if isinstance(loss, Tensor | LossSum):
            check_objective(loss.total if isinstance(loss, LossSum) else loss, parts.model)
        if logged and micro.weight:
            session.step_log.add(logged, micro.num_samples)
        driven.stepper.learn(loss, begun.place, micro)

    def evaluate() -> Tensor:
        gradients: list[Tensor | None] = []
        for parameter in parts.trained:
            parameter.grad = None
        for micro in kept:
            learn(micro)
        parts.evaluation.keep = lambda: gradients.extend(
            parameter.grad if parameter.grad is None else parameter.grad.clone() for parameter in parts.trained
        )
        try:
            outcomes.append(strategy.step(driven.trainer.flags))
        finally:
            parts.evaluation.keep = None
        for parameter, gradient in zip(parts.trained, gradients, strict=True):
            parameter.grad = gradient
        return _loss_of(outcomes[-1], begun.place.step)

    if wants_gradients_first(optimizer):
        evaluate()
    step: Callable[..., Any] = optimizer.step
    step(evaluate)
    for parameter in parts.trained:
        parameter.grad = None
    parts.follow()
    if not outcomes:
        raise DrivetrainError(
            f"{type(optimizer).__name__} did not call the closure that it was given",
            remedy="call run.backward(loss) and run.step()",
        )
    return outcomes[0]._replace(stop=sum(outcome.stop for outcome in outcomes))


def check_closure(session: Session, optimizer: Optimizer, closure: Closure | None, *, is_learned: bool) -> None:
    """Raise where `run.step` got a closure that cannot be used, or lacks one. `is_learned`: after `run.backward`."""
    if closure is None and needs_closure(optimizer):
        raise closure_error(optimizer)
    if closure is None and not is_learned:
        raise DrivetrainError("run.step() was called before run.backward()", remedy="call run.backward(loss) first")
    if closure is None:
        return
    if is_learned:
        raise DrivetrainError(
            "run.step(closure) was called after run.backward(), and the closure computes the loss itself",
            remedy="leave run.backward(loss) out",
        )
    if isinstance(optimizer, JointOptimizer):
        raise DrivetrainError(
            "run.step(closure) is for one optimizer, and the run has several",
            remedy="call run.backward(loss) and run.step() for each batch",
        )
    refuse_closure(session)


def refuse_closure(session: Session) -> None:
    """Raise where an optimizer that asks for the loss several times would not get whole gradients as they are."""
    if session.precision.scales_loss or session.holds_parts:
        what = "fp16 scales the loss" if session.precision.scales_loss else "each process has a part of the model"
        raise DrivetrainError(
            f"run.step(closure) needs the gradients of all weights as they are, and {what}",
            remedy="use --precision bf16 or fp32, with --parallel-strategy ddp or on one device",
        )


def _loss_of(outcome: StepOutcome, step: int) -> Tensor:
    """Return the loss over the whole global batch, all ranks; nan where nothing was counted."""
    count = torch.as_tensor(outcome.num_items, dtype=torch.float64)
    if outcome.named is not None:
        mean, _ = outcome.named.reader.read(outcome.named.values.tolist(), step, float(count))  # the host waits
        return torch.tensor(mean, dtype=torch.float64)
    total = sum((widened(value) * factor for value, factor in outcome.losses), torch.zeros(()))
    return total / count.to(total)
