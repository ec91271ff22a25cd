"""DistributedDataParallel: every rank holds a whole copy, gradients are all-reduced while backward runs.

Loss sum, count and stop request travel with the gradients: they are the gradient of one small parameter that takes part
in every forward at value zero. So a step has no extra collective, and no extra wait. The stop request is read from the
device, where a replay of a captured step finds it, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import StepOutcome
from drivetrain.core.state import Shard, TensorSource
from drivetrain.core.world import World
from drivetrain.strategies.base import (
    Objective,
    ObjectiveCall,
    StrategyParts,
    Together,
    Trial,
    forget_scaled_step,
    rescaling,
    try_out,
)
from drivetrain.strategies.replicated import load_whole_state, some_names, whole_state
from drivetrain.strategies.spec import StrategyContext, StrategySpec

_NEVER = 2**31 - 1  # iterations, between two that DDP times


@dataclass(frozen=True)
class DdpOptions:
    """The options of torch's DDP, with its defaults, except that gradients are views of the buckets: one copy less."""

    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    bucket_cap_mb: float | None = None
    static_graph: bool = False
    gradient_as_bucket_view: bool = True


class _CarryingObjective(Objective):
    """An objective whose gradient also carries loss sum, count and stop flag of this rank."""

    def __init__(self, parts: StrategyParts, world: World) -> None:
        super().__init__(parts, scale=float(world.size))  # DDP averages over ranks; a step is a sum
        # float64: counts stay exact, and sums are as good as the losses they are made of.
        self.carrier = nn.Parameter(torch.zeros(3, dtype=torch.float64, device=world.device))
        # No buffer: DDP would replace it by that of rank 0.
        self._stop, self._stop_on_host = torch.zeros((), dtype=torch.float64, device=world.device), 0.0

    def send_stop(self, stop: float) -> None:
        """Send this rank's stop request with the gradients of the steps that are enqueued from now on."""
        if stop != self._stop_on_host:
            self._stop_on_host = stop
            self._stop.fill_(stop)

    def forward(self, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        objective = super().forward(batch, num_samples, step_samples, weight)
        losses, count = self.take_tallies()
        total = losses[0][0].double() * losses[0][1] if losses else 0.0
        parts = [self._on_device(total), self._on_device(count), self._stop]
        return objective + torch.dot(self.carrier, torch.stack(parts))

    def _on_device(self, part: Tensor | float) -> Tensor:
        """Return a tensor on the device. A number is filled in there: copying it would make the host wait."""
        if isinstance(part, Tensor):
            return part.to(self.carrier)
        return torch.full((), part, dtype=self.carrier.dtype, device=self.carrier.device)


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Freeze parameters while DDP is made: it still shares their values, and waits for no gradients of theirs."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class DdpStrategy:
    """One process per device; the same weights on all of them after every step."""

    name = "ddp"
    ignored: Sequence[str] = ()  # parameters that others see to, by their names in the objective

    def __init__(self, world: World, options: DdpOptions | None = None) -> None:
        self._world = world
        self._options = options or DdpOptions()

    def prepare(self, parts: StrategyParts, trial: Trial) -> ObjectiveCall:
        self._parts = parts
        parts.mixtures.group = self._world.group
        self._objective = _CarryingObjective(parts, self._world)
        options = self._options
        sparse = [name for name, it in self._objective.named_buffers() if it.layout is not torch.strided]
        # Private, and the only way: what has no gradient here would otherwise be waited for. Nor can gloo or NCCL send
        # a sparse buffer, which the model function makes alike everywhere.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            self._objective, [*self.ignored, *sparse]
        )
        with _frozen(self._in_no_optimizer()):
            self._ddp = DistributedDataParallel(
                self._objective,
                device_ids=[self._world.device] if self._world.device.type == "cuda" else None,
                process_group=self._world.group,
                find_unused_parameters=options.find_unused_parameters,
                static_graph=options.static_graph,
                gradient_as_bucket_view=options.gradient_as_bucket_view,
                bucket_cap_mb=options.bucket_cap_mb,
            )
        # Not as an argument, whose name changes between versions of torch. At the start buffers are shared anyway.
        self._ddp.broadcast_buffers = options.broadcast_buffers
        self._samples = 0
        try_out(self._call, parts.model, trial)
        self._refuse_unreduced()
        parts.forget_step()
        self._ddp.zero_grad()
        return self._call

    def _in_no_optimizer(self) -> list[nn.Parameter]:
        """Return the weights that nothing trains and that could have gradients, such as those of an `AveragedModel`."""
        trained = set(map(id, self._parts.trained))
        return [it for it in self._parts.model.parameters() if it.requires_grad and id(it) not in trained]

    def _call(self, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        self._samples = step_samples
        objective: Tensor = self._ddp(batch, num_samples, step_samples, weight)
        return objective

    @property
    def together(self) -> Together | None:
        """The collectives over sharded gradients; None where gradients are not sharded."""
        return None

    def accumulate(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self._ddp.no_sync())

    def backward(self, objective: Tensor) -> None:
        torch.autograd.backward(self._parts.scaler.scale(objective))
        if self._ddp.require_backward_grad_sync:
            self._refuse_unreduced()  # now: a rank that waits for the others in anything else would not get to it

    @property
    def parts(self) -> StrategyParts:
        """The parts that `prepare` was given."""
        return self._parts

    @property
    def num_values(self) -> int:
        """The number of values that a step's record needs for named parts of the loss and for logged values."""
        return self._parts.loss_parts.num_values + self._parts.step_log.num_values

    def step(self, stop: float) -> StepOutcome:
        outcome = self.move()
        self.send_stop(stop)
        self.follow()
        return outcome

    def move(self) -> StepOutcome:
        carried = cast(Tensor, self._objective.carrier.grad) * self._world.size  # a copy: the bucket is used again
        if self._parts.scaler.is_enabled():
            carried = carried / self._parts.scale()
        total, count, stopping = carried.unbind()
        factor = rescaling(self._samples, count) if self._objective.counts_items else None
        norm, skipped = self._parts.move(factor, self.together, [total])
        self._ddp.zero_grad()
        return self._parts.outcome([(total, 1.0)], count, stopping, norm, skipped)

    def follow(self) -> None:
        self._parts.follow()

    def send_stop(self, stop: float) -> None:
        """Send this rank's stop request with the next step's gradients."""
        self._objective.send_stop(float(stop))

    def settle_timing(self) -> None:
        """Keep DDP from timing iterations after its first ten: the host waits for the device to know what they took.

        Otherwise it times every hundredth, and one that is captured cannot be timed.
        """
        self._ddp._set_ddp_runtime_logging_sample_rate(_NEVER)  # type: ignore[no-untyped-call]

    def alone(self, batch: Any, num_samples: int, step_samples: int, weight: int) -> Tensor:
        """Return the objective without the other ranks: neither this forward nor its backward communicates."""
        self._samples = step_samples
        return cast(Tensor, self._objective(batch, num_samples, step_samples, weight))

    @property
    def is_reducing(self) -> bool:
        """Whether DDP is in the middle of reducing gradients. After an error there it refuses every later step."""
        try:
            self._ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True
        return False

    def abandon(self) -> None:
        """Discard a step that was begun."""
        self._objective.take_tallies()
        self._parts.forget_step()
        self._parts.mixtures.forget()
        self._ddp.zero_grad()
        forget_scaled_step(self._parts)

    def _refuse_unreduced(self) -> None:
        """Raise if DDP still waits for a gradient: those that are there are of this rank alone.

        DDP itself says so in the next forward only, after a step that was taken with them, and nothing in the last one.
        """
        try:
            self._ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            named = self._parts.model.named_parameters()
            unused = [name for name, it in named if it.requires_grad and it.grad is None]
            raise DrivetrainError(
                f"no gradient reached {some_names(unused) or 'some weights'} on rank {self._world.rank} in the "
                "backward that ends a step, and ddp waits for those of all weights",
                remedy="--find-unused-parameters, where a loss leaves weights out in some steps or on some ranks; a "
                "weight that it never uses can be left out of the model, or get requires_grad=False",
            ) from error

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        """Return the state, which is the same on every rank; only rank 0 writes it."""
        shards, meta = whole_state(self._parts.saved)
        return (shards if self._world.is_main else []), meta

    def load(self, source: TensorSource) -> None:
        load_whole_state(self._parts.saved, source)

    def close(self) -> None:
        pass


def options_of(context: StrategyContext) -> DdpOptions:
    """Read the options from the configuration."""
    config = context.config
    return DdpOptions(
        find_unused_parameters=config.distributed.find_unused_parameters,
        broadcast_buffers=config.distributed.broadcast_buffers,
        bucket_cap_mb=config.distributed.bucket_cap_mb,
        static_graph=config.distributed.static_graph,
        gradient_as_bucket_view=config.distributed.gradient_as_bucket_view,
    )


SPEC = StrategySpec(
    make=lambda context: DdpStrategy(context.world, options_of(context)),
    processes="several",
    captures=True,
    several_optimizers=True,
    options=("distributed.bucket_cap_mb", "distributed.static_graph", "distributed.gradient_as_bucket_view"),
)
