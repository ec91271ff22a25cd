"""Trains models of `transformers` and `peft`: a job in a few lines."""

from drivetrain.hf.model_job import job

__all__ = ["job"]
