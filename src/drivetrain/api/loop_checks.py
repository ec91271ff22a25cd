"""Looks at the loop of a driven run in its first steps, and finds what a resume or a division of steps would change.

Variables that one step leaves for the next are in no checkpoint. And where samples meet in the loss, the batches of a
divided step do not come to what the whole one does.
"""

import ast
import inspect
import math
import textwrap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import LossSum, NamedLosses
from drivetrain.core.state import SettingsWatch, kept_by
from drivetrain.core.world import World
from drivetrain.data.batch import MicroBatch, leaves
from drivetrain.data.loader import Loader
from drivetrain.loop.trainer import COUNTED_STEPS
from drivetrain.run import Session
from drivetrain.run.loss_probe import (
    graph_nodes,
    has_standardized_weights,
    is_over_weights,
    label_means,
    leaves_labels_out,
    looks_like_a_sum,
    mean_counts,
    positive_weights,
    sums_normalized_weights,
)
from drivetrain.run.loss_weighting import BATCH_NORM, DRAWN
from drivetrain.run.model_factory import couples_samples
from drivetrain.strategies.base import gradient_versions

# ----------------------------------------------------------------------------------------------------------------------
# Variables that the loop carries from one step to the next
#
# Those that matter for what it does, found in its source: a hidden state, a baseline, a replay buffer, a counter, an
# environment, an iterator over other data, on which the loss depends; the best accuracy so far and a counter of bad
# epochs, which decide whether the loop saves a file or ends. No checkpoint holds them, so a resumed run would begin
# anew with them. Attributes of `self` are variables, too: many loops are methods.

_ENDS = (ast.Continue, ast.Break, ast.Return, ast.Raise)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SAVING = ("export", "save", "save_checkpoint", "save_file", "save_model", "save_pretrained", "save_weights", "dump")


class CarriedNames(NamedTuple):
    """Holds the names of variables that no checkpoint has."""

    into_loss: Sequence[str] = ()
    into_choices: Sequence[str] = ()  # whether to save a file, or to end the loop, and not into the loss
    used: Sequence[str] = ()  # what the loss is computed with, whether it changes or not: functions among them
    divisors: Sequence[str] = ()  # numbers of batches to accumulate, by which the loss is divided


def carried_variables(frame: FrameType, is_run: Sequence[str]) -> CarriedNames:
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
            return CarriedNames()
        into_loss = _carried(loop, set(is_run))
        others = _carried(loop, set(is_run), _choices(loop))
        into_choices = [name for name in others if name not in into_loss]
        used = sorted(_needed(loop, set(is_run)))
        return CarriedNames(into_loss, into_choices, used, _divisors(loop, set(is_run)))
    except Exception:  # noqa: BLE001  (it is advice: whatever the source is, the loop goes on)
        return CarriedNames()


def value_of(name: str, found: Mapping[str, Any]) -> Any:
    """Return what a name with dots means among variables; None where that cannot be told."""
    first, *others = name.split(".")
    value = found.get(first)
    for attribute in others:
        value = getattr(value, attribute, None)
    return value


_MOST_FUNCTIONS = 64
_METRICS = ("torcheval", "torchmetrics")  # packages of modules that count what no loss depends on


def kept_by_functions(given: Sequence[Any]) -> dict[str, Any]:
    """Return by name what functions of the user's, and those they call, refer to: variables that they may change."""
    found, seen, left = dict[str, Any](), set[int](), list(given)
    while left and len(seen) < _MOST_FUNCTIONS:
        function = left.pop()
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is None:  # a class, or an object that can be called
            if not isinstance(function, type):
                found.setdefault(type(function).__name__, getattr(function, "__dict__", {}))
            continue
        if id(code) in seen or "site-packages" in code.co_filename:
            continue
        seen.add(id(code))
        owned = vars(owner) if (owner := getattr(function, "__self__", None)) is not None else {}
        for name, value in kept_by(function):
            if isinstance(value, (FunctionType, MethodType)):
                left.append(value)
            elif not isinstance(value, (type, ModuleType)) and (name not in owned or name in code.co_names):
                found.setdefault(name, value)
    return {name: value for name, value in found.items() if type(value).__module__.split(".")[0] not in _METRICS}


