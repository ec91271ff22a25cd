"""One run on one rank, whoever writes its loop: how it is set up, and what is written of it."""

from drivetrain.run.books import Books
from drivetrain.run.setup import CHECKPOINTS, Setup, configured, num_trained

__all__ = ["CHECKPOINTS", "Books", "Setup", "configured", "num_trained"]
