"""One optimizer step, enqueued on the device call by call, or captured once as a CUDA graph and replayed."""

from drivetrain.loop.capture import (
    CAPTURED,
    NOT_CAPTURED,
    CapturedStep,
    CapturedStepper,
    CudaRecorder,
    MicroInput,
    own_stream,
)
from drivetrain.loop.capture_joint import JointCapturedStepper
from drivetrain.loop.capture_rules import make_capturable, why_not_captured, why_not_here
from drivetrain.loop.stepper import Stepper

__all__ = [
    "CAPTURED",
    "NOT_CAPTURED",
    "CapturedStep",
    "CapturedStepper",
    "CudaRecorder",
    "JointCapturedStepper",
    "MicroInput",
    "Stepper",
    "make_capturable",
    "own_stream",
    "why_not_captured",
    "why_not_here",
]