def kept_by_model(model: nn.Module) -> dict[str, Any]:
    """Return by name what modules of the user's keep from one forward for the next, outside of buffers.

    Attributes that `forward` reads before it sets them: not what it leaves for the loss, such as an auxiliary one.
    Numbers are left out, which every run looks at.
    """
    found = dict[str, Any]()
    for prefix, module in model.named_modules():
        if type(module).__module__.split(".")[0] in ("torch", "drivetrain", *_METRICS):
            continue
        for name in _read_first(type(module).forward):
            value = vars(module).get(name)
            if value is not None and not isinstance(value, (int, float, nn.Module)):
                found[f"model.{prefix}.{name}" if prefix else f"model.{name}"] = value
    return found


@cache
def _read_first(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the attributes that a method reads before it sets them, and does not only add to."""
    try:
        source = textwrap.dedent(inspect.getsource(forward))
        (function,) = _AttributesOfSelf().visit(ast.parse(source)).body
        flow = _Flow(set())
        flow.take_all(function.body)
    except Exception:  # noqa: BLE001  (it is advice: whatever the source is, the loop goes on)
        return frozenset()
    added_to = {id(it) for node in ast.walk(function) for it in _only_called(node)}
    loaded = {it.id for it in ast.walk(function) if isinstance(it, ast.Name) and id(it) not in added_to}
    return frozenset(name.removeprefix("self.") for name in flow.read_first & loaded if name.startswith("self."))


def _only_called(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the object of a statement that only calls a method, as `self.seen.append(x)`, and what is assigned."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        yield node.value.func.value
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node


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
    beside = set() if isinstance(loop, ast.While) else _zipped(loop.iter, loop.target, is_run)
    return sorted((changed & flow.read_first | _counters(loop) | beside) & needed)


def _counters(loop: ast.For | ast.AsyncFor | ast.While) -> set[str]:
    """Return the name by which `enumerate` counts the batches: from 0 again, where a run is resumed."""
    calls = [] if isinstance(loop, ast.While) else [it for it in ast.walk(loop.iter) if isinstance(it, ast.Call)]
    is_counted = any(isinstance(call.func, ast.Name) and call.func.id == "enumerate" for call in calls)
    target = None if isinstance(loop, ast.While) else loop.target
    return _stored(target.elts[0]) if is_counted and isinstance(target, ast.Tuple) else set()


def _zipped(items: ast.expr, target: ast.AST, is_run: set[str]) -> set[str]:
    """Return the names of what `zip` takes beside the run: of other data, from the start again where it is resumed."""
    if not isinstance(items, ast.Call) or not items.args:
        return set()
    parts = target.elts if isinstance(target, ast.Tuple) else []
    if _name_of(items.func) == "zip" and len(items.args) == len(parts):
        pairs = zip(items.args, parts, strict=True)
        found = [_zipped(it, to, is_run) if _loaded(it) & is_run else _stored(to) for it, to in pairs]
        return set().union(*found)
    is_counted = _name_of(items.func) == "enumerate" and len(parts) == 2
    return _zipped(items.args[0], parts[1] if is_counted else target, is_run)


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


def _divisors(loop: ast.AST, is_run: set[str]) -> list[str]:
    """Return the numbers of batches by which the loss is divided, as where gradients are accumulated by hand."""
    needed = _needed(loop, is_run) - is_run
    divisors = dict[str, None]()
    for node in ast.walk(loop):
        is_assigned = isinstance(node, _ASSIGNMENTS) and needed.intersection(_changed(node))
        is_given = isinstance(node, ast.Call) and is_run.intersection(_root(node.func)) and _teaches(node.func)
        for part in ast.walk(node) if is_assigned or is_given else ():
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div):
                divisors[ast.unparse(part.right)] = None
            elif isinstance(part, ast.AugAssign) and isinstance(part.op, ast.Div):
                divisors[ast.unparse(part.value)] = None
    return [name for name in divisors if "accum" in name.lower()]


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


# ----------------------------------------------------------------------------------------------------------------------
# Divided steps
#
# The first batches show whether a divided step is the whole one; where it is not, a line says so. The loss is the
# loop's own, so it cannot be computed again on parts of a batch, as `dt.train` does. What is looked at is how it was
# computed: its graph, the buffers that the forward changed, and its second derivatives by what the model returned.
# Where samples do not meet in the loss, those of one sample's output by another's are exactly 0.

_MOST_CALLS = 3  # of the model for a batch: two views or towers, an anchor with two others
_MOST_VALUES = 4_000_000  # of an output: that of embeddings, not the logits of a vocabulary
_GATHERING = ("AllGather", "GatherLayer", "AllReduce")  # in the names of graph nodes
_MOST_NODES = 2000  # of a graph, between the loss and the outputs
COUPLED = "so what is learned depends on how many batches a step is divided into"


class DivisionWatch:
    """Looks at the first batches of divided steps, and tells once of each thing that makes them unlike the whole step.

    Args:
        session: The run.
        loader: Where its batches come from.
        model: The model, as the loop has it.
        say: Prints a line.
        is_called: Whether the loop calls the model itself, so that its outputs can be watched; not a compiled one.
    """

    def __init__(
        self, session: Session, loader: Loader, model: nn.Module, say: Callable[[str], None], *, is_called: bool
    ) -> None:
        self._has_peers, self._model, self._say = session.world.size > 1, model, say
        self._loader = loader
        self._step_samples = session.job.largest_batch or 0
        # How many batches are looked at.
        self._num_left = COUNTED_STEPS if session.weighting.reason == "not measured" else 0
        self._buffers: dict[str, tuple[Tensor, int]] = {}  # with their versions, before a batch is computed
        self._outputs = _Outputs(model) if is_called and not session.holds_parts else None
        self._positive: dict[str, list[Tensor]] = {}  # by part of the loss, each `pos_weight` of the batch before
        # By part of the loss, of each batch that shows something: its samples, and what its means are over.
        self._counts: dict[str, list[tuple[int, list[float]]]] = {}
        self._are_sums: dict[str, list[bool]] = {}  # by part of the loss, of the first two of these batches
        self._is_first = True
        self._told = set[str]()

    def begin(self, micro: MicroBatch) -> None:
        """Prepare to look at a batch that is handed out now."""
        if not self._is_divided(micro):
            return
        self._buffers = {name: (it, it._version) for name, it in _buffers_but_of_norms(self._model).items()}
        if self._outputs is not None:
            self._outputs.watch()

    def end(self) -> None:
        """Look at the model's outputs no longer; called where the forward of a batch is over, however it ended."""
        if self._outputs is not None:
            self._outputs.close()

    def judge(self, micro: MicroBatch, loss: Tensor | LossSum | NamedLosses) -> None:
        """Say why the batches of a step together are not the whole one, if they are not."""
        if not self._is_divided(micro):
            return
        is_first, self._is_first = self._is_first, False
        lines: dict[str, str] = {}
        if is_first and couples_samples(self._model):
            lines["norm"] = (
                f"{BATCH_NORM}: what is learned depends on how many batches a step is divided into (group or layer "
                "normalization does not depend on it)"
            )
        if is_first and self._loader.collate_draws():
            lines["collate"] = f"{DRAWN}, {COUPLED} (what the data set draws for an item does not depend on it)"
        if is_first and (hooked := _with_hooks(self._model)):
            lines["hooks"] = (
                f"a hook of {hooked} gets the gradient of each batch, which is a part of the step's: what it clips or "
                "normalizes depends on how many batches a step is divided into. clip_norm clips whole gradients, and "
                "optimizer.register_step_pre_hook is for anything else"
            )
        changed = self._changed_buffers()
        if changed:
            lines["buffers"] = (
                f"each forward pass changes {', '.join(changed[:3])}{', …' if changed[3:] else ''}, {COUPLED}. Keep a "
                "step in one batch (--batch-size), or change it once per step in a hook, dt.every(1, …)"
            )
        parts = loss if isinstance(loss, Mapping) else {"": loss}
        for name, part in parts.items():
            lines |= {f"{kind} {name}": line for kind, line in self._about_loss(micro, name, part).items()}
        if self._are_coupled(micro, [_total_of(part) for part in parts.values()]):
            lines["coupled"] = (
                f"it compares the samples of a batch with each other, as contrastive losses, roots of a mean and the "
                f"choice of the hardest samples do, {COUPLED}. Keep a step in one batch, on one process: --batch-size "
                "as large as the global batch"
            )
        # A batch that counts nothing, whose labels are all ignored, leaves open what the next ones may show.
        self._num_left -= micro.weight > 0 and any(map(_shows_something, parts.values()))
        for kind, line in lines.items():
            if kind not in self._told:
                self._told.add(kind)
                self._say(f"  loss       {line}")

    def _is_divided(self, micro: MicroBatch) -> bool:
        return self._num_left > 0 and (self._has_peers or not micro.is_last or micro.number > 0)

    def _changed_buffers(self) -> list[str]:
        before, self._buffers = self._buffers, {}  # none where the step has a closure
        now = _buffers_but_of_norms(self._model) if before else {}
        return [name for name, (it, version) in before.items() if name in now and _differs(now[name], it, version)]

    def _about_loss(self, micro: MicroBatch, name: str, loss: Any) -> dict[str, str]:
        found: dict[str, str] = {}
        total = _total_of(loss)
        now = positive_weights(total) if isinstance(total, Tensor) else []
        before, self._positive[name] = self._positive.get(name, []), now
        if any(it.shape == was.shape and not torch.equal(it, was) for it, was in zip(now, before, strict=False)):
            found["positive"] = (
                f"its pos_weight is computed from each batch, {COUPLED}. Compute it once, from all labels"
            )
        if not isinstance(loss, Tensor):
            return found
        sizes = max(1, micro.num_samples), self._step_samples
        answers = self._are_sums.setdefault(name, [])
        if len(answers) < 2 and micro.weight and _shows_something(loss):
            answers.append(looks_like_a_sum(loss, *sizes))
        it = f"its part {name}" if name else "it"
        by_count = "Keep a step in one batch (--batch-size), or give run.backward the sum of its parts as"
        by_count = f"{by_count} one dt.LossSum(sum, count)" if name else "run.backward(dt.LossSum(sum, count))"
        if sums_normalized_weights(loss, sizes[0]):
            found["means"] = (
                f"{it} is a sum over weights that add up to 1 in each batch, so what a sample counts depends on how a "
                f"step is divided. {by_count} divides by the count: give it the sum over the weights as they are "
                "before, and their sum"
            )
        elif has_standardized_weights(loss, sizes[0]):
            found["means"] = (
                f"{it} weights its samples with numbers whose mean is 0 and whose deviation is 1 in each batch, as "
                f"normalized advantages, {COUPLED}. Normalize them before, over all samples or with a mean and a "
                "deviation that move once per step, or keep a step in one batch (--batch-size)"
            )
        elif answers == [True, True]:  # of one batch, the samples of a step may be its number of labels by chance
            found["sum"] = (
                f"{it} looks like a sum over its batch, and is taken for a mean, so its gradients depend on how many "
                "batches a step is divided into. --loss-weighting sum adds them up, as in a loop without "
                f"micro-batches; {by_count} divides by the count"
            )
        taken = "and is taken for a mean over samples, so its gradients depend on how a step is divided"
        if leaves_labels_out(loss):
            means = label_means([loss])
            over, ignored = "labels that are not ignored", next(iter(means.ignored), -100)
            count = f"(labels != {ignored}).sum()"
            if means.classes:
                over, count = "class weights", f"weights[labels[labels != {ignored}]].sum()"
            found["labels"] = (
                f"{it} is a mean over {over}, {taken}. {by_count} divides by the count: "
                f'cross_entropy(…, reduction="sum") and {count}'
            )
        elif unlike := self._unlike_means(micro, name, loss):
            found["means"] = f"{it} is a mean over {unlike}, {taken}. {by_count} divides by the count"
        return found

    def _are_coupled(self, micro: MicroBatch, totals: Sequence[Any]) -> bool:
        """Return whether samples meet in a loss, or in one of its parts."""
        tensors = [it for it in totals if isinstance(it, Tensor)]
        is_chosen = any(_chooses_samples(it, micro.num_samples) for it in tensors)
        if self._outputs is not None and tensors:
            is_chosen |= self._outputs.meet_in(sum(tensors[1:], tensors[0]), micro.num_samples)
        return is_chosen

    def _unlike_means(self, micro: MicroBatch, name: str, loss: Tensor) -> str:
        """Return in words how the numbers of values differ that a mean is over in batches of as many samples."""
        now = micro.num_samples, mean_counts(loss)
        for num_samples, counts in self._counts.get(name, ()):
            for before, after in zip(counts, now[1], strict=False) if len(counts) == len(now[1]) else ():
                if _are_close(before, after) or _are_close(before * now[0], after * num_samples):
                    continue
                if float(before).is_integer() and float(after).is_integer():
                    return f"{before:.0f} values in a batch of {num_samples} samples and {after:.0f} in one of {now[0]}"
                sizes = f"in a batch of {num_samples} samples and to {after:.4g} in one of {now[0]}"
                return f"weights that add up to {before:.4g} {sizes}"
        if micro.weight and _shows_something(loss):
            self._counts.setdefault(name, []).append(now)
        return ""


def _total_of(loss: Any) -> Any:
    return loss.total if isinstance(loss, LossSum) else loss


def _shows_something(loss: Any) -> bool:
    """Return whether a loss tells what it is: not 0 or NaN, as that of nothing but ignored labels. The host waits."""
    total = _total_of(loss)
    return not isinstance(total, Tensor) or bool(((total != 0) & total.isfinite()).any())


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)  # sums of float32 are rounded


