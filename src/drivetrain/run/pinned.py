"""Applies what a configuration says of a job: its length, and what a plan's file pins, which has to fit the job."""

from dataclasses import replace

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.job import Job


def of_asked_length(job: Job, config: Config) -> Job:
    """Return the job with the length of `epochs` and `max_steps`; where they are not set, the job's own."""
    budget = config.budget
    if job.length_is_read or not (budget.epochs or budget.max_steps):
        return job
    try:
        return replace(job, epochs=budget.epochs or job.epochs, max_steps=budget.max_steps or job.max_steps)
    except ConfigError as error:  # the job itself was all right
        names = {"Job.epochs": "budget.epochs", "Job.max_steps": "budget.max_steps"}
        raise ConfigError([
            replace(problem, key=names.get(problem.key, problem.key), source="the configuration of this run")
            for problem in error.problems
        ]) from None  # fmt: skip


def refuse_other_batch(config: Config, global_batch: int) -> None:
    """Raise where the plan was made for steps of another size: its choices say nothing of this job then."""
    planned, file = config.plan_pins.global_batch, config.plan.file
    if planned is not None and planned != global_batch:
        message = f"{file}: it is a plan for steps of {planned} samples, and a step of this job has {global_batch}"
        raise ConfigError([Problem("--plan", message, str(file), remedy=plan_anew(config))])


def plan_anew(config: Config) -> str:
    """Return a remedy that always helps."""
    return f"plan anew, with the flags of this run: `drivetrain plan TARGET --out {config.plan.file}`"
