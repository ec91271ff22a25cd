"""Machines to test with: recorded ones (the real detect() on a real machine) and made-up ones.

`load("4x-l4")` gives its Hardware; `names()` lists them. tests/fixtures/hardware/record.py records the present machine.
"""

from pathlib import Path

from drivetrain.hardware import Hardware

FOLDER = Path(__file__).parent / "fixtures" / "hardware"


def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load(name: str) -> Hardware:
    return Hardware.from_json((FOLDER / f"{name}.json").read_bytes())