def _with_hooks(model: nn.Module) -> str:
    """Return the name of a weight with a hook of the user's on its gradient; empty if there is none."""
    named = model.named_parameters()
    return next((name for name, it in named if it._backward_hooks or it._post_accumulate_grad_hooks), "")


def _buffers_but_of_norms(model: nn.Module) -> dict[str, Tensor]:
    of_norms = {id(it) for part in model.modules() if isinstance(part, _BatchNorm) for it in part.buffers()}
    return {name: it for name, it in model.named_buffers() if id(it) not in of_norms}


def _differs(now: Tensor, before: Tensor, version: int) -> bool:
    """Return whether a buffer was written to, or replaced by another of the same shape: not a cache that has grown."""
    if now is before:
        return now._version != version
    return now.shape == before.shape and not torch.equal(now, before)


class _Outputs:
    """What the outermost calls of a model's parts return while a batch is computed."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._handles: list[Any] = []
        self._found: list[Tensor] = []
        self._depth = self._num_calls = 0

    def watch(self) -> None:
        self.close()
        self._found, self._depth, self._num_calls = [], 0, 0
        for module in self._modules:
            if not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(module.register_forward_pre_hook(self._enter))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():  # the loop's own torch.compile leaves both out
            self._depth += 1

    def _leave(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        if self._depth == 0:
            self._num_calls += 1
            if self._num_calls <= _MOST_CALLS:
                self._found += [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]

    def meet_in(self, loss: Tensor, num_samples: int) -> bool:
        """Return whether the loss's derivative by the output of the first sample depends on other samples' outputs.

        Rows that are a multiple of the samples are taken for several rows of each, such as two views. False where it
        cannot be found out.
        """
        found, self._found = [it for it in self._found if it.dim()], []  # a temperature or a loss is of no sample
        if num_samples < 2 or self._num_calls > _MOST_CALLS:
            return False
        try:
            outputs = [it for it in found if _has_rows_of(it, num_samples)]
            outputs = _nearest(loss, outputs) if len(outputs) == len(found) else []
            return bool(outputs) and _are_coupled(loss, outputs, num_samples)
        except (RuntimeError, NotImplementedError):  # an operation has no second derivative: it is advice
            return False


def _has_rows_of(output: Tensor, num_samples: int) -> bool:
    if torch._C._functorch.is_functorch_wrapped_tensor(output) or output.layout != torch.strided:
        return False
    is_plain = output.grad_fn is not None and not output._backward_hooks and output.dim() > 0
    is_plain = is_plain and output.is_floating_point() and output.numel() <= _MOST_VALUES
    has_time_first = output.dim() > 2 and output.shape[1] == num_samples
    return is_plain and not has_time_first and output.shape[0] % num_samples == 0


def _nearest(loss: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs that the loss was computed from directly, not through other ones.

    None in a large graph, and none where processes exchange their outputs.
    """
    by_node: Mapping[Any, Tensor] = {output.grad_fn: output for output in outputs}
    nodes, seen, nearest = [loss.grad_fn], set[Any](), dict[int, Tensor]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(word in node.name() for word in _GATHERING):
            return []  # samples meet over all processes; and second derivatives would communicate
        if node in by_node:
            nearest[id(node)] = by_node[node]
        elif len(seen) > _MOST_NODES:
            return []
        else:
            nodes += [other for other, _ in node.next_functions]
    return list(nearest.values())


