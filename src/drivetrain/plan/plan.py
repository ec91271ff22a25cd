"""A plan: how a job would be run here, each choice with its reason and what else was measured, and what it would take.

As text it is a configuration file again, with the reasons beside the values: `drivetrain train X --config plan.yaml`
pins all of it.
"""

from typing import Any

import yaml

from drivetrain.core.value import Value
from drivetrain.plan.choice import Choice
from drivetrain.plan.tune import Tried


class MemoryForecast(Value):
    """In bytes, on the device that holds the most. What is not known is None."""

    parameters: int
    gradients: int
    optimizer: int | None = None
    activations: int | None = None
    workspace: int | None = None

    @property
    def total(self) -> int | None:
        parts = (self.parameters, self.gradients, self.optimizer, self.activations, self.workspace)
        return None if None in parts else sum(part for part in parts if part is not None)


class Forecast(Value):
    memory: MemoryForecast
    step_seconds: float | None = None  # None: nothing was measured
    job_seconds: float | None = None


class Plan(Value):
    job: str
    global_batch: int
    num_steps: int | None
    choices: dict[str, Choice[Any]]  # by the name of the setting that pins it
    forecast: Forecast
    tried: tuple[Tried, ...] = ()  # what was measured, in that order
    measured: bool = False
    notes: tuple[str, ...] = ()

    def to_yaml(self) -> str:
        """A configuration file with the reasons as comments."""
        how = "measured on this machine" if self.measured else "by rule: nothing was measured"
        lines = [f"# The plan for {self.job}, {how}. `--config` takes this file."]
        lines += [f"# {note}" for note in self.notes]
        lines += [f"{name}: {_scalar(choice.value)}  # {choice.reason}" for name, choice in self.choices.items()]
        return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    """As YAML reads it back: `on` would come back as true."""
    return yaml.safe_dump("auto" if value is None else value).removesuffix("\n...\n").strip()
