"""Checkpoints: named tensors and JSON in a folder that is valid or does not exist. It knows nothing of models."""

from drivetrain.checkpoint.background import BackgroundSaver, HeldState, SaveOutcome
from drivetrain.checkpoint.checkpoint import Checkpoint, TensorInfo
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.files import (
    CheckpointDamagedError,
    CheckpointError,
    Files,
    NewerFormatError,
    SharedFileError,
)
from drivetrain.checkpoint.manifest import FORMAT_VERSION
from drivetrain.checkpoint.tensor_file import refuse_unstorable_meta, refuse_unstorable_shards
from drivetrain.checkpoint.weights import LiveTensors, Weights, WeightsTaken, export, load_weights, read_weights
from drivetrain.core.state import Shard

__all__ = [
    "FORMAT_VERSION",
    "BackgroundSaver",
    "Checkpoint",
    "CheckpointDamagedError",
    "CheckpointError",
    "Checkpointer",
    "Files",
    "HeldState",
    "LiveTensors",
    "NewerFormatError",
    "SaveOutcome",
    "Shard",
    "SharedFileError",
    "TensorInfo",
    "Weights",
    "WeightsTaken",
    "export",
    "load_weights",
    "read_weights",
    "refuse_unstorable_meta",
    "refuse_unstorable_shards",
]
