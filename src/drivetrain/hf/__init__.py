"""Trains models of `transformers` and `peft`: a job in a few lines, and folders that `from_pretrained` opens."""

from drivetrain.hf.exporting import export
from drivetrain.hf.from_trainer import job_from
from drivetrain.hf.model_job import job

__all__ = ["export", "job", "job_from"]
