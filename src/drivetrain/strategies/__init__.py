"""Strategies: how devices share the work of a step. One contract suite holds for all of them (`tests/strategies`)."""

from drivetrain.strategies.base import Objective, Strategy, StrategyParts, Trial
from drivetrain.strategies.data_parallel import DataParallelStrategy
from drivetrain.strategies.ddp import DdpOptions, DdpStrategy
from drivetrain.strategies.deepspeed import DeepSpeedStrategy
from drivetrain.strategies.ema import Average
from drivetrain.strategies.expert_parallel import ExpertParallelStrategy, ShardedExpertParallelStrategy
from drivetrain.strategies.fsdp import FsdpStrategy
from drivetrain.strategies.sharding import Sharded, ShardOptions
from drivetrain.strategies.shared_experts import SharedExperts
from drivetrain.strategies.single import SingleStrategy

__all__ = [
    "Average",
    "DataParallelStrategy",
    "DdpOptions",
    "DdpStrategy",
    "DeepSpeedStrategy",
    "ExpertParallelStrategy",
    "FsdpStrategy",
    "Objective",
    "ShardOptions",
    "Sharded",
    "ShardedExpertParallelStrategy",
    "SharedExperts",
    "SingleStrategy",
    "Strategy",
    "StrategyParts",
    "Trial",
]
