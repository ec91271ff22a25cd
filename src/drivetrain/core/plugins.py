"""Finds what other packages can bring: strategies, trackers. Names are known without importing anything.

Ours are the modules of a folder. Others are entry points of a group, which gives them a name, or are given as
`package.module:ATTRIBUTE`, which also works in files and in processes that a launcher starts.
"""

import sys
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError


class Plugins:
    """One kind of thing that can be brought.

    Args:
        kind: what one is called in messages.
        group: the group of the entry points.
        package: the package of ours, below `drivetrain`; its modules are named as the things are.
        attribute: what such a module has.
    """

    def __init__(self, kind: str, group: str, package: str, attribute: str) -> None:
        self.kind, self.group, self._attribute = kind, group, attribute
        self._package = f"drivetrain.{package}"
        self._folder = Path(__file__).parents[1].joinpath(*package.split("."))

    def names(self) -> tuple[str, ...]:
        """Return the names of all: the modules of our folder, then the entry points of other packages."""
        own = self._own
        return (*own, *(name for name in sorted(_entry_points(self.group)) if name not in own))

    @cached_property
    def _own(self) -> tuple[str, ...]:
        return tuple(sorted(path.stem for path in self._folder.glob("*.py") if not path.stem.startswith("_")))

    def target(self, name: str) -> str:
        """Return where one is, as `package.module:ATTRIBUTE`; empty for an unknown name."""
        if ":" in name:
            return name
        if self.own_file(f"{self._package}.{name}") is not None:
            return f"{self._package}.{name}:{self._attribute}"
        return _entry_points(self.group).get(name, "")

    def own_file(self, module: str) -> Path | None:
        """Return the file of a module of ours; None for other modules."""
        package, _, name = module.rpartition(".")
        path = self._folder / f"{name}.py"
        return path if package == self._package and path.is_file() else None

    def load(self, name: str) -> Any:
        """Import one by its name. The module of `package.module:ATTRIBUTE` may also be in the current folder."""
        target = self.target(name)
        if not target:
            allowed = ", ".join(self.names())
            raise DrivetrainError(
                f"there is no {self.kind} {name}", remedy=f"use one of {allowed}, or package.module:{self._attribute}"
            )
        module, _, attribute = target.partition(":")
        if target == name and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # last, so that it hides nothing
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise DrivetrainError(
                f"the {self.kind} {name} cannot be loaded: {error}",
                remedy=f"name it as package.module:{self._attribute}, or in the entry-point group {self.group}",
            ) from error


@cache
def _entry_points(group: str) -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=group)}


STRATEGIES = Plugins("strategy", "drivetrain.strategies", "strategies.kinds", "SPEC")
TRACKERS = Plugins("tracker", "drivetrain.trackers", "monitor.trackers", "prepare")
