"""The seven verbs of a strategy, and the parts that strategies share.

The objective is a module whose forward is the user's whole loss function: what wraps it (DDP, a compiler) sees one
forward with one output, while the user's function gets the plain model.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError, nothing_trains, returned
from drivetrain.core.hook import StepSettlement, settlement_of
from drivetrain.core.isolation import buffers_kept, is_out_of_memory, model_kept, uncounted
from drivetrain.core.metrics import SKIPPED_IF_BAD, Logged, LossSum, NamedLosses, StepOutcome, UndividedLoss
from drivetrain.core.optimizers import JointOptimizer, closure_error
from drivetrain.core.precision import FP32_ON_CPU, Precision, widened
from drivetrain.core.state import Shard, TensorSource, is_distributed
from drivetrain.data.batch import described, leaves
from drivetrain.strategies.layers import offload
from drivetrain.strategies.loss_parts import LossParts, StepLog
from drivetrain.strategies.optimizer_state import Average, plain_attributes, plain_settings

LossFunction = Callable[[Any, Any], Tensor | LossSum | UndividedLoss | NamedLosses]
ObjectiveCall = Callable[[Any, int, int, int], Tensor]


class NormDue:
    """Holds whether the current step computes the gradient norm, where nothing is clipped by it."""

    __slots__ = ("is_apart", "is_due")

    def __init__(self) -> None:
        self.is_due = False
        self.is_apart = False  # captured steps are without it, so this one is not replayed


class Clip(NamedTuple):
    """Parameters whose gradient is clipped by itself, and the norm it is clipped to; None: it is only measured."""

    parameters: Sequence[Tensor]
    most: float | None


class Evaluation:
    """Holds where gradients go in a step with a closure: the optimizer itself asks for them, perhaps several times."""

    __slots__ = ("keep",)

    def __init__(self) -> None:
        self.keep: Callable[[], None] | None = None  # called with gradients ready, in place of the optimizer's step


class BadStepGate:
    """Holds whether a step whose loss or gradients are not finite leaves the weights as they were.

    It is decided by numbers that all ranks have alike. On a CPU the host looks at them. On a GPU it would have to wait:
    there a fused optimizer looks at a flag on the device, as for `GradScaler`, and others are not kept from the step.
    """

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = False

    def closes(self, optimizer: Optimizer, values: Sequence[Tensor]) -> Tensor | bool:
        """Return whether the step is to be skipped: as a flag on the device where a fused optimizer obeys it.

        Args:
            optimizer: What would move the weights.
            values: The loss and the norm of the gradients, as far as they are known.
        """
        if not self.is_on or not values:
            return False
        device = optimizer.param_groups[0]["params"][0].device  # shards may be kept on the host
        if device.type == "cpu":
            for value in values:  # noqa: SIM110  (this is in every step, and each call costs a microsecond)
                if not math.isfinite(value.item()):
                    return True
            return False
        if not all(group.get("fused") for group in optimizer.param_groups):
            return False
        # A number minus itself is 0, unless it is not finite. As few kernels as possible: this is in every step.
        total = values[0] - values[0]
        for value in values[1:]:
            total = total + (value - value)
        return total.float().nan_to_num(nan=1.0)


class Frozen:
    """Holds the weights that get no gradient for now: their names, and what the optimizer has of each."""

    __slots__ = ("names", "refused", "tensors")

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.tensors: list[Tensor] = []
        self.refused = ""  # why the strategy cannot freeze any


@dataclass(frozen=True)
class StrategyParts:
    """The parts that a strategy is given: a model on its device, the loss, the optimizer, the clipping."""

    model: nn.Module
    loss: LossFunction
    optimizer: Optimizer
    clip_norm: float | None = None
    precision: Precision = FP32_ON_CPU
    called_model: Callable[..., Any] | None = None  # what the loss function gets: the model, or it compiled
    called_loss: LossFunction | None = None  # what is called in its place: it compiled, with the model inside
    average: Average | None = None
    offloads_activations: bool = False
    # Where the optimizer holds this rank's parts of parameters: each part, and the parameter it is of.
    owners: Mapping[Tensor, Tensor] = field(default_factory=dict)
    loss_parts: LossParts = field(default_factory=LossParts)  # for a loss that returns named parts
    step_log: StepLog = field(default_factory=StepLog)  # for a loss that logs values
    norms: NormDue = field(default_factory=NormDue)
    clips: Sequence[Clip] = ()  # for several optimizers, in place of `clip_norm`
    of_all_turns: "StrategyParts | None" = None  # for one of several turns: these are saved, and have the scaler
    evaluation: Evaluation = field(default_factory=Evaluation)
    frozen: Frozen = field(default_factory=Frozen)
    gate: BadStepGate = field(default_factory=BadStepGate)
    # The settings and attributes that the optimizer was made with: it may change them with every step.
    made_with: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        settings = [{"values": plain_settings(group)} for group in self.optimizer.param_groups]
        made_with = {"groups": settings, "attributes": plain_attributes(self.optimizer)}
        object.__setattr__(self, "made_with", made_with)

    @property
    def saved(self) -> "StrategyParts":
        """The parts whose state is saved and loaded."""
        return self.of_all_turns or self

    @cached_property
    def scaler(self) -> torch.amp.GradScaler:
        if self.of_all_turns is not None:
            return self.of_all_turns.scaler
        return torch.amp.GradScaler(self.precision.device_type, enabled=self.precision.scales_loss)

    @cached_property
    def trained(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @cached_property
    def mixtures(self) -> StepSettlement:
        """What settles the loads of the model's mixtures of experts with each step; it does nothing without them."""
        return settlement_of(self.model)

    @cached_property
    def _one(self) -> Tensor:
        return torch.ones((), device=self.trained[0].device)

    def scale(self) -> Tensor:
        """Return the factor of the loss, on its device: to ask the scaler for a number would make the host wait."""
        return self.scaler.scale(self._one)

    def update(
        self, factor: Tensor | float | None, together: "Together | None" = None, loss: Sequence[Tensor] = ()
    ) -> tuple[Tensor | None, Tensor | float]:
        """Move the weights, and the average after them."""
        moved = self.move(factor, together, loss)
        self.follow()
        return moved

    def outcome(
        self,
        losses: Sequence[tuple[Tensor, float]],
        count: Tensor | float,
        stop: Tensor | float,
        norm: Tensor | None,
        skipped: Tensor | float,
    ) -> StepOutcome:
        """Return the outcome of a step, with the parts of its loss and what it logged. All ranks call it together."""
        named, logged = self.loss_parts.take(), self.step_log.take()
        if (
            named is None
            and self.of_all_turns is None
            and isinstance(skipped, Tensor)
            and not self.precision.scales_loss
        ):
            skipped = SKIPPED_IF_BAD  # by these numbers, which the host reads anyway: the flag need not travel
        return StepOutcome(losses if named is None else [], count, stop, norm, skipped, named=named, logged=logged)

    def forget_step(self) -> None:
        """Discard what the loss reported in a step that was begun."""
        self.loss_parts.forget()
        self.step_log.forget()

    def follow(self) -> None:
        """Update the EMA and the experts' loads. Separate from `move`: the EMA's decay depends on the step number."""
        if self.evaluation.keep is not None:
            return  # the step is not over
        if self.average is not None:
            self.average.update()
        self.mixtures.settle()

    def move(
        self, factor: Tensor | float | None, together: "Together | None" = None, loss: Sequence[Tensor] = ()
    ) -> tuple[Tensor | None, Tensor | float]:
        """Rescale the reduced gradients, clip them, step the optimizer.

        Returns the norm before clipping, and whether the step was skipped: 1 for infinite gradients in fp16, and for
        bad numbers where those are skipped. Where a rank has only parts, `together` knows what all ranks' parts come
        to. `loss` is of all ranks.
        """
        scales = self.precision.scales_loss
        skipped: Tensor | float = 0.0
        for tensor in self.frozen.tensors:
            tensor.grad = None
        if scales:
            self.scaler.unscale_(self.optimizer)
            if together is not None:
                together.share_infinities(list(self.scaler._found_inf_per_device(self.optimizer).values()))
        if factor is not None:
            gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
            torch._foreach_mul_(gradients, factor)
        norm = None
        if self.clips:
            norm = self._clip_each(together)
        elif self.clip_norm is not None:
            norm = self._clip(self.trained, self.clip_norm, together)
        elif self.norms.is_due:
            norm = self._norm(self.trained, together)
        if self.evaluation.keep is not None:
            self.evaluation.keep()
        elif scales:
            # A fused optimizer skips on the device. Others ask the host, which waits to know.
            before = self.scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            skipped = widened(self.scale() < before)  # the scale falls after infinite gradients, and only then
        else:
            skipped = self._step_unless_bad([*loss, *([] if norm is None else [norm])])
        return norm, skipped

    def _step_unless_bad(self, values: Sequence[Tensor]) -> Tensor | float:
        """Step the optimizer, unless one of these values is not finite. Return whether it was not stepped."""
        bad = self.gate.closes(self.optimizer, values)
        if bad is True:
            return 1.0
        if bad is False:
            self._step_optimizer()
            return 0.0
        whole: Any = self.optimizer
        own: list[Any] = list(whole.members.values()) if isinstance(whole, JointOptimizer) else [whole]
        try:
            for optimizer in own:
                optimizer.found_inf = bad
            self._step_optimizer()
        finally:
            for optimizer in own:
                vars(optimizer).pop("found_inf", None)
        return bad

    def _step_optimizer(self) -> None:
        try:
            self.optimizer.step()
        except (TypeError, AssertionError, RuntimeError, ValueError) as error:
            if "closure" in str(error):  # reported in our own words
                raise closure_error(self.optimizer) from error
            raise

    def _clip_each(self, together: "Together | None") -> Tensor:
        """Clip the gradients of each optimizer. Return the norm of all of them before that."""
        norms = [
            self._norm(parameters, together) if most is None else self._clip(parameters, most, together)
            for parameters, most in self.clips
        ]
        return torch.stack([norm.to(norms[0]) for norm in norms]).square().sum().sqrt()

    def _norm(self, parameters: Sequence[Tensor], together: "Together | None") -> Tensor:
        if together is not None:
            return together.norm(list(parameters))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros_like(self._one)
        return nn.utils.get_total_norm([value.coalesce().values() if value.is_sparse else value for value in gradients])

    def _clip(self, parameters: Sequence[Tensor], most: float, together: "Together | None") -> Tensor:
        if together is None:
            return nn.utils.clip_grad_norm_(parameters, most)
        norm = together.norm(list(parameters))
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm


