"""Commands that read the records of runs: `report` and `compare`."""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from drivetrain.commands.command import Command
from drivetrain.config import Flag, Positional, Resolved
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.log import on_one_line, printable
from drivetrain.core.run_folder import find_run, write_atomically
from drivetrain.report import PAGE, write_report
from drivetrain.report.compare import Over, RunComparison, compare
from drivetrain.report.page import comparison_page

# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain report RUN`: makes the text, pictures and page of a run again from its records.

COMMAND_REPORT = Command(
    summary="Writes the page, pictures and summary of a run again, from its records.", obeys=("run.output_dir",)
)
EXAMPLES_REPORT = (
    "drivetrain report runs/digits    after a run that was killed meanwhile, or had --no-report",
    "drivetrain report digits         the same, by its name below --output-dir",
)


class ReportOptions(BaseModel):
    run: Annotated[Path, Positional()] = Field(description="the folder of a run")


def run_report(options: ReportOptions, resolved: Resolved) -> int:
    folder = find_run(options.run, resolved.config.run.output_dir)
    before = _written_at(folder / PAGE)
    problems = write_report(folder)
    for problem in problems:
        print(printable(problem))
    if _written_at(folder / PAGE) != before:
        print(f"written: {on_one_line(str(folder / PAGE))}, and the pictures and words beside it")
    return 1 if problems else 0


def _written_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain compare RUN RUN …`: lays runs side by side, and says whether one setting is better than another.

COMMAND_COMPARE = Command(
    summary="Compares runs: curves over each other, what differs, and a verdict with its uncertainty.",
    obeys=("run.output_dir",),
)
EXAMPLES_COMPARE = (
    "drivetrain compare base-0 base-1 new-0 new-1            runs of other seeds are one arm",
    "drivetrain compare runs/base-0 other/runs/new-0         by their folders",
    "drivetrain compare base-0 new-0 --metric valid_accuracy --which best",
    "drivetrain compare base-0 new-0 --common                unfinished, or of other lengths",
    "drivetrain compare base-0 new-0 --json                  for a script; exits with 1 if refused",
)


class CompareOptions(BaseModel):
    runs: Annotated[tuple[Path, ...], Positional()] = Field(
        description="two or more folders of runs, or their names; the first one's configuration is the baseline"
    )
    metric: Annotated[str, Flag("metric")] = Field("", description="the validation metric that decides (valid_loss)")
    mode: Annotated[Literal["auto", "min", "max"], Flag("mode")] = Field(
        "auto", description="whether less or more of it is better; auto goes by its name (auto)"
    )
    which: Annotated[Literal["last", "best"], Flag("which")] = Field(
        "last", description="the last value of each run, or its best (last)"
    )
    over: Annotated[Over, Flag("over")] = Field(
        "samples", description="what the runs must have had equally much of (samples)"
    )
    common: Annotated[bool, Flag("common")] = Field(
        False, description="compare at the last point that all runs reached, where they are unfinished or unequal"
    )
    confidence: Annotated[float, Flag("confidence")] = Field(
        0.95, gt=0.5, lt=1, description="how often all verdicts are right, however often you look (0.95)"
    )
    out: Annotated[Path | None, Flag("out")] = Field(
        None, description="the page to write (compare.html below --output-dir)"
    )
    as_json: Annotated[bool, Flag("json")] = Field(False, description="one line of JSON")


def run_compare(options: CompareOptions, resolved: Resolved) -> int:
    output_dir = resolved.config.run.output_dir
    comparison = compare(
        options.runs,
        metric=options.metric,
        mode=options.mode,
        which=options.which,
        over=options.over,
        common=options.common,
        confidence=options.confidence,
        output_dir=output_dir,
    )
    page = options.out or output_dir / "compare.html"
    if not options.as_json:
        print(printable(str(comparison)), flush=True)  # also where the page cannot be written
    write_page(comparison, page)
    print(json.dumps(comparison.as_plain() | {"page": str(page)}) if options.as_json else f"\nwritten: {page}")
    return 1 if comparison.is_refused else 0


def write_page(comparison: RunComparison, path: Path) -> None:
    try:
        write_atomically(path, comparison_page(comparison))
    except OSError as error:
        raise DrivetrainError(
            f"{path} cannot be written: {error.strerror}", remedy="name another file with --out"
        ) from None
