"""Optimizers: the fused form of torch's, only where it does what the plain one does; several as one; closures.

Torch's fused kernels are faster, but take less than the plain ones: no sparse gradients, no momentum that begins later
than that of other parameters, and nothing that lies in memory in another order than its parameter. The last of these is
not even noticed on a CPU: elements are paired up wrongly. What is known beforehand keeps the plain form; what shows up
in a step (a sparse gradient from `F.embedding(sparse=True)`) is done by the plain form in that step, so that results
depend neither on when it showed up first nor on interruptions.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.state import is_distributed, local_part

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


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step requires a closure that computes the loss, as far as can be detected."""
    if wants_gradients_first(optimizer):
        return True  # SAM and its kin: two steps around a second backward
    try:
        parameters = inspect.signature(optimizer.step).parameters.values()
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
