"""Strategies: how devices share the work of a step. One contract suite holds for all of them (`tests/strategies`)."""

from drivetrain.core.plugins import Conflict
from drivetrain.strategies.base import Objective, Strategy, StrategyParts, Trial
from drivetrain.strategies.ddp import DdpOptions, DdpStrategy
from drivetrain.strategies.deepspeed import DeepSpeedStrategy
from drivetrain.strategies.expert_parallel import ExpertParallelStrategy, ShardedExpertParallelStrategy
from drivetrain.strategies.fsdp import FsdpStrategy
from drivetrain.strategies.optimizer_state import Average, RunningMean, make_average
from drivetrain.strategies.sharding import Sharded, ShardOptions
from drivetrain.strategies.shared_experts import SharedExperts
from drivetrain.strategies.single import DataParallelStrategy, SingleStrategy
from drivetrain.strategies.spec import Description, StrategyContext, StrategySpec, strategy_spec

__all__ = [
    "Average",
    "Conflict",
    "DataParallelStrategy",
    "DdpOptions",
    "DdpStrategy",
    "DeepSpeedStrategy",
    "Description",
    "ExpertParallelStrategy",
    "FsdpStrategy",
    "Objective",
    "RunningMean",
    "ShardOptions",
    "Sharded",
    "ShardedExpertParallelStrategy",
    "SharedExperts",
    "SingleStrategy",
    "Strategy",
    "StrategyContext",
    "StrategyParts",
    "StrategySpec",
    "Trial",
    "make_average",
    "strategy_spec",
]
