"""The one typed configuration: fields in `schema`, names in `settings`, files and checks in `resolve`."""

from drivetrain.config.resolve import Resolved, configure, from_yaml, resolve, value_problem
from drivetrain.config.schema import AfterDashes, Allowed, Config, Flag, Positional, Rest
from drivetrain.config.settings import (
    BY_NAME,
    FOREIGN,
    SECTIONS,
    SETTINGS,
    Given,
    Setting,
    as_launched,
    nearest,
    normal,
    settings_of,
)

__all__ = [
    "BY_NAME",
    "FOREIGN",
    "SECTIONS",
    "SETTINGS",
    "AfterDashes",
    "Allowed",
    "Config",
    "Flag",
    "Given",
    "Positional",
    "Resolved",
    "Rest",
    "Setting",
    "as_launched",
    "configure",
    "from_yaml",
    "nearest",
    "normal",
    "resolve",
    "settings_of",
    "value_problem",
]
