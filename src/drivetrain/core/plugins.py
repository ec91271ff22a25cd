"""Finds what other packages can bring: strategies, trackers, recipes, commands, probes. Nothing is imported for that.

Ours are the modules of a folder that have a certain attribute, and are named as these are. Several of one family may
share a module: then the attribute ends in the name, such as `prepare_csv` or `COMMAND_FIND_LR`. Others are entry points
of a group, which gives them a name, or are given as `package.module:ATTRIBUTE`, which also works in files and in
processes that a launcher starts.

Each is one file. What must be known of it before torch is loaded, or without loading all of them, are the literal
arguments of a call at the top level of that file (`literal_facts`), such as `SPEC = StrategySpec(...)`. The
configuration, the launcher and the rules of a plan ask for a fact by the strategy's name; they never compare names.

Studies stand beside the source code and are not part of the installed package; `load_study` finds them.
"""

import ast
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.value import Value

V = TypeVar("V", bound=Value)


class Plugins:
    """One kind of thing that can be brought.

    Args:
        kind: what one is called in messages.
        group: the group of the entry points.
        package: the package of ours, below `drivetrain`; its modules are named as the things are.
        attribute: what such a module has; modules without it are something else. A module that has several ends each
            attribute in `_` and the name.
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
        """The places of ours by name, as `package.module:ATTRIBUTE`."""
        has_it = re.compile(rf"^(?:def )?({self.attribute}(?:_(\w+))?)(?=[ :(])", re.MULTILINE)
        found = {}
        modules = {path.stem: path for path in self._folder.glob("*.py") if path.name != "__init__.py"}
        modules |= {path.parent.name: path for path in self._folder.glob("*/__init__.py")}
        for module, path in modules.items():
            for attribute, ending in has_it.findall(path.read_text(encoding="utf-8")):
                name = (ending or module).lower()
                found[name.replace("_", "-") if self._dashed else name] = f"{self._package}.{module}:{attribute}"
        return dict(sorted(found.items()))

    def target(self, name: str) -> str:
        """Return where one is, as `package.module:ATTRIBUTE`; empty for an unknown name."""
        return name if ":" in name else self._own.get(name) or _entry_points(self.group).get(name, "")

    def source(self, name: str) -> Path | None:
        """Return the file that one is in, found as Python would, without importing the packages around it."""
        target = self.target(name)
        module = target.partition(":")[0]
        if not module:
            return None
        if target in self._own.values():
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
        target = f"{module_name}:{attribute}"
        return {place: name for name, place in self._own.items()}.get(target, target)

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


STRATEGIES = Plugins("strategy", "drivetrain.strategies", "strategies", "SPEC")
TRACKERS = Plugins("tracker", "drivetrain.trackers", "monitor", "prepare")
RECIPES = Plugins("recipe", "drivetrain.recipes", "recipes", "RECIPE", dashed=True)
COMMANDS = Plugins("command", "drivetrain.commands", "commands", "COMMAND", dashed=True)
PROBES = Plugins("probe of verify", "drivetrain.probes", "verify.probes", "PROBES")


def literal_facts(source: Path, attribute: str, kind: type[V], *inner: type[Value]) -> tuple[V, ...]:
    """Return a value for each call that is assigned to a name: one for `X = Call(…)`, several for `X = (Call(…), …)`.

    Args:
        source: the Python file.
        attribute: the name at its top level.
        kind: what is made of each call; arguments that are no fields of it, or no literals, are left out.
        inner: values whose calls may stand inside the arguments, such as `Conflict(…)`.
    """
    return cast(tuple[V, ...], _literal_facts(source, attribute, kind, inner))


@cache
def _literal_facts(
    source: Path, attribute: str, kind: type[Value], inner: tuple[type[Value], ...]
) -> tuple[Value, ...]:
    return tuple(_made(call, kind, inner) for call in _calls(source, attribute))


def _calls(source: Path, attribute: str) -> tuple[ast.Call, ...]:
    for node in _statements(source.read_text(encoding="utf-8"), attribute):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if attribute in [target.id for target in targets if isinstance(target, ast.Name)]:
            assigned = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else [node.value]
            return tuple(call for call in assigned if isinstance(call, ast.Call))
    return ()


def _statements(text: str, attribute: str) -> list[ast.stmt]:
    """Return the assignment alone where it is laid out as formatters do, else all: parsing whole files takes 50 ms."""
    laid_out = re.search(rf"^{attribute}\b[^\n]*[(\[]\n(?:[ \t][^\n]*\n|\n)*[)\]]+$", text, re.MULTILINE)
    with suppress(SyntaxError):
        return ast.parse(laid_out[0] if laid_out else text).body
    return ast.parse(text).body


def _made(call: ast.Call, kind: type[V], inner: tuple[type[Value], ...]) -> V:
    arguments = {}
    for keyword in call.keywords:
        if keyword.arg in kind.model_fields:
            with suppress(ValueError):  # it is computed, which only an import could do
                arguments[str(keyword.arg)] = _literal(keyword.value, inner)
    return kind(**arguments)


def _literal(node: ast.expr, inner: tuple[type[Value], ...]) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(_literal(item, inner) for item in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        for kind in inner:
            if node.func.id == kind.__name__:
                return kind(**{keyword.arg or "": _literal(keyword.value, inner) for keyword in node.keywords})
    return ast.literal_eval(node)


class Conflict(Value):
    """Settings that a strategy cannot be used with, and the message for it.

    Args:
        when: the settings, by their dotted names, with the values that conflict; all of them together.
        message: what is wrong; `{asked}` stands for the setting `asked` as the user wrote it.
        at: the setting that the problem is reported at.
        asked: the setting that the message quotes.
        allowed: what could be used instead.
        remedy: what to do.
        reason: why a plan keeps away from that value, where a rule would choose it.
    """

    when: dict[str, Any]
    message: str
    at: str = "distributed.strategy"
    asked: str = "distributed.strategy"
    allowed: str = ""
    remedy: str = "drop one of the two"
    reason: str = ""

    def is_met(self, value_of: Callable[[str], Any]) -> bool:
        """Return whether a configuration has these settings; `value_of` returns the value of one by its name."""
        return all(value_of(setting) == value for setting, value in self.when.items())


class StrategyFacts(Value):
    """What other rooms know of a strategy. In its file they are literals: some of them are read without importing it.

    Args:
        processes: how many processes it can be used in.
        devices: how many devices each process uses.
        memory: what each process holds of weights, gradients and optimizer: a whole copy; shards, into which the model
            is cut by `strategies.sharding` before the strategy gets it; or parts by DeepSpeed's ZeRO stage.
        shares_experts: whether the experts of mixtures are shared out among processes.
        captures: whether its step can be captured as a CUDA graph (`CapturableStrategy`).
        why_not_captured: why not, in a line for the user.
        several_optimizers: whether a job may have several optimizers, and several losses in turn.
        norms: whether it computes a gradient norm in the steps that ask for one (`StrategyParts.norms`).
        own_loop: why `dt.drive` cannot use it; empty where it can.
        package: the package that it needs; empty for none.
        install: what pip installs for it, where that is not the package alone.
        options: the settings that only this strategy obeys.
        options_by_name: whether these are an error unless the strategy is asked for by name. Otherwise they may stand
            beside `auto`, and count where it chooses this strategy.
        takes: other strategies whose options may be given too.
        rest_by: the setting that names the strategy for all that this one leaves alone; its facts hold as well.
        conflicts: settings that it cannot be used with.
    """

    processes: Literal["one", "several", "any"] = "any"
    devices: Literal["one", "several"] = "one"
    memory: Literal["whole", "shards", "zero"] = "whole"
    shares_experts: bool = False
    captures: bool = False
    why_not_captured: str = ""
    several_optimizers: bool = False
    norms: bool = True
    own_loop: str = ""
    package: str = ""
    install: str = ""
    options: tuple[str, ...] = ()
    options_by_name: bool = False
    takes: tuple[str, ...] = ()
    rest_by: str = ""
    conflicts: tuple[Conflict, ...] = ()

    def rest(self, config: Any) -> str:
        """Return the strategy that a configuration names for what this one leaves alone; empty where there is none."""
        return str(config.value(self.rest_by)) if self.rest_by else ""


def strategy_facts(name: str) -> StrategyFacts:
    """Return the facts of a strategy, without importing it. Nothing is known of `auto`, which gets the defaults.

    Facts that are not literals, or stand in a file that cannot be found, have their defaults here. The process that
    trains imports the strategy, and sees them as they are.
    """
    source = STRATEGIES.source(name)
    attribute = STRATEGIES.target(name).partition(":")[2]
    found = () if source is None else literal_facts(source, attribute, StrategyFacts, Conflict)
    return found[0] if found else StrategyFacts()


class RecipeSummary(Value):
    """The literals of `RECIPE = Recipe(…)`.

    Args:
        about: one line on what it trains.
        reads: the settings that it reads, beside those that every recipe reads: their flags are refused by others.
    """

    about: str = ""
    reads: tuple[str, ...] = ()


def recipe_summary(name: str) -> RecipeSummary | None:
    """Return what a recipe says of itself; None where this is no recipe: a function of a user, or an unknown name."""
    source = RECIPES.source(name)
    attribute = RECIPES.target(name).partition(":")[2]
    found = () if source is None else literal_facts(source, attribute, RecipeSummary)
    return found[0] if found else None


CHECKOUT = Path(__file__).parents[3]


def load_study(module: str) -> ModuleType:
    """Import a module of a study, such as `continual.command`, from the checkout that this package runs from."""
    name = module.partition(".")[0]
    if not (CHECKOUT / "studies" / name / "__init__.py").is_file():
        raise DrivetrainError(
            f"the study `{name}` is in drivetrain's source code (studies/{name}), not in the installed package",
            remedy="in a checkout of the source code run `pip install -e .`, then this command again",
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))  # last, so that it hides nothing; processes that are spawned get it too
    return import_module(f"studies.{module}")