class Together(Protocol):
    """Collectives over sharded gradients. All ranks call these together."""

    def norm(self, parts: list[Tensor]) -> Tensor: ...

    def share_infinities(self, found: list[Tensor]) -> None: ...


def rescaling(num_samples: int, count: Tensor | float) -> Tensor | float:
    """Return the factor from a sum over samples to a mean over the counted items. It is 0 if nothing was counted."""
    if isinstance(count, Tensor):
        return (num_samples / count).nan_to_num(posinf=0.0)
    return num_samples / count if count else 0.0


def forget_scaled_step(parts: StrategyParts) -> None:
    """Discard what the gradient scaler keeps of a step that was begun, and what it lends a fused optimizer for it."""
    if parts.precision.scales_loss:
        parts.scaler._per_optimizer_states.clear()
        for name in ("grad_scale", "found_inf"):
            vars(parts.optimizer).pop(name, None)


@dataclass(frozen=True)
class Trial:
    """A batch to try a model on."""

    batch: Any
    num_samples: int


class Strategy(Protocol):
    """Shares the work of a step between devices."""

    name: str

    def prepare(self, parts: StrategyParts, trial: Trial) -> ObjectiveCall:
        """Take the parts over, and try them once on a batch, with everything restored afterwards.

        Returns the objective: (batch, its samples, the step's samples, weight) -> scalar.
        """

    def accumulate(self) -> AbstractContextManager[Any]:
        """Return the context for every micro-step of a step but the last: only the last communicates."""

    def backward(self, objective: Tensor) -> None: ...

    def step(self, stop: float) -> StepOutcome:
        """Reduce, rescale by the actual count, clip, step the optimizer, clear the gradients.

        `stop` is this rank's wish, as a number: 1 to stop, a fraction for other wishes. This outcome or the next one
        has the sum over all ranks, on all alike.
        """

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        """Return this rank's parts of the state, and the state that is not tensors."""

    def load(self, source: TensorSource) -> None: ...

    def close(self) -> None: ...


