"""`drivetrain continual`: the command of the study `studies/continual`, which only a checkout has."""

from drivetrain.commands.command import Command
from drivetrain.core.plugins import load_study

COMMAND = Command(
    summary="Tasks one after the other: what networks and growing mixtures keep of the first",
    obeys=(
        "run.output_dir",
        "device.mode",
        "device.device",
        "device.ids",
        "run.name",
        "precision",
        "kernels",
        "watch.quiet",
    ),
)

_study = load_study("continual.command")

EXAMPLES, run = _study.EXAMPLES, _study.run
