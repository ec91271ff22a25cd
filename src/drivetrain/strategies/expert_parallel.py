"""Expert parallel: every rank holds some of the experts, and tokens are sent to the experts chosen for them.

All else is as with DDP, or as with FSDP. DDP averages gradients over ranks, for which objectives were scaled by their
number; nothing averages the experts' gradients, so these are divided by that number, once. With FSDP gradients are
sums, and the experts' are, too. The norm that clips is over what all ranks hold.
"""

from typing import Any

from torch import Tensor

from drivetrain.core.state import Shard, TensorSource, put_away
from drivetrain.core.world import World
from drivetrain.strategies.base import ObjectiveCall, StrategyParts, Trial
from drivetrain.strategies.ddp import DdpOptions, DdpStrategy, options_of
from drivetrain.strategies.fsdp import FsdpStrategy
from drivetrain.strategies.replicated import load_whole_state, whole_state
from drivetrain.strategies.sharding import Sharded, norm_over_ranks, refuse_hooks, share_infinities
from drivetrain.strategies.shared_experts import SharedExperts
from drivetrain.strategies.spec import StrategyContext, StrategySpec


class ExpertParallelStrategy(DdpStrategy):
    """DDP for all but the experts, of which every rank holds its own."""

    name = "expert_parallel"

    def __init__(self, world: World, options: DdpOptions | None = None, capability: float = 0.0) -> None:
        super().__init__(world, options)
        self._capability = capability
        self._experts: SharedExperts | None = None

    def prepare(self, parts: StrategyParts, trial: Trial) -> ObjectiveCall:
        refuse_hooks(parts.optimizer, self.name)
        self._experts = SharedExperts(parts.model, self._world, self._capability)
        self._experts.deal(parts.average)
        self._experts.cut_state(parts.optimizer)
        self.ignored = [f"model.{name}" for name in self._experts.held]
        objective = super().prepare(parts, trial)
        self._experts.clear_gradients()
        return objective

    @property
    def experts(self) -> SharedExperts:
        assert self._experts is not None, "prepare comes first"
        return self._experts

    def step(self, stop: float) -> Any:
        self.experts.complete_gradients(self.gradient_factor)
        return super().step(stop)

    @property
    def gradient_factor(self) -> float:
        """The factor of the experts' gradients: objectives are scaled up as DDP averages; theirs are not averaged."""
        return 1.0 / self._world.size

    @property
    def together(self) -> "ExpertParallelStrategy":
        return self

    def norm(self, parts: list[Tensor]) -> Tensor:
        """Return the norm of all gradients of all ranks; replicated gradients count once."""
        if not self._world.is_main:
            own = self.experts.parameters
            parts = [part for part in parts if part in own]
        return norm_over_ranks(parts, self._world, self._parts.trained[0].dtype)

    def share_infinities(self, found: list[Tensor]) -> None:
        share_infinities(found, self._world)

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        return self.experts.saved(*whole_state(self._parts))

    def load(self, source: TensorSource) -> None:
        load_whole_state(self._parts, self.experts.room_for(source, self._parts.average))

    def close(self) -> None:
        if self._experts is not None:
            self._experts.close()


class ShardedExpertParallelStrategy(FsdpStrategy):
    """FSDP for all but the experts, of which every rank holds its own, and the routers, which are replicated."""

    name = "expert_parallel"
    gradient_factor = 1.0  # gradients are sums over ranks, the experts' like all others

    def __init__(self, world: World, sharded: Sharded, experts: SharedExperts) -> None:
        super().__init__(world, sharded)
        self.experts = experts

    def _hand_over_gradients(self) -> None:
        super()._hand_over_gradients()
        self.experts.complete_gradients(self.gradient_factor)

    def _clear(self) -> None:
        super()._clear()
        self.experts.clear_gradients()

    def save(self) -> tuple[list[Shard], dict[str, Any]]:
        put_away(self._parts.model)
        return self.experts.saved(*whole_state(self._parts))

    def load(self, source: TensorSource) -> None:
        super().load(self.experts.room_for(source, self._parts.average))

    def close(self) -> None:
        self.experts.close()


def _make(context: StrategyContext) -> ExpertParallelStrategy | ShardedExpertParallelStrategy:
    if context.sharded is None:
        return ExpertParallelStrategy(context.world, options_of(context), context.peak_tflops)
    assert context.experts is not None, "experts are dealt before the rest is cut"
    return ShardedExpertParallelStrategy(context.world, context.sharded, context.experts)


SPEC = StrategySpec(
    make=_make,
    processes="several",
    shares_experts=True,
    why_not_captured="expert_parallel: the host has to know in every step how many rows go to which rank",
    options=("distributed.expert_rest",),
    options_by_name=True,
    rest_by="distributed.expert_rest",
)
