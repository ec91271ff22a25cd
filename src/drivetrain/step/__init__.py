"""One optimizer step, enqueued on the device call by call, or captured once as a CUDA graph and replayed."""

from drivetrain.step.captured import CAPTURED, NOT_CAPTURED, CapturedStep, CapturedStepper, CudaRecorder, own_stream
from drivetrain.step.reasons import make_capturable, why_not_captured, why_not_here
from drivetrain.step.stepper import Stepper

__all__ = [
    "CAPTURED",
    "NOT_CAPTURED",
    "CapturedStep",
    "CapturedStepper",
    "CudaRecorder",
    "Stepper",
    "make_capturable",
    "own_stream",
    "why_not_captured",
    "why_not_here",
]
