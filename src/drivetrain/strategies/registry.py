"""The list of strategies: ours from the folder `kinds`, others from entry points or from a name with a colon."""

import sys
from importlib import import_module
from pathlib import Path

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.strategy_facts import GROUP, strategy_names, strategy_target
from drivetrain.strategies.spec import StrategySpec


def strategy_spec(name: str) -> StrategySpec:
    """Import a strategy and return its spec.

    Args:
        name: a file of `strategies/kinds`, an entry point of the group `drivetrain.strategies`, or
            `package.module:SPEC`, where the module may also be in the current folder.
    """
    target = strategy_target(name)
    if not target:
        raise DrivetrainError(
            f"there is no strategy {name}", remedy=f"use one of {', '.join(strategy_names())}, or package.module:SPEC"
        )
    module, _, attribute = target.partition(":")
    if target == name and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last, so that it hides nothing
    try:
        spec = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DrivetrainError(
            f"the strategy {name} cannot be loaded: {error}",
            remedy=f"name a StrategySpec as package.module:SPEC, or in the entry-point group {GROUP}",
        ) from error
    if not isinstance(spec, StrategySpec):
        raise DrivetrainError(
            f"the strategy {name} is a {type(spec).__name__}, expected a StrategySpec",
            remedy="assign SPEC = StrategySpec(make=…), from drivetrain.strategies",
        )
    return spec
