"""Reports wrong arguments in the words of the caller: misspelled keywords, and functions that take something else."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from drivetrain.core.errors import ConfigError, Problem

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
