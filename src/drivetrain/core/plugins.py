"""Finds what other packages can bring: strategies, trackers, recipes, commands. Nothing is imported to know the names.

Ours are the modules of a folder that have a certain attribute. Others are entry points of a group, which gives them a
name, or are given as `package.module:ATTRIBUTE`, which also works in files and in processes that a launcher starts.
"""

import re
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
        attribute: what such a module has; modules without it are something else.
        dashed: whether names are written with dashes, where the modules have underscores.
    """

    def __init__(self, kind: str, group: str, package: str, attribute: str, dashed: bool = False) -> None:
        self.kind, self.group, self.attribute, self._dashed = kind, group, attribute, dashed
        self._package = f"drivetrain.{package}"
        self._folder = Path(__file__).parents[1].joinpath(*package.split("."))

    def names(self) -> tuple[str, ...]:
        """Return the names of all: the modules of our folder, then the entry points of other packages."""
        own = self._own
        return (*own, *(name for name in sorted(_entry_points(self.group)) if name not in own))

    @cached_property
    def _own(self) -> dict[str, str]:
        """The module of each of ours, by name."""
        has_it = re.compile(rf"^(def )?{self.attribute}\b", re.MULTILINE)
        found = {}
        modules = {path.stem: path for path in self._folder.glob("*.py") if path.name != "__init__.py"}
        modules |= {path.parent.name: path for path in self._folder.glob("*/__init__.py")}
        for module, path in modules.items():
            if has_it.search(path.read_text(encoding="utf-8")):
                found[module.replace("_", "-") if self._dashed else module] = f"{self._package}.{module}"
        return dict(sorted(found.items()))

    def target(self, name: str) -> str:
        """Return where one is, as `package.module:ATTRIBUTE`; empty for an unknown name."""
        if ":" in name:
            return name
        own = self._own.get(name)
        return f"{own}:{self.attribute}" if own is not None else _entry_points(self.group).get(name, "")

    def source(self, name: str) -> Path | None:
        """Return the file that one is in, found as Python would, without importing the packages around it."""
        module = self.target(name).partition(":")[0]
        if not module:
            return None
        if module in self._own.values():
            path = self._folder / module.rpartition(".")[2]
            return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return _source_of(module)

    def named(self, thing: Any) -> Any:
        """Return the name of an object that was given in place of one, since configurations are plain text.

        It is `package.module:ATTRIBUTE` of the module that has it at its top level. Plain values are returned as they
        are.
        """
        if isinstance(thing, str | int | float | bytes | Path | dict):
            return thing
        found = [
            (module_name, attribute)
            for module_name, module in list(sys.modules.items())
            for attribute, value in list(getattr(module, "__dict__", {}).items())
            if value is thing
        ]
        if not found:
            raise ValueError(f"no module has this {self.kind} at its top level, so other processes cannot find it")
        made_in = getattr(thing, "__module__", None)  # for a function; others have imported it
        module_name, attribute = min(found, key=lambda at: (at[0] != made_in, at[0] == "__main__"))
        own = {module: name for name, module in self._own.items()}
        return own.get(module_name, f"{module_name}:{attribute}")

    def load(self, name: str) -> Any:
        """Import one by its name. The module of `package.module:ATTRIBUTE` may also be in the current folder."""
        target = self.target(name)
        if not target:
            allowed = ", ".join(self.names())
            raise DrivetrainError(
                f"there is no {self.kind} {name}", remedy=f"use one of {allowed}, or package.module:{self.attribute}"
            )
        module, _, attribute = target.partition(":")
        if target == name and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # last, so that it hides nothing
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise DrivetrainError(
                f"the {self.kind} {name} cannot be loaded: {error}",
                remedy=f"name it as package.module:{self.attribute}, or in the entry-point group {self.group}",
            ) from error


@cache
def _entry_points(group: str) -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=group)}


def _source_of(module: str) -> Path | None:
    name, path, found = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        found = next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
        if found is None:
            return None
        path = found.submodule_search_locations
    origin = None if found is None else found.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


STRATEGIES = Plugins("strategy", "drivetrain.strategies", "strategies.kinds", "SPEC")
TRACKERS = Plugins("tracker", "drivetrain.trackers", "monitor.trackers", "prepare")
RECIPES = Plugins("recipe", "drivetrain.recipes", "recipes", "RECIPE", dashed=True)
COMMANDS = Plugins("command", "drivetrain.commands", "commands", "COMMAND")
PROBES = Plugins("probe of verify", "drivetrain.probes", "verify.probes", "PROBES")
