"""The list of strategies: ours from the folder `kinds`, others from entry points or from a name with a colon."""

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.plugins import STRATEGIES
from drivetrain.strategies.spec import StrategySpec


def strategy_spec(name: str) -> StrategySpec:
    """Import a strategy and return its spec.

    Args:
        name: a file of `strategies/kinds`, an entry point of the group `drivetrain.strategies`, or
            `package.module:SPEC`, where the module may also be in the current folder.
    """
    spec = STRATEGIES.load(name)
    if not isinstance(spec, StrategySpec):
        raise DrivetrainError(
            f"the strategy {name} is a {type(spec).__name__}, expected a StrategySpec",
            remedy="assign SPEC = StrategySpec(make=…), from drivetrain.strategies",
        )
    return spec