_CHOOSING = ("Topk", "Sort", "Max", "Min", "Median", "Nanmedian", "Kthvalue")  # in the names of graph nodes


def _chooses_samples(loss: Tensor, num_samples: int) -> bool:
    """Return whether the loss chooses among the samples of its batch, as to take the hardest of them, or a median."""
    for node in graph_nodes([loss], through=lambda node: True, most=_MOST_NODES):
        if num_samples > 1 and node.name().partition("Backward")[0] in _CHOOSING:
            dimension = getattr(node, "_saved_dim", None)  # None: among all values
            if dimension is None and not is_over_weights(node) and hasattr(node, "_saved_self"):
                sizes, dimension = node._saved_self.shape, 0
            else:
                sizes = getattr(node, "_saved_self_sym_sizes", ())
            if sizes[:1] and sizes[0] == num_samples and dimension in (0, *((2**64 - 1, -1) * (len(sizes) == 1))):
                return True
    return False


def _are_coupled(loss: Tensor, outputs: Sequence[Tensor], num_samples: int) -> bool:
    firsts: Sequence[Tensor | None] = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
    for gradient in firsts:
        if gradient is None or not gradient.requires_grad:
            continue
        row = gradient[0].flatten()
        weights = torch.arange(1, len(row) + 1, dtype=row.dtype, device=row.device).cos()
        seconds: Sequence[Tensor | None] = torch.autograd.grad(
            (row * weights).sum(), outputs, retain_graph=True, allow_unused=True
        )
        for second in seconds:
            if second is None:
                continue
            touched = ((second != 0) & second.isfinite()).flatten(1 if second.dim() > 1 else 0)
            num_touched = int((touched.any(1) if second.dim() > 1 else touched).sum())
            if num_touched > second.shape[0] // num_samples:
                return True
    return False


