"""`drivetrain find-lr TARGET`: a range test of the learning rate of a job. Nothing of a run is written."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from rich.console import Console

from drivetrain.api.finding_lr import LrFinding, find_lr
from drivetrain.commands.command import Command, ForScript
from drivetrain.commands.targets import with_job
from drivetrain.config import Flag, Positional, Resolved
from drivetrain.report.lr_picture import draw_range_test

COMMAND = Command(
    summary="Suggests a learning rate: the loss of some steps while the rate rises. No run is written.",
    all_but=("watch", "validation", "plan", "budget", "optimizer", "checkpoint"),
    obeys=("optimizer.weight_decay", "optimizer.clip_norm", "checkpoint.init_from"),
)
EXAMPLES = (
    "drivetrain find-lr digits                       runs/digits.find-lr.png and .json",
    "drivetrain find-lr train.py --highest 1         the job of a script, up to a rate of 1",
    "drivetrain train digits --lr 3e-3               what was found, in training",
)


class FindLrOptions(ForScript):
    target: Annotated[str, Positional()] = Field(description="a recipe, `module:function` or a script, as for `train`")
    lowest: Annotated[float, Flag("lowest")] = Field(1e-7, gt=0, description="learning rate of the first step")
    highest: Annotated[float, Flag("highest")] = Field(10.0, gt=0, description="learning rate of the last step")
    steps: Annotated[int, Flag("steps")] = Field(100, ge=10, description="how many steps are trained")
    out: Annotated[Path | None, Flag("out")] = Field(
        None, description="the picture to write, with a .json beside it (default: NAME.find-lr.png in output_dir)"
    )


def run(options: FindLrOptions, resolved: Resolved) -> int:
    config = resolved.config
    found = with_job(
        options.target,
        config,
        lambda job: find_lr(job, config, lowest=options.lowest, highest=options.highest, num_steps=options.steps),
        options.arguments,
    )
    picture = options.out or config.run.output_dir / f"{found.job}.find-lr.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(picture_of(found))
    picture.with_suffix(".json").write_text(found.model_dump_json(indent=2) + "\n")
    show(found, picture, Console(highlight=False))
    return 0


def picture_of(found: LrFinding) -> bytes:
    tenth = None if found.diverged_at is None else found.diverged_at / 10
    marks = (("steepest descent", found.steepest), ("a tenth of divergence", tenth))
    return draw_range_test(f"{found.job}: learning rate", found.rates, found.losses, found.smoothed, marks)


def show(found: LrFinding, picture: Path, console: Console) -> None:
    if found.steepest is None:
        console.print("the loss did not fall: no rate is suggested; try more steps, or a higher highest rate")
    else:
        console.print(f"steepest descent       {found.steepest:.2g}")
    if found.diverged_at is None:
        console.print("divergence             not seen")
    else:
        console.print(f"a tenth of divergence  {found.diverged_at / 10:.2g}")
    if found.suggestion is not None:
        console.print(f"suggestion             --lr {found.suggestion:.2g}, the lower of these")
    console.print(f"picture                {picture}", soft_wrap=True)
