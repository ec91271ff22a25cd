"""Decides what would be done on this machine, each choice with its reason."""

from drivetrain.plan.rules import TARGET_BATCH, Choice, Pins, Settings, choose_settings

__all__ = ["TARGET_BATCH", "Choice", "Pins", "Settings", "choose_settings"]
