"""Compiles the loss function and the model inside it as one, or each of the blocks that a model repeats.

The loss alone can take as much time and memory as several layers: over a large vocabulary its input is the largest
tensor of the step. Compiled together with the model, it is fused with the operation that makes that input. But the
compiler then works through every layer. Blocks of one kind share their code: compiled one by one, the first costs
seconds, and the others nothing.
"""

import copy
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.launchers import supervision
from drivetrain.core.metrics import logging_loss
from drivetrain.data.batch import leaves, map_tensors
from drivetrain.moe import MixtureOfExperts
from drivetrain.plan.knobs import CompileScope, StepWay
from drivetrain.strategies.base import LossFunction
from drivetrain.strategies.layers import repeated_blocks

_made_for: list["_MadeFor"] = []  # what the compiler's code in this process was made for, if there is any
_compiling: list[AbstractContextManager[None]] = []  # the phase of the supervision while something is compiled
_raised_limits: list[int] = []  # torch's limits of graphs, as they were before they were raised
GRAPHS_PER_MODULE = 4  # at most: two dtypes of the input, for training and for validation
EXPERTS = "experts"  # of a mixture: its layer is compiled, since the experts' products are grouped there


@dataclass(frozen=True)
class CompileOptions:
    """How code is compiled.

    Attributes:
        mode: The mode of `torch.compile`.
        fixed: Whether kernels are chosen without timing them, where the choice changes results.
        draws_as_eager: Whether dropout and the like draw the random numbers that they draw in eager steps.
    """

    mode: str = "default"
    fixed: bool = False
    draws_as_eager: bool = False

    @classmethod
    def of(cls, way: StepWay) -> "CompileOptions":
        return cls(way.compile_mode or cls.mode, way.repeat != "off", way.draws_as_eager)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile`. A mode is a set of options, and torch takes one or the other."""
        if not self.fixed and not self.draws_as_eager:
            return {"mode": self.mode}
        of_mode = torch._inductor.list_mode_options(self.mode) if self.mode != "default" else {}
        if not self.fixed:
            return {"options": {**of_mode, "fallback_random": True}}
        # With deterministic algorithms on, the generator that inductor puts into compiled dropout draws other numbers
        # in each call, whatever the seed (torch 2.11): torch's own is called instead, which draws what an eager step
        # draws.
        return {"options": {**of_mode, "deterministic": True, "fallback_random": True}}


def why_not_compiled(device: torch.device) -> str:
    """Return why nothing can be compiled for a device, such as a C++ compiler that is missing; empty if it can.

    Tried on a function of one line. What was compiled once is taken from the compiler's cache afterwards.
    """

    def double(values: torch.Tensor) -> torch.Tensor:
        return (2 * values).sum()

    values = torch.ones(4, device=device, requires_grad=True)
    try:
        torch.autograd.backward(torch.compile(double)(values))
    except Exception as error:  # noqa: BLE001  (whatever it is, eager steps do without)
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[0].strip() if lines else type(error).__name__
    return ""


@contextmanager
def told_of_compiling(tell: Callable[[str], None]) -> Iterator[None]:
    """Have the supervisor told when something is compiled in the middle of training: that is no hang.

    Args:
        tell: Is called with a sentence on each function that the compiler gives up, now or in a trial before.
    """
    dynamo = sys.modules.get("torch._dynamo.callback")  # not imported: nothing is compiled
    # `torch.compiler.reset()`, which planning calls and users may, takes all callbacks out.
    if dynamo is not None and _begin_compiling not in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.register_start_callback(_begin_compiling)
        dynamo.callback_handler.register_end_callback(_end_compiling)
    for sentence in _LIMITS.reached:
        tell(sentence)
    _LIMITS.tell = tell
    try:
        yield
    finally:
        _LIMITS.tell = None


class _Limits(logging.Filter):
    """Hears of a function that the compiler gives up: it logs that, and runs the function eagerly from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[str] = []
        self.tell: Callable[[str], None] | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if "hit config." in str(record.msg) and isinstance(record.args, tuple) and len(record.args) >= 4:
            _, limit, function, reason = map(str, record.args[:4])
            is_loss = logging_loss.__code__.co_filename in function  # which calls that of the user
            name = "the loss function" if is_loss else function.split(" ")[0].strip("'")
            guard = reason.partition(": ")[2].partition("#")[0].strip()
            self.reached.append(
                f"{name} runs eagerly from here on: the compiler has made {limit} versions of it, as a Python value in "
                f"it changes{guard and f' ({guard} no longer holds)'}. Keep such a value in a tensor, for instance a "
                "buffer. A resumed run is compiled anew, and may differ in rounding"
            )
            if self.tell is not None:
                self.tell(self.reached[-1])
        return True


_LIMITS = _Limits()


def _begin_compiling(_: Any = None) -> None:
    _compiling.append(supervision.in_phase("compile"))
    _compiling[-1].__enter__()


def _end_compiling(_: Any = None) -> None:
    if _compiling:
        _compiling.pop().__exit__(None, None, None)


class _MadeFor(NamedTuple):
    sizes: tuple[object, ...]
    parts: list[Callable[[object], bool]]  # whether an object is this part of the job
    scope: CompileScope | None  # in which a loss function was compiled, if one was
    graphs_before: int  # in this process, for others

    def is_job(self, sizes: tuple[object, ...], parts: Sequence[object]) -> bool:
        same = len(parts) == len(self.parts) and all(is_same(it) for is_same, it in zip(self.parts, parts, strict=True))
        return same and sizes == self.sizes


def leave_to(way: StepWay, model: nn.Module, parts: Sequence[object]) -> None:
    """Forget what the compiler made for another job of this process, or in another scope: it would use that here, too.

    It does not notice that blocks are no longer compiled by themselves, and would run them eagerly; and sizes and
    numbers that differ from those it saw before become variables of its code. A run must not depend on what came before
    it in its process: resumed in a fresh one, it would round otherwise.

    Args:
        way: How steps are going to be run.
        model: The job's model, before it is changed for that.
        parts: The objects that say what a step computes: those of another job are others.
    """
    if way.compile_mode is None:
        return
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_LIMITS)
    modules = tuple((name, type(module)) for name, module in model.named_modules())
    shapes = tuple((name, parameter.shape) for name, parameter in model.named_parameters())
    sizes, scope = (modules, shapes, way.micro_batch), way.compile_scope if way.compiles_loss else None
    before = _made_for[0] if _made_for else None
    if before and not (before.is_job(sizes, parts) and (scope is None or before.scope in (None, scope))):
        torch.compiler.reset()
        before = None
    if before is None:
        _LIMITS.reached.clear()
        while _raised_limits:
            torch._dynamo.config.recompile_limit = _raised_limits.pop()
    graphs = before.graphs_before if before else num_graphs()
    scope = scope or (before.scope if before else None)
    _made_for[:] = [_MadeFor(sizes, [_is_same(it) for it in parts], scope, graphs)]


def _is_same(thing: object) -> Callable[[object], bool]:
    """Return what tells whether another object is this one, which it does not keep alive."""
    if isinstance(thing, MethodType):
        method = weakref.WeakMethod(thing)  # a new object each time that it is looked up
        return lambda other: method() == other
    try:
        known = weakref.ref(thing)
    except TypeError:  # such as a list
        number = id(thing)
        return lambda other: id(other) == number
    return lambda other: known() is other


def compile_named(model: nn.Module, names: Sequence[str], options: CompileOptions) -> None:
    """Compile the forward of the modules with these names, in place."""
    compile_each([module for name in names for module in modules_named(model, name)], options)


def compile_repeated(model: nn.Module, options: CompileOptions, varying_dims: Sequence[int] = ()) -> None:
    """Compile the forward of each repeated block, in place.

    Of a loss function that says which dimensions of its batches vary (`varying_dims`), the same dimensions of what a
    block is given are taken to vary.
    """
    compile_each(list(repeated_blocks(model).values()), options, varying_dims)


def compile_each(modules: Sequence[nn.Module], options: CompileOptions, varying_dims: Sequence[int] = ()) -> None:
    """Compile the forward of each module by itself, in place. Its hooks run outside of what is compiled.

    Modules of one class share their code, of which the compiler makes a graph for each kind: another width, another
    dtype of the input, with gradients and without. Beyond torch's limit of eight it would run the rest eagerly.
    """
    config, limit = torch._dynamo.config, GRAPHS_PER_MODULE * len(modules)
    if limit > config.recompile_limit:
        _raised_limits.append(config.recompile_limit)
        config.recompile_limit = limit
    for module in modules:
        module.forward = _CompiledForward(module, options.arguments(), tuple(varying_dims))


def forget_compiled(model: nn.Module) -> None:
    """Give modules back their own forward, where an earlier run of the same instance had compiled it."""
    for module in model.modules():
        found = vars(module).get("forward")
        if isinstance(found, _CompiledForward):
            found.undo()


class _CompiledForward:
    """The compiled forward of a module. A copy of the module has it for its own weights."""

    def __init__(self, module: nn.Module, options: dict[str, Any], varying_dims: tuple[int, ...]) -> None:
        self._module, self._options, self._varying_dims = module, options, varying_dims
        self._before = vars(module).get("forward")  # that was put in place of the method of its class
        if isinstance(self._before, _CompiledForward):
            self._before = self._before._before
        # The code of the method is the same for all blocks of a kind, and so is what the compiler makes of it.
        self._called = _by_itself(torch.compile(self._before or MethodType(type(module).forward, module), **options))

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._varying_dims:
            for leaf in leaves((args, named)):
                if isinstance(leaf, torch.Tensor):
                    _of_any_size(self._varying_dims, leaf)
        return self._called(*args, **named)

    def undo(self) -> None:
        del self._module.forward
        if self._before is not None:
            self._module.forward = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CompiledForward":
        return _CompiledForward(copy.deepcopy(self._module, memo), self._options, self._varying_dims)

    def __reduce__(self) -> tuple[Any, ...]:
        return _CompiledForward, (self._module, self._options, self._varying_dims)


def _by_itself(compiled_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same for a caller that is compiled, too: the compiler leaves the call out of the caller's graph."""

    def call(*args: Any, **named: Any) -> Any:
        return compiled_forward(*args, **named)

    called: Callable[..., Any] = torch.compiler.disable(call, recursive=False)  # type: ignore[no-untyped-call]
    return called


def modules_named(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules that a name of `--compile-only` means: it is dotted, or the last part of a dotted one."""
    found = [
        module
        for path, module in model.named_modules()
        if (isinstance(module, MixtureOfExperts) if name == EXPERTS else name in (path, path.rpartition(".")[2]))
    ]
    if not found:
        known = sorted({path.rpartition(".")[2] for path, _ in model.named_modules() if path})
        shown = ", ".join([*known[:12], *(["…"] if len(known) > 12 else [])])
        raise ConfigError([Problem("--compile-only", "the model has no such module", name, allowed=shown)])
    return found


def num_graphs() -> int:
    """Return how many graphs the compiler has made so far in this process: it can do nothing without a message."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def what_was_compiled(way: StepWay) -> str:
    """Return how many graphs there are for a job that was run in this way, and what runs eagerly all the same."""
    graphs = num_graphs() - (_made_for[0].graphs_before if _made_for else 0)
    words = f"{graphs} graphs in mode {way.compile_mode}" if graphs else "asked for, but nothing was compiled"
    return "; ".join([words, *_LIMITS.reached])


def compiled(loss: LossFunction, options: CompileOptions) -> LossFunction:
    """Compile the loss function, with what it logs as an output.

    A loss function that says which dimensions of its batches vary (`varying_dims`) is compiled once for all sizes,
    instead of once for the first size and once more for all when the second comes.
    """
    called = torch.compile(logging_loss(loss), **options.arguments())
    varying = varying_dims_of(loss)
    if not varying:
        return called

    def call(model: nn.Module, batch: Any) -> Any:
        return called(model, map_tensors(partial(_of_any_size, varying), batch))

    return call


def varying_dims_of(loss: LossFunction) -> tuple[int, ...]:
    """Return the dimensions of its batches that a loss function says to vary."""
    found: tuple[int, ...] = getattr(loss, "varying_dims", ())
    return found


def _of_any_size(dims: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    torch._dynamo.maybe_mark_dynamic(tensor, [dim for dim in dims if dim < tensor.dim()])
    return tensor
