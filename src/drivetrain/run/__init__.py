"""One run on one rank, for every kind of training loop: its setup, and the records that are written about it."""

from drivetrain.run.command_context import configured, done_instead, last_one_finished, note_end, num_trained
from drivetrain.run.model_factory import take_weights, write_down
from drivetrain.run.recorder import (
    open_recorder,
    tell_batch_size,
    tell_capture,
    tell_changes,
    tell_notes,
    tell_plain_optimizer,
    tell_repeatable,
    tell_sharding,
    tell_strategy,
)
from drivetrain.run.saver import CHECKPOINTS, CheckpointSaver, Result, State, Which, checkpoint_of
from drivetrain.run.session import SOURCE, Session

__all__ = [
    "CHECKPOINTS",
    "SOURCE",
    "CheckpointSaver",
    "Result",
    "Session",
    "State",
    "Which",
    "checkpoint_of",
    "configured",
    "done_instead",
    "last_one_finished",
    "note_end",
    "num_trained",
    "open_recorder",
    "take_weights",
    "tell_batch_size",
    "tell_capture",
    "tell_changes",
    "tell_notes",
    "tell_plain_optimizer",
    "tell_repeatable",
    "tell_sharding",
    "tell_strategy",
    "write_down",
]
