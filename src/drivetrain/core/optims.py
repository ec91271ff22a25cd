"""Several optimizers in one job: which parameters each of them trains, by which loss, and in which turns of a step.

A step is one global batch. Optimizers that name the same loss share its backward; each loss is a turn of its own, and
the turns of a step follow one another over the same batch. In a turn only the parameters of its optimizers have
gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import LossSum, NamedLosses
from drivetrain.core.schedules import Schedule

Select = str | Sequence[str] | Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Optim:
    """One of several optimizers of a job: what it trains, by which loss, and when.

    Args:
        make: A function of the parameters, in groups, that returns the optimizer.
        params: Which parameters: a pattern of their names such as `"disc.*"`, a list of patterns, or a function of
            (name, parameter). None: all that no other optimizer names.
        loss: The name of its loss, where the job has several. Default: the optimizer's own name.
        schedule: Its learning rate over the steps of the job. Default: the job's schedule.
        clip_norm: The norm to clip the gradient of its parameters to. Default: the job's.
        weight_decay: Weight decay for its weights of two dimensions and more. Default: the job's.
        every: It takes part in every so many steps, beginning with the first. All optimizers of a loss have the same.

    Example:
        >>> optimizers = {
        ...     "layers": dt.Optim(lambda params: torch.optim.SGD(params, lr=0.1), params="layers.*"),
        ...     "rest": dt.Optim(lambda params: torch.optim.AdamW(params, lr=1e-3)),
        ... }
    """

    make: Callable[[Any], torch.optim.Optimizer]
    params: Select | None = None
    loss: str | None = None
    schedule: Schedule | None = None
    clip_norm: float | None = None
    weight_decay: float | None = None
    every: int = 1

    def selects(self, name: str, parameter: nn.Parameter) -> bool:
        """Return whether its selection names this parameter."""
        if callable(self.params):
            return bool(self.params(name, parameter))
        patterns = (self.params,) if isinstance(self.params, str) else (self.params or ())
        return any(fnmatchcase(name, pattern) for pattern in patterns)


class Turn(NamedTuple):
    """One loss of a step, and the optimizers that follow it."""

    name: str
    loss: Callable[[Any, Any], Any]
    optimizers: tuple[str, ...]
    every: int

    def is_due(self, step: int) -> bool:
        """Return whether it takes part in the step that follows `step` steps."""
        return step % self.every == 0


class LossByTurn:
    """The losses of a job that has several, by name. Called like one, it returns the results of all of them."""

    def __init__(self, functions: Mapping[str, Callable[[Any, Any], Any]]) -> None:
        self.functions = dict(functions)

    def __call__(self, model: Any, batch: Any) -> NamedLosses:
        found: dict[str, Tensor | LossSum] = {}
        for name, loss in self.functions.items():
            result = loss(model, batch)
            if isinstance(result, Mapping):
                found |= {f"{name}_{part}": value for part, value in result.items()}
            else:
                found[name] = result
        return found


def turns_of(losses: Mapping[str, Callable[[Any, Any], Any]], optims: Mapping[str, Optim]) -> tuple[Turn, ...]:
    """Return the turns of a step, in the order of the losses."""
    turns = []
    for name, loss in losses.items():
        followers = tuple(of for of, optim in optims.items() if (optim.loss or of) == name)
        turns.append(Turn(name, loss, followers, optims[followers[0]].every if followers else 1))
    return tuple(turns)


class Complaint(NamedTuple):
    """Something that is wrong with the losses or the optimizers of a job."""

    field: str  # of the job
    value: object
    message: str
    remedy: str


def complaints(loss: Any, optimizer: Any) -> Iterator[Complaint]:
    """Find what is wrong with named losses and named optimizers, before any of them is used."""
    losses = loss if isinstance(loss, Mapping) else None
    if not isinstance(optimizer, Mapping):
        if losses is not None:
            remedy = 'optimizer={"d": dt.Optim(make, params="disc.*", loss="d"), …}, one or more for each loss'
            yield Complaint("optimizer", optimizer, "there are several losses, and no optimizer names its loss", remedy)
        return
    example = '{"name": dt.Optim(lambda params: torch.optim.AdamW(params, lr=1e-3), params="encoder.*")}'
    if not optimizer:
        yield Complaint("optimizer", optimizer, "got an empty dictionary", f"for example optimizer={example}")
    for name, optim in optimizer.items():
        if isinstance(name, str) and isinstance(optim, Optim):
            yield from _optim_complaints(name, optim)
        else:
            message = f"{name!r} is {type(optim).__name__}, expected dt.Optim"
            yield Complaint("optimizer", optim, message, f"for example optimizer={example}")
            return
    rest = [name for name, optim in optimizer.items() if optim.params is None]
    if len(rest) > 1:
        message = f"{' and '.join(map(repr, rest))} name no parameters: only one of them can have the rest"
        yield Complaint("optimizer", rest, message, 'params="…", a pattern of names, for all but one')
    if losses is None:
        yield from _one_loss_complaints(optimizer)
    else:
        yield from _loss_complaints(losses, optimizer)


def _optim_complaints(name: str, optim: Optim) -> Iterator[Complaint]:
    where, params = f"optimizer[{name!r}]", optim.params
    make: Any = optim.make
    if not callable(make):
        message = f"make is {type(make).__name__}, expected a function that makes the optimizer"
        yield Complaint(where, make, message, "dt.Optim(lambda params: torch.optim.AdamW(params, lr=…))")
    if not isinstance(optim.every, int) or isinstance(optim.every, bool) or optim.every < 1:
        yield Complaint(where, optim.every, f"every is {optim.every!r}", "a whole number from 1")
    if optim.clip_norm is not None and not (isinstance(optim.clip_norm, (int, float)) and optim.clip_norm > 0):
        yield Complaint(where, optim.clip_norm, f"clip_norm is {optim.clip_norm!r}", "a number above 0")
    is_list = isinstance(params, Sequence) and all(isinstance(each, str) for each in params)
    if params is not None and not callable(params) and not is_list:
        message = f"params is {type(params).__name__}, expected a pattern of names"
        yield Complaint(
            where, params, message, 'params="disc.*", a list of patterns, or a function of (name, parameter)'
        )


def _one_loss_complaints(optims: Mapping[str, Optim]) -> Iterator[Complaint]:
    for name, optim in optims.items():
        where = f"optimizer[{name!r}]"
        if optim.loss is not None:
            message = f"it names the loss {optim.loss!r}, and the job has one loss without a name"
            yield Complaint(where, optim.loss, message, f'loss={{"{optim.loss}": function, …}} in the job')
        if optim.every != 1:
            message = "every counts the turns of one of several losses, and the job has one loss"
            yield Complaint(where, optim.every, message, "leave it out, or give the losses names: loss={…}")


def _loss_complaints(losses: Mapping[Any, Any], optims: Mapping[str, Optim]) -> Iterator[Complaint]:
    known = ", ".join(map(repr, losses))
    for name, loss in losses.items():
        if not isinstance(name, str) or not name.isidentifier():
            yield Complaint("loss", name, f"a loss is named {name!r}", "a short name, such as loss={'d': function}")
            return
        if not callable(loss):
            message = f"{name!r} is {type(loss).__name__}, expected a function of (model, batch)"
            yield Complaint("loss", loss, message, f'loss={{"{name}": lambda model, batch: …}}')
    for name, optim in optims.items():
        if (optim.loss or name) not in losses:
            message = f"it trains by the loss {optim.loss or name!r}, and the losses are {known}"
            yield Complaint(f"optimizer[{name!r}]", optim.loss, message, "dt.Optim(…, loss=…) with one of these names")
    turns = turns_of(losses, optims)
    for turn in turns:
        if not turn.optimizers:
            message = f"no optimizer follows the loss {turn.name!r}"
            yield Complaint("loss", turn.name, message, f'dt.Optim(…, loss="{turn.name}"), or leave the loss out')
        if len({optims[of].every for of in turn.optimizers}) > 1:
            message = f"the optimizers of the loss {turn.name!r} have different `every`, and share one backward"
            remedy = "the same `every`; or the same function as two losses, each with a name of its own"
            yield Complaint("optimizer", turn.optimizers, message, remedy)
    if turns and all(turn.every > 1 for turn in turns):
        message = "no optimizer takes part in every step: there would be steps that train nothing"
        yield Complaint("optimizer", [turn.every for turn in turns], message, "every=1 for one of them")


def chosen_parameters(model: nn.Module, optims: Mapping[str, Optim]) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each optimizer. Each that trains has exactly one, or the job is refused."""
    chosen: dict[str, list[nn.Parameter]] = {name: [] for name in optims}
    rest = next((name for name, optim in optims.items() if optim.params is None), None)
    left_out = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        found = [of for of, optim in optims.items() if optim.selects(name, parameter)]
        if len(found) > 1:
            raise DrivetrainError(
                f"the optimizers {found[0]!r} and {found[1]!r} both train {name}",
                remedy="narrow the patterns of dt.Optim(params=…) so that each parameter has one optimizer",
            )
        if found or rest is not None:
            chosen[found[0] if found else str(rest)].append(parameter)
        else:
            left_out.append(name)
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        raise DrivetrainError(
            f"no optimizer trains {', '.join(left_out[:3])}{more}",
            remedy="name them in dt.Optim(params=…); or leave params out of one optimizer, which then has the rest; or "
            "set requires_grad = False on them",
        )
    for name, parameters in chosen.items():
        if not parameters:
            names = ", ".join([name for name, _ in model.named_parameters()][:3])
            raise DrivetrainError(
                f"the optimizer {name!r} has no parameter to train: params={optims[name].params!r} names none",
                remedy=f"a pattern of the model's names, which are {names} and so on",
            )
    return chosen


@contextmanager
def only_training(parameters: Iterable[Tensor], trained: Iterable[Tensor]) -> Iterator[None]:
    """Let only some of the parameters have gradients inside the context. Those that are frozen stay so.

    Args:
        parameters: All that train in one turn or another.
        trained: Those that train now.
    """
    wanted = set(trained)
    others = [parameter for parameter in parameters if parameter not in wanted and parameter.requires_grad]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
