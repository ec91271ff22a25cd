"""Proves on the user's own job that a trainer computes what a plain loop computes, repeats, and resumes exactly."""

from drivetrain.proving.case import Case, Subject, Trainer
from drivetrain.proving.checks import FULL, Extent, prove_subject
from drivetrain.proving.classify import Certificate, Check, Classification, Kind
from drivetrain.proving.recorder import Recorder

__all__ = [
    "FULL",
    "Case",
    "Certificate",
    "Check",
    "Classification",
    "Extent",
    "Kind",
    "Recorder",
    "Subject",
    "Trainer",
    "prove_subject",
]
