"""What a strategy's file tells the rest of the package (facts as literals, how it is made), and how it is found."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.plugins import STRATEGIES, StrategyFacts
from drivetrain.core.world import World
from drivetrain.job import Job
from drivetrain.strategies.base import Strategy
from drivetrain.strategies.sharding import Sharded
from drivetrain.strategies.shared_experts import SharedExperts


@dataclass(frozen=True)
class StrategyContext:
    """What a strategy is made from."""

    world: World
    devices: Sequence[torch.device]  # of this process
    config: Config
    job: Job  # with its global batch
    precision: str
    micro_batch: int
    num_weights: int | None = None  # once the model is made
    peak_tflops: float = 0.0  # of this process's device, in bf16; 0 where it is not known
    sharded: Sharded | None = None  # the model, where `memory` is shards
    experts: SharedExperts | None = None  # its experts, where these are shared out and the rest is sharded


@dataclass(frozen=True)
class Description:
    """What a strategy adds to the record of a run: an event, and a line on the console."""

    event: str
    facts: Mapping[str, Any]
    line: str


def _check_nothing(context: StrategyContext) -> None:
    """Accept everything."""


def _settle_nothing(config: Config, on_gpu: bool) -> tuple[Config, Sequence[str]]:
    """Leave the configuration as it is."""
    return config, ()


def _keep(config: Config, num_processes: int) -> Config:
    """Leave the configuration as it is."""
    return config


def refuse_without_package(strategy: str, facts: StrategyFacts) -> None:
    """Raise if a package is missing, before anything large is made. It is not imported: that may take seconds."""
    if facts.package and importlib.util.find_spec(facts.package) is None:
        raise DrivetrainError(
            f"the strategy {strategy} needs the package {facts.package}, which is not installed",
            remedy=f"pip install {facts.install or facts.package}",
        )


class StrategySpec(StrategyFacts):
    """A strategy: the facts that others ask for, and the functions that they call.

    Args:
        make: makes the strategy. The model comes later, with `prepare`.
        check: raises what contradicts the strategy before anything large is made.
        settle: returns the configuration with what follows from the strategy's own settings, and notes to report. It
            gets the configuration and whether a GPU is used.
        settle_auto: returns the configuration for the case that `auto` has chosen this strategy, given the number of
            processes.
        keeps_on_host: whether the model stays where it was made until `prepare` moves it.
        describe: returns what the record of a run says of a strategy that was made.
    """

    make: Callable[[StrategyContext], Strategy]
    check: Callable[[StrategyContext], None] = _check_nothing
    settle: Callable[[Config, bool], tuple[Config, Sequence[str]]] = _settle_nothing
    settle_auto: Callable[[Config, int], Config] = _keep
    keeps_on_host: Callable[[Config], bool] = lambda config: False
    describe: Callable[[Any], Description | None] = lambda strategy: None


def strategy_spec(name: str) -> StrategySpec:
    """Import a strategy and return its spec.

    Args:
        name: the name of one of `strategies`, an entry point of the group `drivetrain.strategies`, or
            `package.module:SPEC`, where the module may also be in the current folder.
    """
    spec = STRATEGIES.load(name)
    if not isinstance(spec, StrategySpec):
        raise DrivetrainError(
            f"the strategy {name} is a {type(spec).__name__}, expected a StrategySpec",
            remedy="assign SPEC = StrategySpec(make=…), from drivetrain.strategies",
        )
    return spec
