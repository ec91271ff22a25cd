"""Finds the variables of a user's loop that are carried from one step to the next and that matter for what it does.

Found in the loop's source: a hidden state, a baseline, a replay buffer, a counter, an environment, an iterator over
other data, on which the loss depends; the best accuracy so far and a counter of bad epochs, which decide whether the
loop saves a file or ends. No checkpoint holds them, so a resumed run would begin anew with them. Attributes of `self`
are variables, too: many loops are methods.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NamedTuple

_ENDS = (ast.Continue, ast.Break, ast.Return, ast.Raise)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SAVING = ("export", "save", "save_checkpoint", "save_file", "save_model", "save_pretrained", "save_weights", "dump")


class Carried(NamedTuple):
    """Holds the names of variables that no checkpoint has."""

    into_loss: Sequence[str] = ()
    into_choices: Sequence[str] = ()  # whether to save a file, or to end the loop, and not into the loss


def carried_variables(frame: FrameType, is_run: Sequence[str]) -> Carried:
    """Return the names of such variables of the loop that a frame is in; none where its source cannot be read.

    Args:
        frame: The frame of the loop, while it asks for its next batch.
        is_run: The names of variables that hold the run. What is given to their methods is the loss.
    """
    try:
        lines, first = inspect.getsourcelines(frame)
        tree = _AttributesOfSelf().visit(ast.parse(textwrap.dedent("".join(lines))))
        loop = _innermost_loop(tree, frame.f_lineno - max(first, 1) + 1)
        if loop is None:
            return Carried()
        into_loss = _carried(loop, set(is_run))
        others = _carried(loop, set(is_run), _choices(loop))
        return Carried(into_loss, [name for name in others if name not in into_loss])
    except Exception:  # noqa: BLE001  (it is advice: whatever the source is, the loop goes on)
        return Carried()


class _AttributesOfSelf(ast.NodeTransformer):
    """Turns `self.name` into one name."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return ast.copy_location(ast.Name(f"self.{node.attr}", node.ctx), node)
        return self.generic_visit(node)


def _innermost_loop(tree: ast.AST, line: int) -> ast.For | ast.AsyncFor | ast.While | None:
    found = [node for node in ast.walk(tree) if isinstance(node, _LOOPS)]
    around = [node for node in found if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return max(around, key=lambda node: node.lineno, default=None)


def _choices(loop: ast.For | ast.AsyncFor | ast.While) -> list[ast.AST]:
    """Return where the loop writes a file, as of the best weights so far, and where it ends."""
    found = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and _name_of(node.func) in _SAVING]
    return [*found, *_ends_of(loop.body)]


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "").split(".")[-1]


