"""Handwritten digits, turned further task by task, learned by a mixture that grows where inputs are new, and sleeps.

`drivetrain continual` trains this and other methods side by side.
"""

from dataclasses import replace
from statistics import fmean

from drivetrain.api.training import Result
from drivetrain.config import Config
from drivetrain.core.run_folder import read_rows
from drivetrain.job import Job
from drivetrain.moe import LoadReport
from studies.continual.data import load_images
from studies.continual.methods import METHODS, make_job
from studies.continual.scores import scores_of
from studies.continual.tasks import make_tasks
from studies.continual.tuned import SCALES, tuned

NUM_TASKS = 5
METHOD = "growing+sleep"


def job(config: Config) -> Job:
    train, test = load_images("digits", None)
    scale, settings = SCALES["digits"], tuned("digits", "rotated", METHOD)
    asked = config.batch_asked
    scale = replace(scale, batch=(asked.size or scale.batch) * (asked.accumulation or 1))
    if config.budget.epochs:  # of each task, up to a whole number of looks
        steps = config.budget.epochs * len(train.labels) / scale.batch
        scale = replace(scale, steps_per_task=max(1, round(steps / scale.look)) * scale.look)
    if config.optimizer.learning_rate:
        settings = replace(settings, learning_rate=config.optimizer.learning_rate)
    seed = config.run.seed
    tasks = make_tasks("rotated", train, test, NUM_TASKS, seed)
    made, _ = make_job("digits-continual", METHODS[METHOD], tasks, scale, settings, seed)
    hooks = [*made.hooks, LoadReport(scale.look)]
    return replace(made, max_steps=config.budget.max_steps, hooks=hooks)


def show(result: Result) -> None:
    """Print the accuracy on every task after each."""
    events, _ = read_rows(result.folder / "events.jsonl")
    after = [event for event in events if event.get("event") == "task"]
    matrix = [event["accuracy"] for event in after]
    if not matrix:
        print("\nIt ended before its first task did.")
        return
    print("\nAccuracy (%) on each task, and experts:")
    for number, event in enumerate(after, start=1):
        row = "  ".join(f"{100 * value:5.1f}" for value in event["accuracy"])
        print(f"  after task {number}   {row}   {event['experts']:3} experts")
    if len(matrix) == NUM_TASKS:
        scores = scores_of(matrix)
        print(f"{scores.accuracy:.1%} over all tasks in the end; {scores.forgetting:.1%} were forgotten.")
    else:
        print(f"{fmean(matrix[-1][: len(matrix)]):.1%} over the tasks so far.")
    print("`drivetrain continual` compares this with other methods.")
    print(f"Results are in {result.folder}")
