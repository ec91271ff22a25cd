"""What the command line knows of a recipe before it loads torch, read from the recipe's file without importing it."""

from drivetrain.core.literal_facts import literal_facts
from drivetrain.core.plugins import RECIPES
from drivetrain.core.value import Value


class RecipeSummary(Value):
    """The literals of `RECIPE = Recipe(…)`.

    Args:
        about: one line on what it trains.
        reads: the settings that it reads, beside those that every recipe reads: their flags are refused by others.
    """

    about: str = ""
    reads: tuple[str, ...] = ()


def recipe_summary(name: str) -> RecipeSummary | None:
    """Return what a recipe says of itself; None where this is no recipe: a function of a user, or an unknown name."""
    source = RECIPES.source(name)
    attribute = RECIPES.target(name).partition(":")[2]
    found = () if source is None else literal_facts(source, attribute, RecipeSummary)
    return found[0] if found else None