# ----------------------------------------------------------------------------------------------------------------------
# Gradients and weights that the loop changes itself
#
# The run computes gradients, and its optimizer changes the weights: what a script kept of its own beside that is lost,
# counts twice, or takes the processes apart.

Closure = Callable[[Any], Tensor | LossSum | NamedLosses]  # of a batch; returns its loss
OF_BATCH = (
    "give it a function of a batch that returns its loss, without optimizer.zero_grad() and loss.backward(): "
    "run.step(lambda batch: loss(run.model, batch))"
)


class GradientWatch:
    """Finds loops that compute gradients themselves, or clear or change those that are not whole or not divided yet.

    Args:
        trained: The parameters with gradients; empty where gradients are sharded.
        scales_loss: Whether gradients are scaled until the optimizer steps.
        world: The processes, which hold the same gradients when a step is due.
    """

    def __init__(self, trained: Sequence[Tensor], *, scales_loss: bool, world: World) -> None:
        self._trained, self._scales_loss, self._world = trained, scales_loss, world
        self._versions: list[int] | None = None
        self._before: list[tuple[weakref.ref[Tensor], int] | None] | None = None  # None: they are not looked at
        self._num_steps = self._num_compared = 0

    def begin(self, micro: MicroBatch) -> None:
        """Remember the gradients when the first batch of a step is handed out, where the step is looked at."""
        if micro.number == 0:
            self._num_steps += 1
            is_looked_at = self._num_steps <= COUNTED_STEPS or self._num_steps & (self._num_steps - 1) == 0
            self._before = self._seen() if is_looked_at else None

    def _seen(self) -> list[tuple[weakref.ref[Tensor], int] | None]:
        gradients = (parameter.grad for parameter in self._trained)
        return [None if it is None else (weakref.ref(it), it._version) for it in gradients]

    def check(self, micro: MicroBatch) -> None:
        """Raise if the gradients of the batches before are gone, or others came that are not of the run."""
        if micro.number and self._trained and all(parameter.grad is None for parameter in self._trained):
            raise self._cleared()
        if self._before is None:
            return
        others = [
            gradient
            for gradient, before in zip((it.grad for it in self._trained), self._before, strict=True)
            if gradient is not None
            and (before is None or before[0]() is not gradient or before[1] != gradient._version)
        ]
        if any(bool(it.count_nonzero()) for it in map(_values_of, others)):  # some would be lost, others count again
            raise DrivetrainError(
                "the loop has computed gradients before run.backward(), by a backward of its own",
                remedy="call run.backward(loss) in place of loss.backward(), once for each batch: add several losses "
                "together. For gradients of anything but the weights, as of adversarial samples, "
                "torch.autograd.grad(loss, inputs) leaves these alone",
            )
        if micro.number and others:
            raise self._cleared()

    @staticmethod
    def _cleared() -> DrivetrainError:
        return DrivetrainError(
            "the gradients were cleared between two batches of one step",
            remedy="leave optimizer.zero_grad() out: gradients are cleared after they were used. Gradients by the "
            "inputs, as of adversarial samples, are computed by torch.autograd.grad, which adds to none",
        )

    def note(self, micro: MicroBatch, loss: Any) -> None:
        """Remember the gradients after a backward, where the loop must not change them before `run.step`."""
        is_watched = not micro.is_last or self._scales_loss or isinstance(loss, LossSum)
        self._versions = gradient_versions(self._trained) if is_watched else None
        if self._before is not None:
            self._before = self._seen()

    def check_changed(self, micro: MicroBatch) -> None:
        """Raise if the loop has changed gradients since `note`."""
        versions, self._versions = self._versions, None
        if versions is None or versions == gradient_versions(self._trained):
            return
        why = "those of the batches that follow are missing, so the result would depend on the micro-batch"
        if micro.is_last:
            why = "fp16 scales them" if self._scales_loss else "they are divided by the count of the LossSum"
            why += " until the optimizer steps"
        raise DrivetrainError(
            f"the loop has changed gradients before run.step(), and {why}",
            remedy="dt.drive(clip_norm=…) clips them; anything else can be done to whole gradients in "
            "optimizer.register_step_pre_hook",
        )

    def compare(self) -> None:
        """Raise if the processes do not hold the same gradients in one of the first steps; collective."""
        if self._world.size == 1 or not self._trained or self._num_compared == COUNTED_STEPS:
            return
        self._num_compared += 1
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        sums = self._world.gather(sum(float(_values_of(it).abs().sum(dtype=torch.float64)) for it in gradients))
        if max(sums) - min(sums) > 1e-6 * max(sums):
            raise DrivetrainError(
                "the loop has changed the gradients of each process in another way after run.backward(loss), so the "
                "processes would train models of their own",
                remedy="add further losses to the one that run.backward gets; of gradients that the loop computes "
                "itself, give it sum((parameter * gradient.detach()).sum()) as a loss",
            )

    def loss_of(self, closure: Closure, batch: Any) -> Any:
        """Return a closure's loss of a batch. Raise if it has changed the gradients of the batches before."""
        before = gradient_versions(self._trained)
        loss = closure(batch)
        if before != gradient_versions(self._trained):
            raise DrivetrainError("the closure of run.step() has cleared or computed gradients", remedy=OF_BATCH)
        return loss


