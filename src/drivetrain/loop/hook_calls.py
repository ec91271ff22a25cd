"""Calls the hooks of a run at step boundaries, with all that they may ask for."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Subset, TensorDataset

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import ChecksFirst, ExpertAccess, Hook, Rehearsal, StepContext, Verdict
from drivetrain.core.isolation import modes_of, set_modes
from drivetrain.core.launchers import supervision
from drivetrain.core.metrics import Media, collecting, media_of, on_host
from drivetrain.core.state import KeptWatch, SettingsWatch, put_away
from drivetrain.core.world import World
from drivetrain.data.division import Place
from drivetrain.data.feed import DeviceFeed
from drivetrain.data.loader import Loader
from drivetrain.loop.stepper import Stepper
from drivetrain.loop.validation import Validation
from drivetrain.monitor.phases import HOOKS, VALIDATION
from drivetrain.strategies.optimizer_state import Average
from drivetrain.strategies.replicated import Freezer

_DEPTH = 2  # of objects within the data set that are looked into, such as its transforms


class RunLog(Protocol):
    """Writes events to the run's folder and lines to the terminal."""

    def event(self, kind: str, **facts: Any) -> None:
        """Write an event."""

    def say(self, text: str) -> None:
        """Print a line."""

    def logged(self, step: int, epoch: int, values: Mapping[str, float], media: Mapping[str, Media]) -> None:
        """Record what a hook logged after `step` steps, in an epoch from 0."""


_OF_SAMPLER = "its sampler's "


class DataWatch:
    """Finds code that changes the data set, as a curriculum does: no checkpoint holds that, and workers have a copy.

    The same holds for the user's sampler, as where it draws hard samples more often: it is read ahead.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader, self._dataset = loader, loader.source.dataset
        given = loader.source.sampler, loader.source.batch_sampler
        self._samplers = [it for it in given if it is not None and not hasattr(it, "set_epoch")]
        self._is_told = False

    def attributes(self) -> dict[str, Any]:
        """Return the numbers and texts among the attributes of the data set and of what it is made of, by their names.

        Names that begin with an underscore are left out: counters and caches have such names. Of a sampler, weights and
        lists of samples count as well, and the tensors of a TensorDataset, such as labels that the training chooses.
        """
        if self._is_told:
            return {}
        found = dict(_settings_of(self._dataset, "", _DEPTH))
        # What a data set of the user's keeps it may change itself, as a cache. It does not replace it.
        found |= {name: _Seen(it, looks_inside=False) for name, it in _lists_of(self._dataset)}
        found |= {name: _Seen(it) for name, it in _tensors_of(self._dataset)}
        for sampler in self._samplers:
            found |= dict(_settings_of(sampler, _OF_SAMPLER, 1))
            found |= {f"{_OF_SAMPLER}{name}": _Seen(it) for name, it in _lists_of(sampler)}
        return found

    def judge(self, before: Mapping[str, Any], who: str, *, is_restored: bool = False) -> str:
        """Return what to say of the attributes that a hook or a loop changed; raise where that has no effect.

        Args:
            before: The attributes as they were.
            who: What changed them, in words.
            is_restored: Whether it can take its state up again when a run is resumed.
        """
        now = self.attributes()
        changed = [name for name, value in now.items() if name in before and before[name] != value == value]  # no nan
        if not changed:
            return ""
        self._is_told, loader = True, self._loader
        of_data = [name for name in changed if not name.startswith(_OF_SAMPLER)]
        names = ", ".join(name.removeprefix(_OF_SAMPLER) for name in (of_data or changed)[:3])
        of = "data set" if of_data else "sampler"
        what = f"{who} has changed {names} of the {of}"
        if not of_data:
            if loader.num_workers or isinstance(loader.feed, DeviceFeed):
                raise DrivetrainError(
                    f"{what}, which is read ahead: it has no effect, or a late one",
                    remedy="let the sampler decide by the epoch: its method set_epoch(epoch) is called before it is "
                    "read; on a CPU, --num-workers 0 reads it when an epoch begins",
                )
        elif loader.num_workers or (loader.resident is not None and not self._shares(of_data)):
            held = "its items are read by worker processes, which have a copy of it"
            if loader.resident is not None:
                held = "its items were copied to memory beforehand"
            raise DrivetrainError(
                f"{what}, and {held}: it has no effect",
                remedy="--num-workers 0 --resident off reads items in the training process; or let the data set decide "
                "by the epoch: its method set_epoch(epoch) is called wherever it is read",
            )
        if is_restored:
            return ""
        return (
            f"{what}, and no checkpoint holds that: a resumed run differs until it is set again. Let a hook with "
            f"state_dict and load_state_dict set it, or the {of} itself, in set_epoch(epoch)"
        )

    def _shares(self, names: Sequence[str]) -> bool:
        """Return whether the resident data are the very tensors that were changed, on a CPU, and not copies."""
        resident, own = self._loader.resident, dict(_tensors_of(self._dataset))
        is_same = type(self._dataset) is TensorDataset and resident is not None and resident.device.type == "cpu"
        return is_same and all(name in own for name in names)


def _tensors_of(dataset: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a TensorDataset, or of one that others take a part of, with their names."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else ()
    return [(f"tensors[{number}]", it) for number, it in enumerate(tensors) if isinstance(it, Tensor)]


def _lists_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the lists, arrays and tensors among the attributes of an object, with their names."""
    for name, value in getattr(thing, "__dict__", {}).items():
        if isinstance(value, (Tensor, np.ndarray, list)) and not name.startswith("_"):
            yield name, value


