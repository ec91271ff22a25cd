"""The folder that everything of one run lands in. Nothing in it is ever overwritten by another run."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError


class RunFolder:
    """`output_dir/name`, made new."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, output_dir: Path, name: str | None, default_name: str) -> "RunFolder":
        """A new folder. A name that was given must be free; the default name gets a number where it is taken."""
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            return cls._named(output_dir, name) if name else cls._numbered(output_dir, default_name)
        except OSError as error:
            raise DrivetrainError(
                f"the run folder cannot be made below {output_dir}: {error.strerror}",
                remedy="name a folder you can write to with --output-dir",
            ) from None

    @classmethod
    def _named(cls, output_dir: Path, name: str) -> "RunFolder":
        try:
            (output_dir / name).mkdir()
        except FileExistsError:
            raise DrivetrainError(
                f"{output_dir / name} is there already, and is left as it is",
                remedy="choose another --name, or move that folder away",
            ) from None
        return cls(output_dir / name)

    @classmethod
    def _numbered(cls, output_dir: Path, default_name: str) -> "RunFolder":
        number = 1
        while True:
            path = output_dir / (default_name if number == 1 else f"{default_name}-{number}")
            try:
                path.mkdir()  # fails if another process was faster, so two runs never share a folder
            except FileExistsError:
                number += 1
            else:
                return cls(path)

    def write(self, name: str, content: str | bytes) -> Path:
        """A whole file, or the one before it: never a half."""
        path = self.path / name
        temporary = path.with_name(f".{name}.tmp")
        data = content.encode() if isinstance(content, str) else content
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        return path

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """One line of JSON, in one write, so that a crash leaves whole lines."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
