"""`drivetrain continual`: the command of the study `studies/continual`, which only a checkout has."""

from drivetrain.core.studies import load_study

_study = load_study("continual.command")

Options, EXAMPLES, run = _study.Options, _study.EXAMPLES, _study.run
