"""Optimizers: the fused form of torch's, several as one, closures; and several in one job, each with its turns."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import LossSum, NamedLosses
from drivetrain.core.schedules import Schedule
from drivetrain.core.state import is_distributed, local_part

# ----------------------------------------------------------------------------------------------------------------------
# Optimizers: the fused form of torch's, only where it does what the plain one does; several as one; closures.
#
# Torch's fused kernels are faster, but take less than the plain ones: no sparse gradients, no momentum that begins
# later than that of other parameters, and nothing that lies in memory in another order than its parameter. The last of
# these is not even noticed on a CPU: elements are paired up wrongly. What is known beforehand keeps the plain form;
# what shows up in a step (a sparse gradient from `F.embedding(sparse=True)`) is done by the plain form in that step, so
# that results depend neither on when it showed up first nor on interruptions.

_GUARD = "_fused_guard"


def use_fused(optimizer: Optimizer, model: nn.Module) -> None:
    """Turn on the fused form for each group where it gives the plain one's results, unless the user said how."""
    if not hasattr(optimizer, "_init_group"):  # not one of torch's: its steps cannot be inspected
        return
    # Known beforehand for modules; functional calls show up in the step.
    is_sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    may_be = not is_sparse and _has_kernels(optimizer)
    chosen = [group for group in optimizer.param_groups if may_be and _can_be_fused(group)]
    for group in chosen:
        group["fused"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):  # Adagrad makes it at once, where the plain form wants it
                state["step"] = state["step"].to(parameter.device, torch.float32)
    # What torch sets on optimizers that were made fused: they skip a step on the device, without asking the host.
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    if chosen:
        guard = FusedGuard(optimizer)
        setattr(optimizer, _GUARD, guard)
        optimizer._init_group = guard


def keep_rates_plain(optimizer: Optimizer) -> None:
    """Have the rates of an optimizer that wants tensors be numbers between its steps, as those of all others are.

    The optimizers of torchao refuse to step with a number, since their step is compiled for a tensor.
    """
    if not type(optimizer).__module__.startswith("torchao."):
        return

    def give_tensors(stepping: Optimizer, *_: Any) -> None:
        for group in stepping.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)

    def give_numbers(stepping: Optimizer, *_: Any) -> None:
        for group in stepping.param_groups:
            group["lr"] = float(group["lr"])

    give_numbers(optimizer)
    optimizer.register_step_pre_hook(give_tensors)
    optimizer.register_step_post_hook(give_numbers)


def tell_plain_steps(optimizer: Optimizer, say: Callable[[str], None]) -> None:
    """Have `say` called, once, if steps have to be done by the plain form; at once if there were some already."""
    for each in members_of(optimizer).values():
        guard = getattr(each, _GUARD, None)
        if guard is not None:
            guard.say = say
            guard.tell()