class CapturableStrategy(Strategy, Protocol):
    """A strategy whose step can be captured as a CUDA graph and replayed: nothing in it asks the host."""

    @property
    def parts(self) -> StrategyParts:
        """The parts that `prepare` was given."""

    @property
    def num_values(self) -> int:
        """The number of values that a step's record needs besides those that each has."""

    def move(self) -> StepOutcome:
        """Run the part of `step` that is captured."""

    def follow(self) -> None:
        """Run the rest of the step, which depends on how many steps there were."""

    def abandon(self) -> None:
        """Discard a step that was begun and will not be ended."""


class Objective(nn.Module):
    """The user's loss as one forward. Its value is sum ÷ the step's samples: the terms of a step add up to its loss.

    Auxiliary losses of mixtures of experts, if the user's function did not add them, are added to what is
    differentiated and not to what is recorded.
    """

    def __init__(self, parts: StrategyParts, scale: float) -> None:
        super().__init__()
        self.model = parts.model
        self.scale = scale  # undoes the averaging of whatever reduces the gradients
        self._loss = parts.called_loss or parts.loss
        self._around_forward = around_forward(parts)
        # In a tuple, so that a compiled model is not registered as a second copy of the parameters.
        self._called = (parts.model if parts.called_model is None else parts.called_model,)
        self._mixtures = parts.mixtures
        self.loss_parts, self.step_log = parts.loss_parts, parts.step_log
        self.counts_items = False  # whether the loss counts something other than samples
        self.losses: list[
            tuple[Tensor, float]
        ] = []  # of the step so far: a value, and how many samples it is a mean of
        self.counts: list[Tensor | float] = []  # kept for the record, without computing with them or waiting for them

    def forward(self, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        if not weight:
            with uncounted(self.model):
                result = self._computed(batch)
        elif self._around_forward is None:
            result = self._loss(self._called[0], batch)
        else:
            result = self._computed(batch)
        if type(result) is Logged:
            if weight:
                self.step_log.add(result.values, num_samples)
            result = result.result
        auxiliary = self._mixtures.take_auxiliary()
        if isinstance(result, LossSum):
            self.counts_items = True
            factor = weight * self.scale / step_samples
            if weight:
                self.losses.append((result.total.detach(), 1.0))
                self.counts.append(result.count)
            total = result.total if auxiliary is None else result.total + auxiliary * result.count
            return total * factor
        if isinstance(result, UndividedLoss):
            if weight:
                # Recorded so that the step's total divided by its samples is the sum over its micro-batches.
                self.losses.append((result.total.detach(), step_samples))
                self.counts.append(num_samples)
            total = result.total if auxiliary is None else result.total + auxiliary * (num_samples / step_samples)
            return total * (weight * self.scale)
        if not isinstance(result, Tensor):
            if isinstance(result, Mapping):
                return self._of_parts(result, auxiliary, batch, num_samples, step_samples, weight)
            raise DrivetrainError(
                f"the loss function {returned(result)}",
                remedy="return a scalar tensor (a mean over the batch), dt.LossSum(sum, count), or a dictionary of "
                "named parts, each of them one of these; where a batch has nothing to count, 0 * output.sum()",
            )
        factor = weight * self.scale * num_samples / step_samples
        if weight:
            self.losses.append((result.detach(), num_samples))
            self.counts.append(num_samples)
        if auxiliary is not None:
            result = result + auxiliary
        return result if factor == 1.0 else result * factor

    def _of_parts(
        self, result: NamedLosses, auxiliary: Tensor | None, batch: Any, samples: int, step_samples: int, weight: int
    ) -> Tensor:
        """Return the objective of named parts, of which each is divided by its own count or by the step's samples."""
        value = self.loss_parts.objective(result, batch, samples, step_samples, weight)
        if weight:
            self.counts.append(samples)
        if auxiliary is not None:
            value = value + auxiliary * (weight * samples / step_samples)
        return value if self.scale == 1.0 else value * self.scale

    def _computed(self, batch: Any) -> Any:
        if self._around_forward is None:
            return self._loss(self._called[0], batch)
        with self._around_forward:
            return self._loss(self._called[0], batch)

    def take_tallies(self) -> tuple[list[tuple[Tensor, float]], Tensor | float]:
        """Return the losses of this process since the last call, and how many items they are over."""
        losses, counts = self.losses, self.counts
        own = self.__dict__  # a module's own way of setting attributes takes microseconds
        own["losses"], own["counts"] = [], []
        count = counts[0] if len(counts) == 1 else sum(counts)
        # float64: dividing by a tensor of whole numbers would give float32.
        return losses, widened(count.detach()) if isinstance(count, Tensor) else count


class _Both:
    """Joins two contexts into one that can be entered again and again, once per forward."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


def around_forward(parts: StrategyParts) -> AbstractContextManager[Any] | None:
    """Return the context that the model and the loss run in: precision, and where activations are kept."""
    casting = parts.precision.around_forward()
    if not parts.offloads_activations:
        return casting
    keeping = offload(pin_memory=parts.precision.device_type == "cuda")
    return keeping if casting is None else _Both(casting, keeping)


def _backward(objective: Tensor) -> None:
    torch.autograd.backward(objective)


def try_out(
    objective: ObjectiveCall, model: nn.Module, trial: Trial, backward: Callable[[Tensor], None] = _backward
) -> None:
    """Run one forward and backward before the first step. Buffers are restored; the caller clears gradients.

    It finds a wrong loss function before anything was trained. And DDP rebuilds its buckets after the first backward,
    in the order the gradients came: after this it has done so, and a resumed run reduces in the same order as one that
    was never stopped.
    """
    with buffers_kept(model):
        _try_out(objective, model, trial, backward)
    settlement_of(model).forget()


def _try_out(objective: ObjectiveCall, model: nn.Module, trial: Trial, backward: Callable[[Tensor], None]) -> None:
    with model_kept(model):
        conduct = _Conduct(model)
        try:
            value = objective(trial.batch, trial.num_samples, trial.num_samples, 1)
        except (
            TypeError,
            LookupError,
            AttributeError,
            ValueError,
            RuntimeError,
        ) as error:  # most likely of the user's code
            if not is_out_of_memory(error):
                error.add_note(f"drivetrain: the loss function was called with the batch {described(trial.batch)}")
                if words := _unlike_types(str(error), model, trial.batch):
                    error.add_note(f"drivetrain: {words}")
            raise
        check_objective(value, model)
        conduct.check()
    weights = [(name, it, it._version) for name, it in model.named_parameters() if not is_distributed(it)]
    backward(value)
    moved = next((name for name, weight, version in weights if weight._version != version), "")
    if moved:
        raise DrivetrainError(
            f"the backward has changed {moved}: a hook steps an optimizer there, for each micro-batch and before "
            "other processes have added their gradients",
            remedy="leave register_post_accumulate_grad_hook out: Job(optimizer=…) steps once per global batch",
        )


def _unlike_types(error: str, model: nn.Module, batch: Any) -> str:
    """Return what to do about a batch and weights of different floating-point types; empty if the error is another."""
    weights = {it.dtype for it in model.parameters() if it.is_floating_point()}
    inputs = {it.dtype for it in leaves(batch) if isinstance(it, Tensor) and it.is_floating_point()}
    if "type" not in error or not weights or not inputs or weights & inputs:
        return ""
    first, second = (", ".join(sorted(str(it).removeprefix("torch.") for it in found)) for found in (inputs, weights))
    remedy = "convert the data, as tensor.float() or array.astype('float32') do"
    if not weights & {torch.float32, torch.float64}:
        remedy = "leave the weights in float32, and --precision bf16 or fp16 computes in that type"
    elif torch.float32 in inputs:
        remedy = "convert the data, tensor.double(), or the model, model.float()"
    return f"the batch is {first}, and the weights are {second}: {remedy}"


class _Conduct:
    """Checks that a loss function leaves gradients, modes and `requires_grad` of the model as it has found them."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._was_training = model, model.training
        self._trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self._gradients = gradient_versions(model.parameters())
        free = [
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad
            and parameter.grad is None
            and parameter.numel()
            and not is_distributed(parameter)
        ]
        # A gradient as of the micro-batch before: it shows whether the function clears it.
        self._planted = min(free, key=Tensor.numel, default=None)
        if self._planted is not None:
            self._planted.grad = torch.ones_like(self._planted)

    def check(self) -> None:
        gradient = None if self._planted is None else self._planted.grad
        if self._planted is not None:
            if gradient is None or not gradient.any():
                raise DrivetrainError(
                    "the loss function clears the gradients: those of the micro-batches before would be lost",
                    remedy="leave zero_grad() out: gradients are cleared once per step",
                )
            self._planted.grad = None if gradient._version == 0 else gradient
        now = gradient_versions(self._model.parameters())
        if any(version not in (-1, then) for then, version in zip(self._gradients, now, strict=True)):
            raise DrivetrainError(
                "the loss function has computed gradients itself, which would count twice",
                remedy="return the loss without calling backward(); for gradients inside of a loss, "
                "torch.autograd.grad leaves those of the weights alone",
            )
        if self._was_training and not self._model.training:
            raise DrivetrainError(
                "the loss function left the model in evaluation mode: dropout and batch normalization would be off "
                "from the next micro-batch on",
                remedy="call model.train() before it returns; or evaluate in Job.valid, or in a hook",
            )
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad != self._trained.get(name, parameter.requires_grad):
                raise DrivetrainError(
                    f"the loss function has changed requires_grad of {name}, after the optimizer was made",
                    remedy="set it where the model is made, in Job(model=…), or with context.freeze in a hook",
                )


def gradient_versions(parameters: Iterable[Tensor]) -> list[int]:
    """Return a number for each parameter that changes whenever its gradient does; -1: it has none."""
    return [-1 if parameter.grad is None else parameter.grad._version for parameter in parameters]


def check_objective(value: Tensor, model: nn.Module, turn: str = "") -> None:
    """Raise where a loss is none that a step can learn from; `turn` is the optimizer's whose turn it is."""
    if value.dim() != 0:
        raise DrivetrainError(
            f"the loss has shape {tuple(value.shape)}, not that of a scalar",
            remedy="return loss.mean(), or dt.LossSum(loss.sum(), loss.numel())",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise nothing_trains(len(list(model.parameters())))
    if not value.requires_grad and turn:
        raise DrivetrainError(
            f"the loss in the turn of {turn!r} does not depend on any parameter that is trained in it",
            remedy="compute all of it in that turn: in another one, its parameters have no gradients",
        )
    if not value.requires_grad:
        raise DrivetrainError(
            "the loss does not depend on any parameter that is trained",
            remedy="compute it from the model's output, without detach(), .item() or torch.no_grad()",
        )
