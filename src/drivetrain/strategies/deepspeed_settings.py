"""Reads the part of a configuration that is DeepSpeed's, with a user's own file."""

from dataclasses import dataclass, field
from typing import Any

from drivetrain.config import Config
from drivetrain.strategies.deepspeed_config import asks_for_fp16, read_own, settings_in, stage_of, told_of_fp16


@dataclass(frozen=True)
class Zero:
    """Holds the ZeRO stage, and the user's file with its name; an empty one where there is none."""

    stage: int
    own: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    notes: tuple[str, ...] = ()  # what the file asks for and does not get

    @classmethod
    def of(cls, config: Config, *, on_gpu: bool = True) -> "Zero":
        """Read the DeepSpeed settings of a configuration.

        Without a GPU the file's fp16 is left out: it says how a GPU computes, not what the job means.
        """
        path = config.deepspeed.config
        own, file = ({}, "") if path is None else (read_own(path), path.name)
        notes = told_of_fp16(own, file)
        if asks_for_fp16(own) and not on_gpu:
            del own["fp16"]
            notes = [f"fp16 needs a GPU, and this run uses the CPU: fp16 in {file} is left out"]
        return cls(stage_of(config.deepspeed.stage, own), own, file, tuple(notes))

    def obeyed(self, config: Config) -> tuple[Config, list[str]]:
        """Return the configuration with the file's values in settings that nothing else set, and notes to report."""
        sections: dict[str, Any] = {}
        notes = list(self.notes)
        for name, value in settings_in(self.own).items():
            section, _, setting = name.partition(".")
            current = sections.get(section, getattr(config, section))
            is_free = getattr(current, setting) in (None, "auto") and getattr(current, "mixed", None) is None
            if is_free:
                sections[section] = current.model_copy(update={setting: value})
                notes.append(f"{name} is {value}, as {self.file} says")
        return config.model_copy(update=sections), notes
