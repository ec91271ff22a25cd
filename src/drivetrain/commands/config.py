"""`drivetrain config`: shows the effective configuration, and the source of each value."""

import json
import sys
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field

from drivetrain.commands.command import Command
from drivetrain.config.resolve import Resolved
from drivetrain.config.schema import Flag
from drivetrain.config.settings import SECTIONS, SETTINGS

COMMAND = Command(summary="Prints the effective configuration, and where each value came from.", all_but=())
EXAMPLES = (
    "drivetrain config                                  every key with its default",
    "drivetrain config --config train.yaml --epochs 3   what would be used, and where it is from",
    "drivetrain config > train.yaml                     a file to start from",
)


class ConfigOptions(BaseModel):
    json_output: Annotated[bool, Flag("json")] = Field(False, description="print JSON instead of YAML")


def run(options: ConfigOptions, resolved: Resolved) -> int:
    sys.stdout.write(as_json(resolved) if options.json_output else as_yaml(resolved))
    return 0


def as_yaml(resolved: Resolved) -> str:
    """Return YAML that can be used as a configuration file again, with the source of each value after it."""
    values = resolved.config.model_dump(mode="json")
    lines = []
    for section, about in SECTIONS.items():
        lines.append(f"{section}:  # {about.splitlines()[0]}")
        for setting in SETTINGS:
            if setting.section == section:
                entry = f"  {setting.field}: {_scalar(values[section][setting.field], setting.takes_auto)}"
                lines.append(f"{entry:<34} # {resolved.source(setting.name)}")
    return "\n".join(lines) + "\n"


def as_json(resolved: Resolved) -> str:
    values = resolved.config.model_dump(mode="json")
    table = {
        setting.name: {
            "value": values[setting.section][setting.field],
            "source": resolved.source(setting.name),
        }
        for setting in SETTINGS
    }
    return json.dumps(table, indent=2) + "\n"


def _scalar(value: Any, takes_auto: bool) -> str:
    if value is None and takes_auto:
        return "auto"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