class WeightWatch:
    """Finds loops that change weights beside the optimizer, in their first steps.

    In the middle of a step, the batches that follow would have gradients of other weights. Before the optimizer's step,
    an update by hand that stayed in a script counts in addition; after it, its checkpoint may be written already. What
    a forward pass changes is left alone.

    Settings of the model, such as the rate of a dropout, are told where the loop changes them after a step: no
    checkpoint holds them. Those that it sets before a backward it sets again where it is resumed. So is a model that
    the loop leaves in evaluation mode.

    Args:
        model: The model, as the loop has it.
        trained: The parameters with gradients; empty where they are sharded. Some small ones are looked at.
        say: Prints a line.
        may_follow: Whether checkpoints hold what the loop does after `run.step()`.
    """

    _MOST, _LARGEST = 16, 4096

    def __init__(
        self, model: nn.Module, trained: Sequence[Tensor], say: Callable[[str], None], *, may_follow: bool
    ) -> None:
        self._may_follow = may_follow
        self._settings: SettingsWatch | None = SettingsWatch(model)
        self._heeding = [it for it in model.modules() if isinstance(it, (_NormBase, _DropoutNd))]
        self._began: list[nn.Module] | None = None  # those of them in training mode at the first backward
        self._num_off = 0  # steps in a row with none of these in training mode
        self._watched = [it for it in trained if it.numel() <= self._LARGEST][: self._MOST]
        self._say, self._copies = say, list[Tensor]()
        self._num_left = COUNTED_STEPS  # steps that are looked at

    def note(self, micro: MicroBatch) -> None:
        """Remember the weights where the loop gets control: after the backward of a batch."""
        self._look_at_modes(micro)
        self._copies = [it.detach().clone() for it in self._watched] if self._num_left else []

    def note_step(self) -> None:
        """Remember the weights, and the settings of the model, where the loop gets control after `run.step()`."""
        if self._settings is not None:
            self._settings.begin()
        self._copies = [it.detach().clone() for it in self._watched] if self._num_left else []

    def _look_at_modes(self, micro: MicroBatch) -> None:
        """Say once that the model was left in evaluation mode. In turns, as of a GAN, parts of it may be for some."""
        if self._began is None:
            self._began = [it for it in self._heeding if it.training]
        is_off = bool(self._began) and not any(it.training for it in self._began)
        self._num_off = self._num_off + micro.is_last if is_off else 0
        if self._num_off == COUNTED_STEPS:
            self._began = []
            self._say(
                "  loop       it left the model in evaluation mode: dropout and batch normalization are off since "
                "then, and a resumed run would begin in training mode. Call model.train() before the forward"
            )

    def check(self, micro: MicroBatch) -> None:
        """Raise or say that the loop has changed weights since `note`."""
        copies, self._copies = self._copies, []
        pairs = zip(self._watched, copies, strict=False)  # that are NaN in both, the step before was bad
        if all(torch.allclose(it.detach(), copy, rtol=0, atol=0, equal_nan=True) for it, copy in pairs):
            return
        remedy = (
            "leave an update by hand out: run.step() has the optimizer do it, and p.data.add_(p.grad, alpha=-lr) is "
            "torch.optim.SGD. Anything else, such as clipping weights, belongs "
        )
        remedy += "after run.step(), if not run.accumulating" if self._may_follow else "into a hook, dt.every(1, …)"
        if not micro.is_last:
            raise DrivetrainError(
                "the loop has changed weights before the step was over, whose other batches would have gradients of "
                "other weights",
                remedy=remedy,
            )
        self._num_left = 0
        self._say(f"  loop       it changes weights beside the optimizer. If that is not meant: {remedy}")

    def end(self, micro: MicroBatch) -> None:
        """Look at what the loop did after `run.step()`, and count a step, once its last batch is over."""
        if self._settings is not None and (names := self._settings.changed()):
            self._settings = None
            self._say(
                f"  loop       it changes {', '.join(names[:3])}{', …' if names[3:] else ''} of the model after "
                "run.step(), which no checkpoint holds: a resumed run begins with what the model is made with. Set it "
                "from run.steps or run.epoch before the forward of each batch, or keep it in a buffer (register_buffer)"
            )
        if not (micro.is_last and self._may_follow):
            self.check(micro)
        self._num_left = max(0, self._num_left - micro.is_last)


def _values_of(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
