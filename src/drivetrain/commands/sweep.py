"""`drivetrain sweep TARGET`: trains variants of a job with the same seeds, and compares them."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from drivetrain.commands.command import Command, ForScript
from drivetrain.config import Flag, Positional, Resolved

COMMAND = Command(
    summary="Trains variants of a job with the same seeds, and says which are better.",
    all_but=(),
    here="drivetrain.commands.sweep_in_process:run",
)
EXAMPLES = (
    "drivetrain sweep digits --grid 'lr=0.001,0.003' --seeds 0,1,2     every rate with every seed",
    "drivetrain sweep train.py --grid 'width=32,64' --epochs 5         flags of the script",
    "drivetrain sweep digits --grid 'lr=0.001,0.002,0.004,0.008' --halving 2",
    "                                                                  the better half goes on, twice",
    "drivetrain sweep digits --variants my_grid:VARIANTS               a dictionary, or a function",
    "drivetrain sweep digits --grid 'lr=0.001,0.003' --fork runs/digits",
    "                                                                  all begin with its checkpoint",
    "drivetrain sweep sweep.yaml --parallel 4 --max-seconds 3600       four at once, for an hour",
)


class SweepOptions(ForScript):
    target: Annotated[str, Positional()] = Field(
        description="a recipe, `module:function` that returns a dt.Job, a script, or a YAML file with a sweep"
    )
    grid: Annotated[str, Flag("grid")] = Field(
        "", description="values of each setting: 'lr=0.001,0.003 weight-decay=0,0.1'; what is no setting of drivetrain "
        "is a flag of the script, or an argument of the function"
    )  # fmt: skip
    variants: Annotated[str, Flag("variants")] = Field(
        "", description="`module:name` of a dictionary of lists, a list of dictionaries, or a function that returns one"
    )
    seeds: Annotated[tuple[int, ...], Flag("seeds")] = Field(
        (0,), description="seeds of each variant; a verdict takes six or more (0)"
    )
    metric: Annotated[str, Flag("metric")] = Field(
        "valid_loss", description="the validation metric that decides (valid_loss)"
    )
    mode: Annotated[Literal["auto", "min", "max"], Flag("mode")] = Field(
        "auto", description="whether less or more of it is better; auto goes by its name (auto)"
    )
    halving: Annotated[int | None, Flag("halving")] = Field(
        None, ge=2, description="successive halving: one of so many variants goes on after each rung (off)"
    )
    first_steps: Annotated[int | None, Flag("first-steps")] = Field(
        None, ge=1, description="steps of the first rung (such that the last one is the whole job)"
    )
    fork: Annotated[str, Flag("fork")] = Field(
        "", description="folder of a run, or FOLDER@STEP, whose checkpoint all variants begin with"
    )
    trials: Annotated[int, Flag("trials")] = Field(
        20, ge=1, description="variants that Optuna tries, where the file has a search (20)"
    )
    max_seconds: Annotated[float | None, Flag("max-seconds")] = Field(
        None, gt=0, description="begin nothing more after so long, and pause at the next validation (no limit)"
    )
    max_total_steps: Annotated[int | None, Flag("max-total-steps")] = Field(
        None, ge=1, description="begin nothing more after so many steps of all runs together (no limit)"
    )
    parallel: Annotated[int, Flag("parallel")] = Field(
        1, ge=1, description="runs at once, each in a process, on a GPU of its own where there are some (1)"
    )
    as_json: Annotated[bool, Flag("json")] = Field(False, description="print the result as one line of JSON")

    @property
    def file(self) -> Path | None:
        """The YAML file, where the target is one."""
        return Path(self.target) if self.target.endswith((".yaml", ".yml")) else None


def run(options: SweepOptions, resolved: Resolved) -> int | None:
    """Return None: the work is done in this process, and in those that it starts."""
    return None
