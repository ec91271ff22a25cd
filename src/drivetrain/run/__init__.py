"""One run on one rank, for every kind of training loop: its setup, and the records that are written about it."""

from drivetrain.run.command_context import configured, done_instead, last_one_finished, note_end, num_trained
from drivetrain.run.model_factory import take_weights, write_down
from drivetrain.run.recorder import (
    draws_always,
    open_recorder,
    tell_batch_size,
    tell_capture,
    tell_changes,
    tell_end,
    tell_extension,
    tell_notes,
    tell_plain_optimizer,
    tell_rate,
    tell_repeatable,
    tell_sharding,
    tell_strategy,
)
from drivetrain.run.result import Best, Result, Which, best_of, best_or_last, checkpoint_of, folder_of, load_whole
from drivetrain.run.saver import CHECKPOINTS, CheckpointSaver, State, falls_back, make_checkpointer, make_schedule
from drivetrain.run.session import SOURCE, Session

__all__ = [
    "CHECKPOINTS",
    "SOURCE",
    "Best",
    "CheckpointSaver",
    "Result",
    "Session",
    "State",
    "Which",
    "best_of",
    "best_or_last",
    "checkpoint_of",
    "configured",
    "done_instead",
    "draws_always",
    "falls_back",
    "folder_of",
    "last_one_finished",
    "load_whole",
    "make_checkpointer",
    "make_schedule",
    "note_end",
    "num_trained",
    "open_recorder",
    "take_weights",
    "tell_batch_size",
    "tell_capture",
    "tell_changes",
    "tell_end",
    "tell_extension",
    "tell_notes",
    "tell_plain_optimizer",
    "tell_rate",
    "tell_repeatable",
    "tell_sharding",
    "tell_strategy",
    "write_down",
]