class _Seen:
    """A list or a tensor as it was: equal to another look at it unless it was replaced, written to or has grown.

    Args:
        value: The list, array or tensor.
        looks_inside: Whether it counts what is written to it; otherwise only its replacement does.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any, *, looks_inside: bool = True) -> None:
        self._value, self._mark = value, 0
        if looks_inside:
            self._mark = value._version if isinstance(value, Tensor) else len(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and self._value is other._value and self._mark == other._mark


def _settings_of(thing: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    plain = (bool, int, float, str)
    of_class = {name: value for name, value in vars(type(thing)).items() if isinstance(value, plain)}
    for name, value in {**of_class, **getattr(thing, "__dict__", {})}.items():
        if name.startswith("_"):
            continue
        if isinstance(value, plain):
            yield f"{prefix}{name}", value
        elif depth and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type)):
            yield from _settings_of(value, f"{prefix}{name}.", depth - 1)


def _keeps_state(hook: Hook) -> bool:
    return getattr(type(hook), "state_dict", None) is not Hook.state_dict


def _name(hook: Hook) -> str:
    return str(hook) if type(hook).__str__ is not object.__str__ else type(hook).__name__


class HookCalls:
    """Calls hooks. The trainer decides when, and has waited for the step before."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        folder: Path,
        recorder: RunLog,
        stepper: Stepper,
        validation: Validation | None,
        average: Average | None,
        rehearsal: Rehearsal | None,
        check_model: Callable[[], None],
        freezer: Freezer | None,
        loader: Loader,
    ) -> None:
        self._data = DataWatch(loader)
        self._model, self._optimizer, self._world, self._folder = model, optimizer, world, folder
        self._recorder, self._stepper, self._validation, self._average = recorder, stepper, validation, average
        self._rehearsal, self._check_model, self._freezer = rehearsal, check_model, freezer
        self._modules, self._has_told_of_modes = list(model.modules()), False
        self._settings, self._has_told_of_settings = SettingsWatch(model), False
        self._planted: nn.Parameter | None = None
        self._has_planted = False
        self._kept, self._num_looks = KeptWatch(model), dict[int, int]()

    def check(self, hook: Hook, step: int) -> None:
        """Let a hook look at the run before its first step, if it wants to."""
        if isinstance(hook, ChecksFirst):
            hook.check(self._context(step, 0))

    def _context(self, step: int, epoch: int, loss: float = math.nan) -> StepContext:
        return StepContext(
            step,
            epoch,
            self._model,
            self._world,
            self._folder,
            self._recorder.event,
            batch=self._stepper.last_batch,
            say=self._recorder.say,
            measure=lambda: {} if self._validation is None else self._validation.measure(self._model),
            loss=loss,
            freeze=self._freeze,
            unfreeze=self._unfreeze,
            experts=ExpertAccess(self._companions, self._rehearsal),
        )

    def _freeze(self, *patterns: str) -> None:
        if self._freezer is not None:
            self._freezer.freeze(patterns)
            self._stepper.start_over()

    def _unfreeze(self, *patterns: str) -> None:
        if self._freezer is not None:
            self._freezer.unfreeze(patterns)
            self._stepper.start_over()

    def call(self, hooks: list[Hook], place: Place, loss: float) -> Verdict:
        """Call hooks after a step, and return what they ask for together.

        Args:
            hooks: Those that are due.
            place: The step that was done.
            loss: Its loss.
        """
        context = self._context(place.step + 1, place.epoch + place.ends_epoch, loss)
        verdicts = []
        before = self._rates_and_gradients()
        self._plant_gradient()
        for number, hook in enumerate(hooks):
            put_away(self._model)
            modes = modes_of(self._modules)
            phase = "validation" if hook is self._validation else "hooks"
            is_watched = phase == "hooks" and getattr(hook, "changes_data", True)
            attributes = self._data.attributes() if is_watched else {}
            is_set = phase == "hooks" and not self._has_told_of_settings
            if is_set:
                self._settings.begin()
            if phase == "hooks":
                self._stepper.seed_hook(context.step, number)
            with supervision.in_phase(phase), collecting(copies=self._world.is_main) as logged:
                verdicts.append(hook(context) or Verdict())
            if phase == "hooks":
                self._look_at_state(hook)
            is_restored = isinstance(hook, ChecksFirst) or _keeps_state(hook)
            if is_set and (names := self._settings.changed()) and not is_restored:
                self._tell_of_settings(hook, names)
            if attributes and (words := self._data.judge(attributes, _name(hook), is_restored=is_restored)):
                self._recorder.event("data", notes=[words])
                self._recorder.say(f"  data       {words}")
            if modes[0][1] and not self._model.training:  # the model itself is the first of its modules
                set_modes(modes)
                self._tell_of_modes(hook)
            if logged:
                media = media_of(logged)
                self._recorder.logged(context.step, place.epoch, on_host(logged), media)
            self._stepper.clock.lap(VALIDATION if hook is self._validation else HOOKS)
        self._check_model()
        self._refuse_changes(*before)
        self._planted = None
        self._stepper.look_again()
        return Verdict(*(any(wishes) for wishes in zip(*verdicts, strict=True))) if verdicts else Verdict()

    def _rates_and_gradients(self) -> tuple[list[Any], list[int]]:
        rates = [group["lr"] for group in self._optimizer.param_groups]
        gradients = [-1 if weight.grad is None else weight.grad._version for weight in self._model.parameters()]
        return [(id(rate), rate._version) if isinstance(rate, Tensor) else rate for rate in rates], gradients

    def _plant_gradient(self) -> None:
        """Give a weight a gradient while hooks are called for the first time, where steps leave none behind.

        Otherwise a hook that clips gradients would find none, and do nothing.
        """
        weights = [] if self._has_planted else [*self._model.parameters()]
        self._has_planted = True
        if weights and all(weight.grad is None and not hasattr(weight, "to_local") for weight in weights):
            trained = [weight for weight in weights if weight.requires_grad]
            self._planted = min(trained, key=Tensor.numel, default=None)
            if self._planted is not None:
                self._planted.grad = torch.ones_like(self._planted)

    def _refuse_changes(self, rates: list[Any], gradients: list[int]) -> None:
        """Raise where a hook has changed what the next step sets anew: it would have no effect, in silence."""
        rates_now, gradients_now = self._rates_and_gradients()
        planted = None if self._planted is None else self._planted.grad
        is_changed = planted is not None and planted._version > 0
        if self._planted is not None:
            self._planted.grad = None
            gradients_now = gradients
        if rates_now != rates:
            raise DrivetrainError(
                "a hook has changed the learning rate: the schedule sets it anew in each step",
                remedy="give the job a schedule: dt.WarmupCosine, a function from the step to a factor of the "
                "optimizer's rate, or one from the optimizer to a torch scheduler",
            )
        if is_changed or any(now not in (-1, then) for then, now in zip(gradients, gradients_now, strict=False)):
            raise DrivetrainError(
                "a hook has changed gradients: the step that they are of is done, and the next one clears them",
                remedy="Job(clip_norm=…) clips them; anything else can be done in "
                "optimizer.register_step_pre_hook, in the function that makes the optimizer",
            )

    def _look_at_state(self, hook: Hook) -> None:
        """Say once, after its second call, what a hook keeps that no checkpoint holds."""
        looks = self._num_looks[id(hook)] = self._num_looks.get(id(hook), 0) + 1
        if looks > 2 or isinstance(hook, ChecksFirst) or type(hook).state_dict is not Hook.state_dict:
            return  # it can take its state up again
        names = self._kept.look(hook)
        if names:
            self._recorder.say(
                f"  hooks      {_name(hook)} keeps {', '.join(names[:3])}, which no checkpoint holds: a resumed run "
                "begins anew with it. Tensors belong into the model, as a frozen part or a buffer (Job(ema=…) keeps an "
                "average), numbers into state_dict and load_state_dict of a dt.Hook"
            )

    def _tell_of_modes(self, hook: Hook) -> None:
        """Say once that `model.eval()` in a hook was undone: dropout and batch norm would be off from then on."""
        if not self._has_told_of_modes:
            self._has_told_of_modes = True
            self._recorder.say(
                f"  hooks      {_name(hook)} left the model in evaluation mode: it is back in training mode"
            )

    def _tell_of_settings(self, hook: Hook, names: Sequence[str]) -> None:
        """Say once that a hook changes settings of the model, such as the rate of a dropout."""
        self._has_told_of_settings = True
        self._recorder.say(
            f"  hooks      {_name(hook)} has changed {', '.join(names[:3])}{', …' if names[3:] else ''} of the model, "
            "which no checkpoint holds: a resumed run begins with what the model is made with. Keep it in a buffer "
            "(register_buffer), or set it in the hook's check(context), too, which comes first in each run: "
            "context.step is then that of the checkpoint"
        )

    def _companions(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors kept for a parameter element by element: optimizer state and moving average."""
        state = {**self._optimizer.state.get(parameter, {}), "average": self._average and self._average.of(parameter)}
        return {
            name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == parameter.shape
        }
