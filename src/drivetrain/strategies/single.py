"""One process: on one device, or on several GPUs that compute a part of every micro-batch each."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import replicate as replicate_on_gpus
from torch.optim import Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import Logged, LossSum, NamedLosses, StepOutcome, UndividedLoss, summed_by_count
from drivetrain.core.plugins import Conflict
from drivetrain.core.state import Shard, TensorSource
from drivetrain.core.world import World
from drivetrain.data.batch import to_device
from drivetrain.data.division import key_of
from drivetrain.strategies.base import (
    Objective,
    ObjectiveCall,
    StrategyParts,
    Trial,
    forget_scaled_step,
    rescaling,
    try_out,
)
from drivetrain.strategies.replicated import load_whole_state, whole_state
from drivetrain.strategies.spec import StrategySpec

# ----------------------------------------------------------------------------------------------------------------------
# One process, one device.


class SingleStrategy:
    """Trains on one device: nothing is shared, so nothing is reduced."""

    name = "single"

    def __init__(self, world: World) -> None:
        self._world = world

    def prepare(self, parts: StrategyParts, trial: Trial) -> ObjectiveCall:
        self.parts = parts
        self._objective = Objective(parts, scale=1.0)
        self._scaler = parts.scaler if parts.precision.scales_loss else None
        self._samples = trial.num_samples
        parts.optimizer.zero_grad()
        is_torchs = type(parts.optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(parts.optimizer)
        self._clears_itself = is_torchs and self._world.device.type == "cpu"
        self._begins = False  # the trial looks whether the loss function clears gradients
        try_out(self._call, parts.model, trial)
        self._objective.take_tallies()
        parts.forget_step()
        self._begins = True
        return self._call

    @property
    def num_values(self) -> int:
        """The number of values that a step's record needs for named parts of the loss and for logged values."""
        return self.parts.loss_parts.num_values + self.parts.step_log.num_values

    def _call(self, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        if self._begins:
            # Here and not after the last step: what is freed now is at once used again, while it is in the cache.
            self._clear_gradients()
            self._begins = False
            self._samples = step_samples
        # Straight to forward: nothing hooks into this module, and its call costs microseconds.
        return self._objective.forward(batch, num_samples, step_samples, weight)

    def _clear_gradients(self) -> None:
        if not self._clears_itself:
            self.parts.optimizer.zero_grad()
            return
        # As torch does it, without a range for its profiler: of a small step, that would be several percent.
        for group in self.parts.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def accumulate(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, objective: Tensor) -> None:
        if self._scaler is not None:
            objective = self._scaler.scale(objective)
        torch.autograd.backward(objective)

    def step(self, stop: float) -> StepOutcome:
        outcome = self.move(float(stop))
        self.follow()
        return outcome

    def move(self, stop: float = 0.0) -> StepOutcome:
        losses, count = self._objective.take_tallies()
        factor = rescaling(self._samples, count) if self._objective.counts_items else None
        norm, skipped = self.parts.move(factor, loss=[value for value, _ in losses])
        self._begins = True
        return self.parts.outcome(losses, count, stop, norm, skipped)

    def follow(self) -> None:
        self.parts.follow()

    def abandon(self) -> None:
        """Discard the step: the gradients are cleared when the next one begins."""
        self._objective.take_tallies()
        self.parts.forget_step()
        self.parts.mixtures.forget()
        self._begins = True
        forget_scaled_step(self.parts)

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        return whole_state(self.parts.saved)

    def load(self, source: TensorSource) -> None:
        load_whole_state(self.parts.saved, source)

    def close(self) -> None:
        pass


SPEC_SINGLE = StrategySpec(
    make=lambda context: SingleStrategy(context.world),
    processes="one",
    captures=True,
    several_optimizers=True,
    takes=("ddp",),  # one process communicates nothing: they change nothing
    conflicts=(
        Conflict(
            when={"device.mode": "multi_gpu"},
            message="uses one GPU, but {asked} asks for several",
            asked="device.mode",
            allowed="auto, data_parallel, ddp, fsdp with that mode",
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------------------------
# One process, several GPUs: each computes a part of every micro-batch, with a copy of the model made for that.
#
# It is what `nn.DataParallel` does, with torch's own `replicate`, and three differences. The loss is computed beside
# each copy and weighted by what it is over: samples, or what a `LossSum` counts. Batches are cut by sample, not by
# whatever length a tensor has. And the copies run one after the other from one thread (launching does not wait, so the
# GPUs still work in parallel): what they draw at random is keyed, and the user's function never runs twice at a time.

Replicate = Callable[[nn.Module, Sequence[torch.device]], Sequence[nn.Module]]
_OR_DDP = "use --parallel-strategy ddp: there every process makes batches of its own"


class DataParallelStrategy(SingleStrategy):
    """Trains like one device, with a loss that several compute. Model, optimizer and checkpoints are on the first."""

    name = "data_parallel"

    def __init__(self, world: World, devices: Sequence[torch.device], replicate: Replicate = replicate_on_gpus) -> None:
        super().__init__(world)
        self._devices, self._replicate = devices, replicate
        self._num_samples = 0

    def prepare(self, parts: StrategyParts, trial: Trial) -> ObjectiveCall:
        _refuse_what_cannot_be_copied(parts)
        self._user_loss, self._count = parts.loss, parts.loss_parts.count
        return super().prepare(replace(parts, loss=self._loss), trial)

    def _call(self, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        self._num_samples = num_samples
        return super()._call(batch, num_samples, step_samples, weight)

    def _loss(self, model: nn.Module, batch: Any) -> Tensor | LossSum | UndividedLoss | NamedLosses:
        """Return the user's loss over the whole batch, from its parts."""
        whole = self._num_samples
        bounds = [whole * number // len(self._devices) for number in range(len(self._devices) + 1)]
        shares = [share for share in pairwise(bounds) if share[0] < share[1]]  # there may be fewer samples than GPUs
        devices = self._devices[: len(shares)]
        results = []
        for number, replica in enumerate(self._replicate(model, devices)):
            device, share = devices[number], shares[number]
            with _on(device):
                if device != devices[0]:
                    _set_generator(device, number)
                part = to_device(part_of(batch, whole, *share), device)
                result: Any = self._user_loss(_with_parameters(replica), part)
                if isinstance(result, Logged):
                    self.parts.step_log.add(result.values, share[1] - share[0])
                    result = result.result
                if isinstance(result, Mapping) and self._count is not None:
                    result = summed_by_count(result, self._count(part))
                results.append((result, share[1] - share[0]))
        return _together(results, whole, devices[0])


def _refuse_what_cannot_be_copied(parts: StrategyParts) -> None:
    if parts.called_model is not None:
        raise DrivetrainError(
            "a compiled model cannot be copied to several GPUs for every forward",
            remedy="drop --compile, or use --parallel-strategy ddp",
        )
    patched = [name for name, module in parts.model.named_modules() if "forward" in vars(module)]
    if patched:
        raise DrivetrainError(
            f"the forward of {patched[0] or 'the model'} was replaced, and copies on other GPUs would call the first's",
            remedy="use --activations keep, or --parallel-strategy ddp",
        )


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _set_generator(device: torch.device, number: int) -> None:
    """Seed the generator of another GPU's copy from the key that the step has set on the host."""
    torch.cuda.default_generators[device.index].manual_seed(key_of(torch.default_generator.initial_seed(), number) >> 1)


def _with_parameters(replica: nn.Module) -> nn.Module:
    """Make `parameters()` return the copied weights, which `replicate` hides: a penalty on them would silently be 0."""
    for module in replica.modules():
        module._parameters.update(cast(dict[str, Any], getattr(module, "_former_parameters", {})))
    return replica


def _together(
    results: Sequence[tuple[Any, int]], num_samples: int, device: torch.device
) -> Tensor | LossSum | UndividedLoss | NamedLosses:
    values = [value for value, _ in results]
    if isinstance(values[0], Mapping) and len(values) > 1:
        return _parts_together(results, num_samples, device)
    if len(values) == 1 or not _are_scalars(values):
        return cast(Tensor, values[0])  # what is wrong with it is found where the losses of other strategies are judged
    if isinstance(values[0], LossSum):
        counts = [value.count for value in values]
        count = sum(part.to(device) if isinstance(part, Tensor) else part for part in counts)
        return LossSum(cast(Tensor, sum(value.total.to(device) for value in values)), count)
    if isinstance(values[0], UndividedLoss):
        return UndividedLoss(cast(Tensor, sum(value.total.to(device) for value in values)))
    return cast(Tensor, sum(value.to(device) * (share / num_samples) for value, share in results))


def _parts_together(results: Sequence[tuple[Any, int]], num_samples: int, device: torch.device) -> NamedLosses:
    """Combine each named part by itself. A share that lacks one contributes nothing to it."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for parts, _ in results for name in parts):
        shares = [(parts[name], share) for parts, share in results if name in parts]
        _are_scalars([value for value, _ in shares])
        if isinstance(shares[0][0], Tensor):
            found[name] = sum(value.to(device) * (share / num_samples) for value, share in shares)
        else:
            found[name] = _together(shares, num_samples, device)
    return found


def _are_scalars(values: Sequence[Any]) -> bool:
    kinds = sorted({type(value).__name__ for value in values})
    if len(kinds) > 1:
        raise DrivetrainError(
            f"the loss function returned {' and '.join(kinds)} for parts of one batch",
            remedy="return the same kind for every batch",
        )
    return all(
        isinstance(value, (LossSum, UndividedLoss)) or (isinstance(value, Tensor) and value.dim() == 0)
        for value in values
    )


def part_of(batch: Any, num_samples: int, first: int, last: int) -> Any:
    """Return the same structure with the samples from `first` to before `last` of all tensors and plain lists."""

    def part(value: Any) -> Any:
        return part_of(value, num_samples, first, last)

    if isinstance(batch, Tensor):
        if batch.dim() == 0:
            return batch
        if len(batch) != num_samples:
            raise DrivetrainError(
                f"a tensor of shape {tuple(batch.shape)} in a batch of {num_samples} samples has no row for each: it "
                "cannot be cut for several GPUs",
                remedy=_OR_DDP,
            )
        return batch[first:last]
    if isinstance(batch, MutableMapping):
        changed: Any = copy.copy(batch)
        for key, value in batch.items():
            changed[key] = part(value)
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(part, batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) == num_samples and not any(map(_holds_tensors, batch)):
            return batch[first:last]  # texts or numbers, one for each sample
        return type(batch)(map(part, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{field.name: part(getattr(batch, field.name)) for field in dataclasses.fields(batch)})
    if hasattr(batch, "to") or isinstance(batch, Mapping):
        raise DrivetrainError(f"a {type(batch).__name__} cannot be cut for several GPUs", remedy=_OR_DDP)
    return batch


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensors, value)))


SPEC_DATA_PARALLEL = StrategySpec(
    make=lambda context: DataParallelStrategy(context.world, context.devices),
    processes="one",
    devices="several",
    why_not_captured="the strategy data_parallel gives work to several devices",
    own_loop="with data_parallel what the model draws at random in your own loop would not be keyed",
    takes=("ddp",),  # one process communicates nothing: they change nothing
    conflicts=(
        Conflict(
            when={"compile.enabled": True},
            message="data_parallel copies the model for every forward, and a compiled one cannot be copied",
            allowed="auto, ddp with --compile",
            remedy="drop --compile, or use ddp",
        ),
        Conflict(
            when={"memory.activations": "recompute"},
            message="data_parallel copies the model for every forward, and blocks that recompute cannot be copied",
            allowed="auto, ddp with --activations recompute",
            remedy="use --activations keep, or ddp",
            reason="blocks that recompute cannot be copied between GPUs",
        ),
    ),
)
