"""Other trainers, each driven the way its own documentation tells users to, as trainers to prove.

An adapter does what an ordinary user of that trainer would write: no fix of ours is in it. Its package is imported when
the adapter is asked for, and not before.
"""

from collections.abc import Callable, Mapping

from drivetrain.proving.adapters.accelerate import accelerate_subject
from drivetrain.proving.adapters.deepspeed import deepspeed_subject
from drivetrain.proving.adapters.hf_trainer import hf_subject
from drivetrain.proving.adapters.lightning import lightning_subject
from drivetrain.proving.adapters.plain import LoopState, plain_subject
from drivetrain.proving.checks import Subject

ADAPTERS: Mapping[str, Callable[[], Subject]] = {
    "plain": plain_subject,
    "accelerate": accelerate_subject,
    "lightning": lightning_subject,
    "hf": hf_subject,
    "deepspeed": deepspeed_subject,
}

__all__ = [
    "ADAPTERS",
    "LoopState",
    "accelerate_subject",
    "deepspeed_subject",
    "hf_subject",
    "lightning_subject",
    "plain_subject",
]
