"""`drivetrain train RECIPE`: the recipes that come with drivetrain."""

from typing import Annotated

from pydantic import BaseModel, Field

from drivetrain.config import Positional, Resolved, nearest
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.hardware import detect
from drivetrain.recipes import digits

RECIPES = {"digits": digits.train}

EXAMPLES = (
    "drivetrain train digits                       handwritten digits, about ten seconds on a CPU",
    "drivetrain train digits --epochs 5 --seed 1   other values",
    "drivetrain train digits --config train.yaml   values from a file",
)


class Options(BaseModel):
    recipe: Annotated[str, Positional()] = Field(description=f"what to train: {', '.join(RECIPES)}")


def run(options: Options, resolved: Resolved) -> int:
    if options.recipe not in RECIPES:
        meant = nearest(options.recipe, RECIPES)
        remedy = f"did you mean `{meant}`?" if meant else f"drivetrain train {next(iter(RECIPES))}"
        raise ConfigError(
            [Problem(options.recipe, "there is no such recipe", allowed=", ".join(RECIPES), remedy=remedy)]
        )
    RECIPES[options.recipe](resolved, detect(resolved.config.run.output_dir))
    return 0
