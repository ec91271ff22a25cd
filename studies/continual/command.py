"""`drivetrain continual`: trains tasks one after the other, by several methods, and shows what each has kept."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, Field
from rich.console import Console

from drivetrain.config import Config, Flag, Resolved
from drivetrain.recipes.mnist import Name
from studies.continual.comparison import FILE, Book, Study, compare, summary, tune
from studies.continual.data import load_images
from studies.continual.methods import MethodSettings
from studies.continual.pictures import draw_all
from studies.continual.screen import Screen, legend, table, verdicts
from studies.continual.tasks import TaskKind, make_tasks
from studies.continual.tuned import scale_of, tuned

MethodName = Literal[
    "joint",
    "dense",
    "dense-small",
    "ewc",
    "dense+replay",
    "fixed",
    "fixed-near",
    "fixed+replay",
    "growing",
    "growing+sleep",
]
EXAMPLES = (
    "drivetrain continual                                      rotated digits, all methods, 3 seeds",
    "drivetrain continual --tasks split --methods dense,ewc,growing+sleep --seeds 5",
    "drivetrain continual --tasks permuted --tune              settings are chosen here",
    "drivetrain continual --data mnist --data-dir mnist        MNIST, from its four files",
)


class ContinualOptions(BaseModel):
    tasks: Annotated[TaskKind, Flag("tasks")] = Field(
        "rotated", description="pixels in other orders, pictures turned, or a few classes at a time"
    )
    num_tasks: Annotated[int, Flag("num-tasks")] = Field(5, ge=1, description="how many tasks")
    methods: Annotated[tuple[MethodName, ...], Flag("methods")] = Field(
        get_args(MethodName), min_length=1, description="which ones, with commas between them"
    )
    seeds: Annotated[int, Flag("seeds")] = Field(3, ge=1, description="how many; each has its own tasks and weights")
    data: Annotated[Name, Flag("data")] = Field("digits", description="what the tasks are made of")
    data_dir: Annotated[Path | None, Flag("data-dir")] = Field(
        None, description="folder with the four files of MNIST or Fashion-MNIST"
    )
    steps: Annotated[int | None, Flag("steps")] = Field(
        None, ge=1, description="optimizer steps for each task (default: by the data)"
    )
    tune: Annotated[bool, Flag("tune")] = Field(
        False, description="first choose the settings of each method, on samples held out of training"
    )


def run(options: ContinualOptions, resolved: Resolved) -> int:
    config = resolved.config
    # A file or a pipe has no width: a table must not lose figures for it.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    console = Console(highlight=False, quiet=config.watch.quiet, width=width)
    train, test = load_images(options.data, options.data_dir)
    study = Study(options.data, options.tasks, options.num_tasks, scale_of(options.data, options.steps), train, test)
    folder = config.run.output_dir / (config.run.name or f"continual-{options.data}-{options.tasks}")
    folder.mkdir(parents=True, exist_ok=True)
    book = Book(folder, study)
    inner = _config_of_runs(config, folder)
    names = [task.name for task in make_tasks(options.tasks, train, test, options.num_tasks, seed=0)]
    if options.tasks == "split" and options.seeds > 1:  # each seed has other classes together
        names = [f"task {number}" for number in range(1, options.num_tasks + 1)]

    settings: dict[str, MethodSettings] = {
        method: book.chosen(method) or tuned(options.data, options.tasks, method) for method in options.methods
    }
    with Screen(console, len(options.methods) * options.seeds, options.num_tasks) as screen:
        if options.tune:
            settings = {method: tune(book, method, inner, screen) for method in options.methods}
        outcomes = compare(book, settings.__getitem__, options.methods, range(options.seeds), inner, screen)
    book.write()
    console.print(table(summary(study, outcomes), f"{options.data}, {options.num_tasks} {options.tasks} tasks"))
    console.print()
    for line in (*legend(options.methods), "", *verdicts(outcomes)):
        console.print(line)
    console.print(f"\nResults are in {folder}:")
    for path in (folder / FILE, *draw_all(folder, study, outcomes, names)):
        console.print(f"  {path.name}")
    return 0


def _config_of_runs(config: Config, folder: Path) -> Config:
    """Return the configuration of each training: a quiet run below the comparison's folder."""
    run = config.run.model_copy(update={"output_dir": folder / "runs", "name": None})
    watch = config.watch.model_copy(update={"quiet": True, "report": False, "log_every": 0})
    plan = config.plan.model_copy(update={"auto_optimize": False})  # runs of seconds: to try ways takes longer
    kernels = config.kernels.model_copy(update={"num_threads": config.kernels.num_threads or 1})
    return config.model_copy(update={"run": run, "watch": watch, "plan": plan, "kernels": kernels})
