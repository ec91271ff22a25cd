"""Handwritten digits, turned further task by task: one method of the study `studies/continual` as a recipe."""

from drivetrain.api.training import Result
from drivetrain.config import Config
from drivetrain.core.plugins import load_study
from drivetrain.job import Job
from drivetrain.recipes.recipe import Recipe


def job(config: Config) -> Job:
    made: Job = load_study("continual.recipe").job(config)
    return made


def show(result: Result) -> None:
    load_study("continual.recipe").show(result)


RECIPE = Recipe(make=job, about="digits, turned further task by task, by experts that come as needed", show=show)