def as_parameters_lie(optimizer: Optimizer) -> None:
    """Lay out state that was loaded as its parameters lie in memory: fused kernels pair elements by address."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
                state[name] = laid_out.copy_(value)


class FusedGuard:
    """Wraps an optimizer's `_init_group`, which collects the tensors of a step, before anything is updated."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._collect = optimizer, optimizer._init_group  # type: ignore[attr-defined]
        self._plain: list[dict[str, Any]] = []  # groups whose last step was done by the plain form
        self._num_alike: dict[int, int] = {}  # by group: how many gradients were seen to lie as their parameters do
        self._has_momentum = isinstance(optimizer, SGD)
        self.say: Callable[[str], None] | None = None
        self._why = ""

    def __call__(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], *others: Any) -> Any:
        for number, plain in enumerate(self._plain):
            if plain is group:
                group["fused"] = True
                del self._plain[number]
                break
        found = self._collect(group, parameters, gradients, *others)
        if not group.get("fused"):
            return found
        if self._has_momentum:
            is_sparse = found
            if group["momentum"] != 0:
                self._begin_momentum(parameters, others[0])
        else:
            is_sparse = found[0] if isinstance(self._optimizer, Adagrad) else False
        if is_sparse:
            self._do_plainly(group, "a gradient is sparse", parameters, gradients, *others)
        elif len(parameters) != self._num_alike.get(id(group)):  # looked at when there are others, not in every step
            if all(map(_lie_alike, parameters, gradients)):
                self._num_alike[id(group)] = len(parameters)
            else:
                why = "a gradient lies in memory in another order than its parameter"
                self._do_plainly(group, why, parameters, gradients, *others)
        return found

    def tell(self) -> None:
        if self._why and self.say is not None:
            say, self.say = self.say, None
            say(self._why)

    def _begin_momentum(self, parameters: list[Tensor], buffers: list[Tensor | None]) -> None:
        """Fill missing momentum with zeros, which the kernel turns into the first gradient, as the plain form does.

        Torch itself assumes that all parameters begin in one step. And where that step is skipped for infinite
        gradients, it keeps uninitialized memory.
        """
        for number, buffer in enumerate(buffers):
            if buffer is None:
                buffers[number] = torch.zeros_like(parameters[number])

    def _do_plainly(self, group: dict[str, Any], why: str, *collected: Any) -> None:
        """Run this group's step in the plain form, this time."""
        optimizer: Any = self._optimizer
        infinite = getattr(optimizer, "found_inf", None)
        if infinite is not None:  # of a loss scaler, which leaves skipping to fused optimizers
            if infinite.item():  # the host waits for the device
                for part in collected:
                    part.clear()
                return
            optimizer.grad_scale = optimizer.found_inf = None
        group["fused"] = False
        self._plain.append(group)
        if not self._why:
            kind = type(optimizer).__name__
            self._why = f"{why}, which fused {kind} does not take: such steps are done by the plain form"
            self.tell()


def _has_kernels(optimizer: Optimizer) -> bool:
    """Return whether this torch has a fused form of the optimizer on its device: Adagrad's came later to GPUs."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not isinstance(optimizer, Adagrad) or all(parameter.device.type != "cuda" for parameter in parameters):
        return True
    return _adagrad_runs_fused_on_cuda()


@cache
def _adagrad_runs_fused_on_cuda() -> bool:
    """Return whether one step of a single weight runs. Some releases have the kernel and refuse it in Python."""
    weight = nn.Parameter(torch.zeros(1, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    try:
        Adagrad([weight], fused=True).step()
    except RuntimeError:
        return False
    return True


def _can_be_fused(group: dict[str, Any]) -> bool:
    if group.get("fused", False) is not None:  # the user said how, or there is no such thing
        return False
    if group.get("foreach") or group.get("differentiable") or group.get("capturable"):
        return False
    if group.get("momentum") and group.get("dampening"):  # a first gradient is not damped, later ones are
        return False
    return all(map(_is_plain, group["params"]))


def _is_plain(parameter: Tensor) -> bool:
    if not parameter.is_floating_point() or parameter.is_complex() or parameter.device.type not in ("cpu", "cuda"):
        return False
    if not is_distributed(parameter) and type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False  # a subclass with different arithmetic
    return torch.ops.aten.is_non_overlapping_and_dense(local_part(parameter))  # type: ignore[no-any-return]


def _lie_alike(parameter: Tensor, gradient: Tensor) -> bool:
    return parameter.stride() == gradient.stride() or parameter.numel() < 2


def step_hooks_of(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return what the user registered to be called before and after each step."""
    return [
        hook
        for member in members_of(optimizer).values()
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        for hook in getattr(member, kind, {}).values()
        if not getattr(hook, "__module__", "").startswith("drivetrain.")
    ]


