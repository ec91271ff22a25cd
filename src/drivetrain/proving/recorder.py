"""Watches a trainer from inside its process without its help: torch's optimizer hooks and the loss tensor's own hook.

What it sees is written out at once, entry by entry, so that it survives a kill -9. The trace of a run, step by step and
rank by rank, is read from these files: values only.
"""

import io
import os
import pickle
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from drivetrain.core.metrics import LossSum
from drivetrain.core.precision import as_real

SAVING_SECONDS = 0.4
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class TracedBatch:
    """One backward through the loss on one rank."""

    numbers: tuple[int, ...]  # of its samples
    loss: float
    weight: float  # the gradient that reached the loss: what the trainer multiplied it by
    content: tuple[int, ...] = ()  # digests of its items, where the case records them
    turn: str = ""  # which of several losses it was


@dataclass(frozen=True)
class StepTrace:
    """One optimizer step on one rank, as the optimizer saw it; with several losses, one turn of a step."""

    micro_batches: tuple[TracedBatch, ...]
    learning_rates: tuple[float, ...]  # by parameter group
    grad_norm: float  # of the gradients that the optimizer got: reduced and clipped
    gradients: Mapping[str, Tensor] | None = None  # by parameter name; only of the first steps
    weights: Mapping[str, Tensor] | None = None  # parameters before the step; only of the first steps
    digests: Mapping[str, int] | None = None  # of weights, buffers and optimizer state before the step, by name
    turn: str = ""  # the loss that the optimizer follows, of several

    @property
    def samples(self) -> tuple[int, ...]:
        """The numbers of the samples that counted, in the order in which they were used."""
        return tuple(number for micro in self.micro_batches if micro.weight for number in micro.numbers)


@dataclass(frozen=True)
class Reported:
    """The figures that the trainer itself reports of a step."""

    step: int  # from 0
    loss: float | None = None
    grad_norm: float | None = None  # before clipping
    turn: str = ""  # of several losses, the one that `loss` is of


@dataclass
class RankTrace:
    """One process of a run, from its start to its end or its kill."""

    steps: list[StepTrace] = field(default_factory=list)
    first_weights: Mapping[str, Tensor] = field(default_factory=dict)  # before its first step
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # when it ended: parameters and buffers
    reported: list[Reported] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """All ranks of one run. `error` is empty where it ended well; `killed` tells that it was killed on purpose."""

    ranks: Sequence[RankTrace]
    error: str = ""
    killed: bool = False
    seconds: float = 0.0

    @property
    def main(self) -> RankTrace:
        return self.ranks[0]

    @property
    def num_steps(self) -> int:
        return min((len(rank.steps) for rank in self.ranks), default=0)

    def samples(self, step: int) -> tuple[int, ...]:
        """Return the samples of a step over all ranks, ordered by rank."""
        return tuple(number for rank in self.ranks for number in rank.steps[step].samples)

    def division(self, step: int) -> list[list[tuple[int, ...]]]:
        """Return how a step was divided: for each rank, its micro-batches that counted."""
        return [
            [micro.numbers for micro in rank.steps[step].micro_batches if micro.weight and micro.numbers]
            for rank in self.ranks
        ]

    def reported(self, step: int, turn: str = "") -> Reported | None:
        entries = (entry for rank in self.ranks for entry in rank.reported)
        return next((entry for entry in entries if (entry.step, entry.turn) == (step, turn)), None)

    def only(self, numbers: Sequence[int]) -> "Trace":
        """Return the trace of some of its steps alone."""
        return replace(self, ranks=[replace(rank, steps=[rank.steps[n] for n in numbers]) for rank in self.ranks])


def read_rank(path: Path) -> RankTrace:
    """Read what a recorder wrote, up to the last complete entry: a kill may have cut the file."""
    trace = RankTrace()
    if not path.exists():
        return trace
    with path.open("rb") as file:
        while True:
            try:
                kind, value = pickle.load(file)
            except (EOFError, pickle.UnpicklingError, AttributeError, ValueError):
                return trace
            _add(trace, kind, value)


def _add(trace: RankTrace, kind: str, value: Any) -> None:
    if kind == "step":
        trace.steps.append(value)
    elif kind == "first_weights":
        trace.first_weights = value
    elif kind == "weights":
        trace.weights = value
    elif kind == "reported":
        trace.reported.append(value)
    elif kind == "note":
        trace.notes.append(value)
    elif kind == "restart":  # what was recorded so far was not training
        trace.steps.clear()
        trace.reported.clear()


