"""Reads what a module says about itself as literals, without importing it.

A strategy, a recipe, a command and a probe are one file each. What must be known of them before torch is loaded, or
without loading all of them, are the literal arguments of a call at the top level of that file.
"""

import ast
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.core.value import Value

V = TypeVar("V", bound=Value)


def literal_facts(source: Path, attribute: str, kind: type[V], *inner: type[Value]) -> tuple[V, ...]:
    """Return a value for each call that is assigned to a name: one for `X = Call(…)`, several for `X = (Call(…), …)`.

    Args:
        source: the Python file.
        attribute: the name at its top level.
        kind: what is made of each call; arguments that are no fields of it, or no literals, are left out.
        inner: values whose calls may stand inside the arguments, such as `Conflict(…)`.
    """
    return tuple(_made(call, kind, inner) for call in _calls(source, attribute))


@cache
def _calls(source: Path, attribute: str) -> tuple[ast.Call, ...]:
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if attribute in [target.id for target in targets if isinstance(target, ast.Name)]:
            assigned = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else [node.value]
            return tuple(call for call in assigned if isinstance(call, ast.Call))
    return ()


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
