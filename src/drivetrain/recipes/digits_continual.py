"""Handwritten digits, turned further task by task: one method of the study `studies/continual` as a recipe."""

from drivetrain.api.training import Result
from drivetrain.config import Config
from drivetrain.core.studies import load_study
from drivetrain.job import Job


def job(config: Config) -> Job:
    made: Job = load_study("continual.recipe").job(config)
    return made


def show(result: Result) -> None:
    load_study("continual.recipe").show(result)
