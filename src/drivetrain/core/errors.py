"""Errors that a user sees, and wrong arguments in the words of the caller."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

# ----------------------------------------------------------------------------------------------------------------------
# Errors that a user sees. Each says what is wrong, what was found, what is allowed, and what to do about it.

# The attribute of an error after which another start differs: what it does differently, in words.
GOES_ON_WITH = "drivetrain_goes_on_with"


class DrivetrainError(Exception):
    """An error with a remedy. The command line prints both without a traceback and exits with `exit_code`.

    Args:
        message: What is wrong.
        remedy: What to do about it.

    Example:
        >>> print(dt.DrivetrainError("no GPU is visible", remedy="drivetrain check"))
        no GPU is visible
          remedy: drivetrain check
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


class BadResumeError(DrivetrainError):
    """The numbers of a run went bad in the first steps after a resume: the checkpoint may be to blame."""

    def __init__(self, message: str, *, remedy: str, resumed_from: int) -> None:
        super().__init__(message, remedy=remedy)
        self.resumed_from = resumed_from


@dataclass(frozen=True)
class Problem:
    """One problem of the configuration, with all that a user needs to fix it."""

    key: str  # as the user spelled it: `--epochs`, `batch.size`, `train.yaml`
    message: str
    value: object = None
    source: str = ""  # `command line`, `train.yaml line 3`, `default`
    allowed: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        lines = [f"{self.key}{where}: {self.message}"]
        if self.allowed:
            lines.append(f"allowed: {self.allowed}")
        if self.remedy:
            lines.append(f"remedy:  {self.remedy}")
        return "\n    ".join(lines)


class ConfigError(DrivetrainError):
    """All problems of a configuration at once.

    Args:
        problems: Each with its key, the value it got, what is allowed, and a remedy.

    Example:
        >>> try:
        ...     dt.configure(epochs=0, batch_size=-1)
        ... except dt.ConfigError as error:
        ...     print([problem.key for problem in error.problems])
        ['epochs', 'batch_size']
    """

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        heading = "1 problem with the configuration" if count == 1 else f"{count} problems with the configuration"
        super().__init__("\n".join([f"{heading}:", *(f"  {problem}" for problem in self.problems)]))


class InputError(DrivetrainError):
    """The user's files hold something that cannot be trained on; found before anything is written."""

    exit_code = 2


# ----------------------------------------------------------------------------------------------------------------------
# Reports wrong arguments in the words of the caller: misspelled keywords, and functions that take something else.

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def suggesting_keywords(
    name: str, other_names: Mapping[str, str] | None = None, otherwise: str = ""
) -> Callable[[Decorated], Decorated]:
    """Decorate a function or a class so that an unknown keyword is reported with the one that was likely meant.

    Args:
        name: What messages call it.
        other_names: What others call its parameters, each with the parameter's name, or with a sentence.
        otherwise: The remedy for a keyword that resembles none.
    """

    def decorate(target: Decorated) -> Decorated:
        if isinstance(target, type):
            target.__init__ = decorate(target.__init__)  # type: ignore[misc]
            return target
        known = [parameter for parameter in inspect.signature(target).parameters if parameter != "self"]

        @functools.wraps(target)
        def checking(*args: Any, **keywords: Any) -> Any:
            unknown = [keyword for keyword in keywords if keyword not in known]
            if unknown:
                remedies = [_remedy(keyword, known, other_names or {}, otherwise) for keyword in unknown]
                raise ConfigError([
                    Problem(f"{name}({keyword}=…)", "there is no such parameter", keywords[keyword], remedy=remedy)
                    for keyword, remedy in zip(unknown, remedies, strict=True)
                ])  # fmt: skip
            return target(*args, **keywords)

        return cast(Decorated, checking)

    return decorate


def _remedy(keyword: str, known: list[str], other_names: Mapping[str, str], otherwise: str) -> str:
    meant = other_names.get(keyword)
    if meant is None:
        meant = next(iter(difflib.get_close_matches(keyword.lower(), known, n=1)), None)
    if meant in known:
        return f"did you mean {meant}=…?"
    return meant or otherwise or f"its parameters are {', '.join(known)}"


def call_problem(function: Any, *arguments: str) -> str:
    """Return what is wrong with calling a function with these positional arguments; empty if it works or is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return ""
    try:
        signature.bind(*arguments)
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        shown = "the function" if name == "<lambda>" else name
        given = f"with ({', '.join(arguments)})" if arguments else "without arguments"
        return f"it is called {given}, and {shown} takes ({', '.join(signature.parameters)})"
    return ""


def returned(value: Any) -> str:
    """Say what a user's function returned instead of what it should."""
    return "returned None: did you forget `return`?" if value is None else f"returned {type(value).__name__}"


def nothing_trains(num_parameters: int) -> DrivetrainError:
    """Return the error for a model of which nothing is trained: without parameters, or with all of them frozen."""
    if num_parameters:
        return DrivetrainError("no parameter of the model is trained", remedy="set requires_grad on those to train")
    return DrivetrainError(
        "the model has no parameters",
        remedy="make layers attributes of it; those of a list or dictionary belong in nn.ModuleList or nn.ModuleDict",
    )
