"""`drivetrain report RUN`: makes the text, pictures and page of a run again from its records."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from drivetrain.commands.command import Command
from drivetrain.config import Positional, Resolved
from drivetrain.core.run_folder import find_run
from drivetrain.core.safe_text import on_one_line, printable
from drivetrain.report import PAGE, write_report

COMMAND = Command(
    summary="Writes the page, pictures and summary of a run again, from its records.", obeys=("run.output_dir",)
)
EXAMPLES = (
    "drivetrain report runs/digits    after a run that was killed meanwhile, or had --no-report",
    "drivetrain report digits         the same, by its name below --output-dir",
)


class ReportOptions(BaseModel):
    run: Annotated[Path, Positional()] = Field(description="the folder of a run")


def run(options: ReportOptions, resolved: Resolved) -> int:
    folder = find_run(options.run, resolved.config.run.output_dir)
    problems = write_report(folder)
    page = on_one_line(str(folder / PAGE))
    print(printable("\n".join(problems)) or f"written: {page}, and the pictures and words beside it")
    return 1 if problems else 0
