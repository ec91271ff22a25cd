"""The list of flags. It grows only together with code that obeys the new flag."""

import re
from pathlib import Path

import pytest

from drivetrain.cli import COMMANDS, flag_parser
from drivetrain.config import BY_NAME, SETTINGS

FLAGS_OF_SECTION = {
    "run": ["--name", "--output-dir", "--run.name", "--run.output-dir", "--run.seed", "--seed"],
    "device": [
        "--device",
        "--device-assertions",
        "--device-ids",
        "--device.assertions",
        "--device.device",
        "--device.ids",
        "--device.mode",
        "--gpu-mode",
    ],
    "precision": ["--amp-dtype", "--precision", "--precision-type", "--precision.dtype"],
    "batch": ["--accumulation-steps", "--batch-size", "--batch.accumulation", "--batch.size"],
    "budget": ["--budget.epochs", "--budget.max-steps", "--epochs", "--max-steps"],
    "optimizer": ["--learning-rate", "--optimizer.learning-rate"],
    "data": ["--data.num-workers", "--data.pin-memory", "--num-workers", "--pin-memory"],
    "compile": ["--compile", "--compile-mode", "--compile.enabled", "--compile.mode"],
}
OWN_FLAGS = {
    "check": ["--json"],
    "verify": ["--json", "--only", "--quick", "--save", "--time-limit"],
    "config": ["--json"],
    "train": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_each_command(command: str) -> None:
    expected = {"--config", "--help", *OWN_FLAGS[command]}
    for section in COMMANDS[command].sections:
        expected |= set(FLAGS_OF_SECTION[section])
    assert set(flag_parser(command, COMMANDS[command].load()).flags) == expected


def test_the_list_covers_every_section() -> None:
    assert set(FLAGS_OF_SECTION) == {setting.section for setting in SETTINGS}


def test_no_two_fields_share_a_name() -> None:
    assert len(BY_NAME) == sum(len(set(setting.names)) for setting in SETTINGS)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_field_is_obeyed_somewhere(setting) -> None:
    """A field nobody reads is a flag that does nothing. `config` itself only stores and checks them."""
    package = Path(__file__).parents[2] / "src" / "drivetrain"
    readers = [path for path in package.rglob("*.py") if "config" not in path.relative_to(package).parts]
    use = re.compile(rf"\b{setting.section}\.{setting.field}\b")
    assert any(use.search(path.read_text(encoding="utf-8")) for path in readers), f"{setting.name} does nothing"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_field_explains_itself(setting) -> None:
    assert len(setting.help) > 10
    assert setting.allowed