def _ends_of(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield what leaves the loop that has these statements: not the ends of loops and functions inside of it."""
    for statement in statements:
        if isinstance(statement, (ast.Break, ast.Return)):
            yield statement
        elif not isinstance(statement, (*_LOOPS, *_FUNCTIONS, ast.ClassDef)):
            yield from _ends_of([it for it in ast.iter_child_nodes(statement) if isinstance(it, ast.stmt)])


def _carried(loop: ast.For | ast.AsyncFor | ast.While, is_run: set[str], choices: Sequence[ast.AST] = ()) -> list[str]:
    changed = {name for statement in loop.body for name in _may_change(statement)}
    flow = _Flow(set() if isinstance(loop, ast.While) else _stored(loop.target))
    flow.take_all(loop.body)
    needed = _needed(loop, is_run, choices)
    return sorted((changed & flow.read_first | _counters(loop)) & needed)


def _counters(loop: ast.For | ast.AsyncFor | ast.While) -> set[str]:
    """Return the name by which `enumerate` counts the batches: from 0 again, where a run is resumed."""
    calls = [] if isinstance(loop, ast.While) else [it for it in ast.walk(loop.iter) if isinstance(it, ast.Call)]
    is_counted = any(isinstance(call.func, ast.Name) and call.func.id == "enumerate" for call in calls)
    target = None if isinstance(loop, ast.While) else loop.target
    return _stored(target.elts[0]) if is_counted and isinstance(target, ast.Tuple) else set()


def _loaded(node: ast.AST) -> set[str]:
    """Return the names that an expression reads, without those of its own comprehensions and functions."""
    parts = list(ast.walk(node))
    own = {name for it in parts if isinstance(it, ast.comprehension) for name in _stored(it.target)}
    own |= {it.arg for it in parts if isinstance(it, ast.arg)}
    own |= {name for it in parts if isinstance(it, _FUNCTIONS) for name in _stored(it)}
    return {it.id for it in parts if isinstance(it, ast.Name) and isinstance(it.ctx, ast.Load)} - own


def _stored(node: ast.AST) -> set[str]:
    return {it.id for it in ast.walk(node) if isinstance(it, ast.Name) and not isinstance(it.ctx, ast.Load)}


def _may_change(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement changes, those whose methods it calls, and those that it gives to functions."""
    yield from _changed(statement)
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            yield from _root(node.func) if isinstance(node.func, ast.Attribute) else ()
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            yield from (argument.id for argument in given if isinstance(argument, ast.Name))


def _changed(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement assigns, or changes by an item, by a method that it only calls, or by `next`."""
    yield from _stored(statement)
    for node in ast.walk(statement):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            yield from _root(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _root(node.value.func) if isinstance(node.value.func, ast.Attribute) else ()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next" and node.args:
            yield from _root(node.args[0])


def _root(node: ast.AST) -> Iterator[str]:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def _needed(loop: ast.AST, is_run: set[str], choices: Sequence[ast.AST] = ()) -> set[str]:
    """Return the names that what is given to the run depends on, directly or by other variables of the loop.

    And those that the conditions of `choices` depend on, which are nodes of the loop.
    """
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    given = [call for call in calls if is_run.intersection(_root(call.func)) and _teaches(call.func)]
    needed = {name for call in given for argument in call.args for name in _loaded(argument)}
    edges = [edge for node in ast.walk(loop) for edge in _edges(node, [*given, *choices])]
    while True:
        # What is done with the run itself, such as a call of its `log`, leads nowhere.
        more = {name for targets, sources in edges if targets is None or targets & needed - is_run for name in sources}
        if more <= needed:
            return needed
        needed |= more


def _teaches(method: ast.expr) -> bool:
    """Return whether a method of the run changes what is learned: what is logged or exported does not."""
    return isinstance(method, ast.Attribute) and method.attr in ("backward", "step", "stop")


def _edges(node: ast.AST, given: Sequence[ast.AST]) -> Iterator[tuple[set[str] | None, set[str]]]:
    """Yield the variables that a statement assigns with those it reads; None where it decides on one of the `given`."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        targets = set(_changed(node))
        yield targets, _loaded(node.value) | (targets if isinstance(node, ast.AugAssign) else set())
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        yield _stored(node.target), _loaded(node.iter)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value not in given:
        yield set(_changed(node)), _loaded(node.value)
    elif isinstance(node, (ast.If, ast.While)):
        inside = [it for statement in node.body for it in ast.walk(statement)]
        is_about_run = any(it in given for it in inside)
        yield None if is_about_run else {n for statement in node.body for n in _changed(statement)}, _loaded(node.test)
    elif isinstance(node, _FUNCTIONS) and not isinstance(node, ast.Lambda):
        yield {node.name}, {name for statement in node.body for name in _loaded(statement)}


class _Flow:
    """Follows the statements of one pass, and notes what is read before it is assigned."""

    def __init__(self, assigned: set[str]) -> None:
        self._assigned = assigned
        self.read_first: set[str] = set()

    def take_all(self, statements: Sequence[ast.stmt]) -> bool:
        """Return whether the pass ends in them."""
        for statement in statements:
            self._take(statement)
            if isinstance(statement, _ENDS):
                return True
        return False

    def _take(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.If):
            self._read(statement.test)
            before = set(self._assigned)
            ends = self.take_all(statement.body)
            first, self._assigned = self._assigned, before
            other_ends = self.take_all(statement.orelse)
            self._assigned = self._assigned if ends else first if other_ends else self._assigned & first
        elif isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
            self._read(statement.test if isinstance(statement, ast.While) else statement.iter)
            self._assigned |= set() if isinstance(statement, ast.While) else _stored(statement.target)
            self.take_all(statement.body)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                self._read(item.context_expr)
                self._assigned |= _stored(item.optional_vars) if item.optional_vars is not None else set()
            self.take_all(statement.body)
        elif isinstance(statement, ast.Try):
            self.take_all(statement.body)
            self.take_all(statement.finalbody)
        else:
            if isinstance(statement, ast.AugAssign):
                self.read_first |= _stored(statement.target) - self._assigned
            self._read(statement)
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._assigned.add(statement.name)
            else:
                self._assigned |= _stored(statement)

    def _read(self, node: ast.AST) -> None:
        self.read_first |= _loaded(node) - self._assigned
