"""The one typed configuration: fields in `schema`, names in `settings`, files and checks in `resolve`."""

from drivetrain.config.resolve import Resolved, configure, from_yaml, resolve, value_problem
from drivetrain.config.schema import Allowed, Config, Flag, Positional, Rest
from drivetrain.config.settings import BY_NAME, SECTIONS, SETTINGS, Given, Setting, nearest, normal, settings_of

__all__ = [
    "BY_NAME",
    "SECTIONS",
    "SETTINGS",
    "Allowed",
    "Config",
    "Flag",
    "Given",
    "Positional",
    "Resolved",
    "Rest",
    "Setting",
    "configure",
    "from_yaml",
    "nearest",
    "normal",
    "resolve",
    "settings_of",
    "value_problem",
]