@dataclass(frozen=True)
class Kill:
    """The moment when a process kills itself with SIGKILL, counted from its start."""

    step: int  # steps done before it
    when: Literal["micro_batch", "after_step", "saving"] = "after_step"
    number: int = 0  # of the micro-batch in the step; of the file operation in the save
    turn: int = 0  # with several losses: the turns of the step that are done before it

    def __str__(self) -> str:
        if self.when == "micro_batch":
            turn = f", in turn {self.turn + 1}" if self.turn else ""
            return f"in step {self.step + 1}{turn}, after micro-batch {self.number + 1}"
        return f"after step {self.step}" if self.when == "after_step" else f"in a save after step {self.step}"


class _EntryPickler(pickle.Pickler):
    """Writes tensors as their bytes: torch would write an archive for each, which takes several times as long."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.is_conj() or value.is_neg() or value.is_quantized:
            return NotImplemented
        content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor_of, (content, value.dtype, tuple(value.shape))


def _tensor_of(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


class Recorder:
    """Records one rank of a run. Everything a trainer may call is public; most need to call nothing.

    Args:
        path: where entries are written.
        keep_gradients: of how many steps from the first the gradients are kept by name.
        digests: whether weights, buffers and optimizer state are digested before every step.
        kill: when this process is to kill itself; its steps are counted as they are recorded, turn by turn.
        folder: the folder whose file operations count as saving.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep_gradients: int = 2,
        digests: bool = False,
        kill: Kill | None = None,
        folder: Path | None = None,
    ) -> None:
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._keep_gradients, self._digests, self._kill = keep_gradients, digests, kill
        self._models: list[nn.Module] = []
        self._turns: Mapping[str, str] = {}  # by parameter, where there are several losses
        self._stepping: Optimizer | None = None
        self.last_turn = ""  # whose loss was computed last, of several
        self._micro_batches: list[TracedBatch] = []
        self._num_backwards = 0
        self.num_steps = 0  # optimizer steps seen in this process
        self._has_weights = False
        self._given: dict[str, Tensor] | None = None
        self._is_hidden = False
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._open_step: list[StepTrace] | None = None
        self._num_operations = 0
        if kill is not None and kill.when == "saving" and folder is not None:
            self._watch_files(folder)

    # What a trainer may call

    def restart(self) -> None:
        """Drop what was recorded: training begins now. Used by trainers that try the model before the first step."""
        self._micro_batches.clear()
        self.num_steps = self._num_backwards = 0
        self._write("restart", None)

    def report(self, step: int, *, loss: float | None = None, grad_norm: float | None = None, turn: str = "") -> None:
        """Hand in what the trainer itself reports of step `step` (from 0): its loss, its norm before clipping.

        With several losses, `turn` names the one that is reported; the norm is that of all of them, without a name.
        """
        self._write("reported", Reported(step, loss, grad_norm, turn))

    def gradients(self, gradients: Mapping[str, Tensor] | None) -> None:
        """Hand in the gradients of the step that is about to be taken, where parameters' `.grad` does not hold them.

        None says that they cannot be seen at all; then only weights are compared.
        """
        self._is_hidden = gradients is None
        self._given = {own_name(name): _whole(value) for name, value in (gradients or {}).items()}

    def weights(self, weights: Mapping[str, Tensor]) -> None:
        """Hand in the final weights and buffers by name, where the model does not hold them whole."""
        self._has_weights = True
        self._write("weights", {own_name(name): _whole(value) for name, value in weights.items()})

    def note(self, text: str) -> None:
        """Leave a sentence for the certificate."""
        self._write("note", text)

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Count what happens inside as one optimizer step, for trainers that step parameter group by group.

        So do trainers that step several optimizers of one loss. With several losses, each of them is a step.
        """
        self._open_step = []
        try:
            yield
        finally:
            parts, self._open_step = self._open_step, None
        if parts:
            rates = tuple(rate for part in parts for rate in part.learning_rates)
            digests = {name: value for part in parts for name, value in (part.digests or {}).items()}
            self._write("step", replace(parts[0], learning_rates=rates, digests=digests or None))
            self._count_step()

    # What the case calls

    def built(self, model: nn.Module, turns: Mapping[str, str]) -> nn.Module:
        """Remember a model that the trainer asked for: its parameters give gradients their names, and turns."""
        self._models.append(model)
        self._turns = turns
        return model

    def watch_loss(
        self,
        numbers: Sequence[int],
        result: Any,
        content: Sequence[int] = (),
        *,
        is_empty: bool = False,
        turn: str = "",
    ) -> None:
        """Record a micro-batch once a gradient arrives at its loss; the gradient is what it was multiplied by.

        With named parts, it is the largest of their gradients. Where no part has an item (`is_empty`) all of them are
        rightly 0, and the micro-batch counts all the same.
        """
        parts = list(result.values()) if isinstance(result, Mapping) else [result]
        values = [part.total if isinstance(part, LossSum) else part for part in parts]
        values = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        if not values:
            return
        if isinstance(result, Mapping):
            shown = float(torch.stack([value.detach().double() for value in values]).nansum())
        else:
            (value,) = values
            shown = (
                float(value.detach() / result.count) if isinstance(result, LossSum) else float(value.detach().mean())
            )
        recorded: TracedBatch | None = None

        def arrived(gradients: Sequence[Tensor | None]) -> None:
            nonlocal recorded
            weight = max(
                float(as_real(gradient.detach()).double().abs().max()) for gradient in gradients if gradient is not None
            )
            weight = weight or float(is_empty)
            if recorded is not None and any(entry is recorded for entry in self._micro_batches):  # part by part
                place = next(number for number, entry in enumerate(self._micro_batches) if entry is recorded)
                recorded = replace(recorded, weight=max(weight, recorded.weight))
                self._micro_batches[place] = recorded
                return
            recorded = TracedBatch(tuple(numbers), shown, weight, tuple(content), turn)
            self._micro_batches.append(recorded)
            kill = self._kill
            if kill is not None and kill.when == "micro_batch" and self.num_steps >= kill.step:
                if self._num_backwards >= kill.number or self.num_steps > kill.step:
                    _die_later()
                self._num_backwards += 1

        if len(values) == 1:
            values[0].register_hook(lambda gradient: arrived([gradient]))
        else:
            register_multi_grad_hook(values, arrived)

    def finish(self, returned: Any) -> None:
        """Record the final weights: those that the trainer returned, else those of the model it trained."""
        for hook in self._hooks:
            hook.remove()
        if isinstance(returned, nn.Module):
            returned = returned.state_dict()
        if isinstance(returned, Mapping):
            self.weights({name: value for name, value in returned.items() if isinstance(value, Tensor)})
        elif not self._has_weights and self._models:
            model = self._trained_model(None)
            if not any(_is_shard(parameter) for parameter in model.parameters()):
                self.weights({name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)})
        self._file.close()

    # Torch's hooks

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Record a step; where the optimizer gets a closure, once that has computed the gradients.

        An optimizer may consist of others: the steps inside its own are part of it.
        """
        outer = self._stepping
        if outer is not None and outer is not optimizer and _held(optimizer) <= _held(outer):
            return None
        if not self._models or self._is_idle(optimizer):
            return None
        self._stepping = optimizer
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._record_step(optimizer)
            return None
        is_recorded = False

        def watched() -> Any:
            nonlocal is_recorded
            value = closure()
            if not is_recorded:
                is_recorded = True
                self._record_step(optimizer)
            return value

        return args[:1], {**kwargs, "closure": watched}

    def _record_step(self, optimizer: Optimizer) -> None:
        model = self._trained_model(optimizer)
        if self._open_step:  # a further parameter group of the same step
            rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
            digests = self._digest(model, optimizer) if self._digests else None
            self._open_step.append(replace(self._open_step[0], learning_rates=rates, digests=digests))
            return
        if self.num_steps == 0:
            self._write("first_weights", {name: _whole(value) for name, value in _named(model)})
        given, self._given = self._given, None
        turn = self._turn_of(model, optimizer)
        seen = {
            own_name(name): parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and self._turns.get(own_name(name), turn) == turn
        }
        gradients: dict[str, Tensor] | None = given
        if gradients is None and self.num_steps < self._keep_gradients:
            gradients = {name: _whole(gradient) for name, gradient in seen.items()}
        norms = [_norm(gradient) for gradient in (seen if gradients is None else gradients).values()]
        step = StepTrace(
            tuple(micro for micro in self._micro_batches if micro.turn == turn),
            tuple(float(group["lr"]) for group in optimizer.param_groups),
            float(torch.stack(norms).square().sum().sqrt()) if norms else 0.0,
            None if self._is_hidden else gradients,
            self._weights(model) if self.num_steps < self._keep_gradients else None,
            self._digest(model, optimizer) if self._digests else None,
            turn,
        )
        self._micro_batches = [micro for micro in self._micro_batches if micro.turn != turn]
        if self._open_step is not None:
            self._open_step.append(step)
        else:
            self._write("step", step)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is not self._stepping:
            return
        self._stepping = None
        if self._open_step is None:
            self._count_step()

    def _is_idle(self, optimizer: Optimizer) -> bool:
        """Return whether there is nothing to train: a stand-in for an optimizer, which a schedule is stepped on."""
        if any(parameter.numel() for group in optimizer.param_groups for parameter in group["params"]):
            return False
        return all(parameter.grad is None for model in self._models for parameter in model.parameters())

    def _turn_of(self, model: nn.Module, optimizer: Optimizer) -> str:
        """Return which of several losses an optimizer follows: by the parameters that it holds.

        If they are not the model's own, but shards of them, by the first loss that was trained since the last step; by
        the last that was computed, where a rank has no samples that count.
        """
        held = _held(optimizer)
        named = (own_name(name) for name, parameter in model.named_parameters() if id(parameter) in held)
        found = [self._turns[name] for name in named if name in self._turns]
        return next(iter(found), next((micro.turn for micro in self._micro_batches), self.last_turn))

    def _count_step(self) -> None:
        self.num_steps += 1
        self._num_backwards = 0
        kill = self._kill
        if kill is not None and kill.when == "after_step" and self.num_steps >= kill.step:
            _die_later()

    def _trained_model(self, optimizer: Optimizer | None) -> nn.Module:
        """Return the model whose parameters the optimizer holds; else the last with gradients; else the last one."""
        if optimizer is not None:
            held = _held(optimizer)
            for model in reversed(self._models):
                if any(id(parameter) in held for parameter in model.parameters()):
                    return model
            for model in reversed(self._models):
                if any(parameter.grad is not None for parameter in model.parameters()):
                    return model
        return self._models[-1]

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        return {own_name(name): _whole(parameter) for name, parameter in model.named_parameters()}

    def _digest(self, model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
        found = {f"weights/{name}": _digest(value) for name, value in _named(model)}
        names = {id(parameter): own_name(name) for name, parameter in model.named_parameters()}
        for number, (parameter, state) in enumerate(optimizer.state.items()):
            name = names.get(id(parameter), f"#{number}")
            for key, value in state.items():
                found[f"optimizer/{name}/{key}"] = _digest(value) if isinstance(value, Tensor) else hash(repr(value))
        return found

    # Files

    def _write(self, kind: str, value: Any) -> None:
        entry = io.BytesIO()
        _EntryPickler(entry).dump((kind, value))
        self._file.write(entry.getbuffer())

    def _watch_files(self, folder: Path) -> None:
        """Count files opened for writing, renamed or made below the folder, and kill this process at the chosen one."""
        inside, kill = str(folder), self._kill
        assert kill is not None

        def seen(event: str, args: tuple[Any, ...]) -> None:
            if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.truncate"):
                return
            if not args or not str(args[0]).startswith(inside) or self.num_steps < kill.step:
                return
            if event == "open" and not _writes(args):
                return
            self._num_operations += 1
            if self._num_operations > kill.number:
                _die()

        sys.addaudithook(seen)


def own_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _writes(args: tuple[Any, ...]) -> bool:
    mode, flags = (args[1] if len(args) > 1 else "r"), (args[2] if len(args) > 2 else 0)
    by_mode = isinstance(mode, str) and any(letter in mode for letter in "wax+")
    return by_mode or (isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR)))


def _die_later() -> None:
    """Die once a background save had the time to be finished; kills within saves are done elsewhere."""
    time.sleep(SAVING_SECONDS)
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(own_name(name), value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]


def _held(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _is_shard(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _whole(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory; of a sharded one, all of it. Ranks that hold shards take part together."""
    return _gathered(tensor).to("cpu", copy=True)


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(as_real(_gathered(gradient)).double())
    return norm.cpu()


def _gathered(tensor: Tensor) -> Tensor:
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    whole = tensor.detach() if gather is None else gather().detach()
    return whole.to_dense() if whole.is_sparse else whole


def _digest(tensor: Tensor) -> int:
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    own = tensor if local is None else local()
    own = own.detach().contiguous().cpu()
    return zlib.crc32(own.view(torch.uint8).numpy().data if own.dim() else repr(own.item()).encode())