def may_draw(optimizer: Optimizer) -> bool:
    """Return whether a step of the optimizer may draw random numbers, as Langevin dynamics do, or its hooks may.

    No optimizer of torch or Drivetrain does.
    """
    makers = [type(member).__module__ for member in members_of(optimizer).values()]
    return bool(step_hooks_of(optimizer)) or not all(it.startswith(("torch.optim.", "drivetrain.")) for it in makers)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step requires a closure that computes the loss, as far as can be detected."""
    if wants_gradients_first(optimizer):
        return True  # SAM and its kin: two steps around a second backward
    step: Any = optimizer.step
    if hasattr(step, "_wrapped_by_lr_sched"):  # a scheduler of torch was made for it: the signature has a `self` then
        step = step.__wrapped__.__get__(optimizer)
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(each.default is inspect.Parameter.empty and each.kind not in kinds for each in parameters)


def wants_gradients_first(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step with a closure begins with the gradients that are there, as SAM's does."""
    return callable(getattr(optimizer, "first_step", None)) and callable(getattr(optimizer, "second_step", None))


def closure_error(optimizer: Optimizer) -> DrivetrainError:
    """Return the error to raise before, or in place of, the first step."""
    return DrivetrainError(
        f"{type(optimizer).__name__} computes the loss several times in a step (it needs a closure), and a step has "
        "one forward and backward for each micro-batch here",
        remedy="use dt.drive, and call run.step(lambda batch: loss(run.model, batch)) in its loop, without "
        "run.backward; or use an optimizer that steps once per gradient, such as AdamW or SGD",
    )


@dataclass(frozen=True)
class GivenOptimizer:
    """Returns the optimizer of a loop of the user's own, which may step it with a closure.

    It was made before, with the parameters as the user's model has them: not with those of shards or of copies.
    """

    is_given: ClassVar[bool] = True
    optimizer: Optimizer
    takes_closure: bool = True

    def __call__(self, groups: Any) -> Optimizer:
        return self.optimizer


class JointOptimizer(Optimizer):
    """Several optimizers as one: the groups and the state are those of all of them, and a step is one of each.

    The members work on the same groups and the same state as the whole, so that a change of one is a change of both.
    """

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        self.members: dict[str, Optimizer] = {}
        super().__init__([nn.Parameter(torch.zeros(0))], {})  # has to be given one; the groups are the members'
        self.members = dict(members)
        states = [member.state for member in members.values()]
        if any(state is not states[0] for state in states):
            self._share(states)

    @property
    def state(self) -> "defaultdict[Any, Any]":
        return next(iter(self.members.values())).state

    @state.setter
    def state(self, state: "defaultdict[Any, Any]") -> None:
        for member in self.members.values():
            member.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members.values() for group in member.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Do nothing: torch sets them when it makes an optimizer."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Do nothing: the groups are the members'."""

    def _share(self, states: "Iterable[Mapping[Any, Any]]") -> None:
        """Let all members keep their state in one place."""
        together: defaultdict[Any, Any] = defaultdict(dict)
        for state in states:
            together.update(state)
        self.state = together

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for member in self.members.values():
            member.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned: each member loads its own part, as it would alone."""
        saved = iter(state_dict["param_groups"])
        for member in self.members.values():
            own = [next(saved) for _ in member.param_groups]
            numbers = {number for group in own for number in group["params"]}
            state = {number: value for number, value in state_dict["state"].items() if number in numbers}
            member.load_state_dict({"state": state, "param_groups": own})
        self._share([member.state for member in self.members.values()])


def members_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that an optimizer consists of, by name; one that is not joint under an empty name."""
    return optimizer.members if isinstance(optimizer, JointOptimizer) else {"": optimizer}


# ----------------------------------------------------------------------------------------------------------------------
# Several optimizers in one job: which parameters each of them trains, by which loss, and in which turns of a step.
#
# A step is one global batch. Optimizers that name the same loss share its backward; each loss is a turn of its own, and
# the turns of a step follow one another over the same batch. In a turn only the parameters of its optimizers have
# gradients.

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
