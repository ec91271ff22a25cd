"""Adapters of other trainers, each driven the way its own documentation tells users to, as trainers to prove.

An adapter does what an ordinary user of that trainer would write: no fix of ours is in it. Its package is imported when
the adapter is asked for, and not before.
"""

from drivetrain.proving.adapters.accelerate import accelerate_subject
from drivetrain.proving.adapters.deepspeed import deepspeed_subject
from drivetrain.proving.adapters.finding import ADAPTERS, find_subject
from drivetrain.proving.adapters.hf_trainer import hf_subject
from drivetrain.proving.adapters.lightning import lightning_subject
from drivetrain.proving.adapters.plain import LoopState, plain_subject

__all__ = [
    "ADAPTERS",
    "LoopState",
    "accelerate_subject",
    "deepspeed_subject",
    "find_subject",
    "hf_subject",
    "lightning_subject",
    "plain_subject",
]
