"""What can be known to be wrong before planning: a job that has changed, and settings that cannot work."""

import json
import math
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoint.weights import read_weights
from drivetrain.core.code_fingerprint import class_fingerprints, function_fingerprint, is_own, module_fingerprints
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.precision import LEAST_FEATURES, MULTIPLE, fits_fp8
from drivetrain.core.run_folder import RunFolder, as_row
from drivetrain.core.schedules import SWA, FactorSchedule, OnPlateau, is_factor
from drivetrain.data.division import key_of
from drivetrain.data.keyed_items import KeyedItems
from drivetrain.data.source import Glance, Source, are_steady, difference, glance
from drivetrain.job import Job
from drivetrain.run.claiming import ExtendedSchedule
from drivetrain.run.job_settings import ConfiguredOptimizer
from drivetrain.run.session import Session
from drivetrain.strategies.compiling import modules_named
from drivetrain.strategies.layers import repeated_blocks
from drivetrain.strategies.optimizer_state import batch_norms

# ----------------------------------------------------------------------------------------------------------------------
# Finds what has changed in a job since a run of it was begun: its functions, its model, samples of its data.
#
# A run that is continued with another loss or other data is neither the one that was begun nor a new one. It is
# reported, or refused with `--strict`. What cannot be compared is left out: that nothing is reported proves nothing.

FILE = "fingerprint.json"
NUM_SAMPLES, SECONDS = 8, 0.25  # of each data set
_MOST_NAMED = 3


class Fingerprint:
    """The fingerprint of a job and its model in their present state. `facts` is the part that is stored, as JSON."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._items: dict[str, KeyedItems] = {}
        self.not_covered: list[str] = []
        self.facts: dict[str, Any] = {
            "python": ".".join(platform.python_version_tuple()[:2]),
            "torch": torch.__version__,
            "machine": f"{platform.node()} {platform.machine()}",
            "functions": dict(self._functions(job)),
            "without_flags": self._without_flags(job),
            "parts": self._taken("the model's parts", module_fingerprints, model),
            "methods": self._methods(model),
            "samples": dict(self._samples(job)),
        }
        self.facts["not_covered"] = self.not_covered

    def changes_since(self, before: Mapping[str, Any]) -> list[str]:
        """Return what has changed, in words. A fact that one of the two fingerprints lacks is not a change."""
        now = self.facts
        found = []
        if before.get("python") == now["python"]:  # bytecode is another one in every version
            functions = before.get("functions", {})
            found += [f"the {name}" for name, mark in now["functions"].items() if functions.get(name, mark) != mark]
            methods = before.get("methods", {})
            changed = [name for name, mark in now["methods"].items() if methods.get(name, mark) != mark]
            found += [f"the code of {_some(changed)}"] if changed else []
        if before.get("torch") == now["torch"]:
            parts = before.get("parts", {})
            changed = [name or "the whole" for name, mark in now["parts"].items() if parts.get(name, mark) != mark]
            gone = [name for name in parts if name not in now["parts"]] if now["parts"] else []
            new = [name for name in now["parts"] if name not in parts] if parts else []
            names = [*changed, *gone, *new]
            found += [f"the model's structure ({_some(names)})"] if names else []
        for name in now["samples"]:
            numbers = self._changed_samples(name, before)
            if numbers:
                found.append(f"{'sample' if len(numbers) == 1 else 'samples'} {_some(numbers)} of the {name} data")
        return found

    def _changed_samples(self, name: str, before: Mapping[str, Any]) -> list[str]:
        then, now = before.get("samples", {}).get(name), self.facts["samples"][name]
        if not then or then["length"] != now["length"]:  # which is seen elsewhere
            return []
        common = [number for number in now["digests"] if number in then["digests"]]
        if before.get("machine") == self.facts["machine"]:
            changed = [number for number in common if then["digests"][number] != now["digests"][number]]
        else:  # another machine may round otherwise
            changed = [number for number in common if difference(now["sketches"][number], then["sketches"][number])]
        seen = {int(number): now["digests"][number] for number in changed}
        return changed if changed and are_steady(self._items[name], seen) else []

    def _functions(self, job: Job) -> Iterator[tuple[str, str]]:
        losses: dict[str, Any] = {f"loss function {turn.name}": turn.loss for turn in job.turns}
        makers: dict[str, Any] = {f"optimizer function {name}": optim.make for name, optim in job.optims.items()}
        things = losses or {"loss function": job.loss}
        things |= makers or {"optimizer function": job.optimizer}
        if not isinstance(job.schedule, (FactorSchedule, OnPlateau, ExtendedSchedule)):  # compared by their settings
            things["schedule"] = job.schedule
        if job.count is not None:
            things["count function"] = job.count
        if job.collate is not default_collate:
            things["collate function"] = job.collate
        things |= {
            f"metric {name}": metric for name, metric in job.metrics.items() if not isinstance(metric, nn.Module)
        }
        for name, thing in things.items():
            found = self._taken(name, function_fingerprint, thing)
            if found:
                yield name, found

    def _without_flags(self, job: Job) -> dict[str, str]:
        """Return the marks of functions as the user wrote them, where `functions` has them with values of flags."""
        if not isinstance(job.optimizer, ConfiguredOptimizer):
            return {}
        return {"optimizer function": self._taken("optimizer function", function_fingerprint, job.optimizer.make)}

    def _methods(self, model: nn.Module) -> dict[str, str]:
        found: dict[str, str] = {}
        for kind in {type(module): None for module in model.modules()}:
            if is_own(kind):
                found |= self._taken(f"the code of {kind.__qualname__}", class_fingerprints, kind)
        return found

    def _samples(self, job: Job) -> Iterator[tuple[str, Any]]:
        sources: dict[str, Source] = {"training": job.source}
        sources |= {f"validation {name}".strip(): source for name, source in job.valid_sets.items()}
        sources |= {f"test {name}".strip(): source for name, source in job.test_sets.items()}
        for name, source in sources.items():
            if not source.is_keyed:
                self.not_covered.append(f"the {name} data: it is read in an order of its own")
                continue
            self._items[name] = KeyedItems(source.dataset, job.seed)
            length = len(source.dataset)
            key = job.seed if name == "training" else 0  # runs of other seeds can be compared by what they held out
            numbers = list(dict.fromkeys(key_of(key, number) % length for number in range(NUM_SAMPLES)))
            found: Glance = glance(self._items[name], numbers, SECONDS)
            if not found.digests:
                self.not_covered.append(f"the {name} data: its samples are other ones each time, or of unknown kinds")
            yield (
                name,
                {
                    "length": length,
                    "digests": {str(number): digest for number, digest in found.digests.items()},
                    "sketches": {str(number): sketch for number, sketch in found.sketches.items()},
                },
            )

    def _taken(self, what: str, make: Any, thing: Any) -> Any:
        try:
            return make(thing)
        except Exception as error:  # noqa: BLE001  (of a thing of the user's, which may be anything)
            self.not_covered.append(f"the {what.removeprefix('the ')}: {type(error).__name__}: {error}")
            return {} if make is not function_fingerprint else ""


def read_fingerprint(folder: Path) -> dict[str, Any] | None:
    """Return the fingerprint of the run in a folder, when it was begun or last continued; None if it has none."""
    try:
        return as_row((folder / FILE).read_bytes())
    except OSError:
        return None


def as_text(fingerprint: Fingerprint) -> str:
    return json.dumps(fingerprint.facts) + "\n"


def _some(names: list[str]) -> str:
    shown = names[:_MOST_NAMED]
    if len(names) > _MOST_NAMED:
        return f"{', '.join(shown)} and {len(names) - _MOST_NAMED} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def changes_since_start(run: Session, model: nn.Module, folder: RunFolder | None, step: int | None) -> list[str]:
    """Return what has changed in the job since the run was begun; refused on all ranks with `--strict`.

    `step`: that of the checkpoint it goes on from; None for a new run. The model: as the user made it.
    """
    found = list[str]()
    if folder is not None:
        with torch.random.fork_rng(devices=[]):
            now = Fingerprint(run.job, model)
        before = None if step is None else read_fingerprint(run.path)
        found = [] if before is None else now.changes_since(before)
        run.fingerprint = as_text(now)
    if step is None or not run.config.run.strict:
        return found
    found = list(run.world.agree(found))
    if found:
        raise DrivetrainError(
            f"the job has changed since step {step} of {run.path} was saved, and --strict is set: {'; '.join(found)}",
            remedy="use the code and data it was begun with, another --name for a new run, or leave --strict out",
        )
    return found


def keep_fingerprint(run: Session, folder: RunFolder | None) -> None:
    """Record the job as it is now, once its checkpoint was loaded: a job that cannot go on leaves no trace."""
    if folder is not None:
        folder.keep_extension()
        folder.write(FILE, run.fingerprint)


# ----------------------------------------------------------------------------------------------------------------------
# Refuses what can be known to be wrong before planning, which may measure for a minute.


def refuse_before_planning(run: Session, model: nn.Module, checkpoint: Checkpoint | None) -> None:
    """Raise, on all ranks alike, for settings that would only be used after planning.

    Args:
        run: The run, whose folder is claimed.
        model: The model as the user made it.
        checkpoint: The one that the run goes on from; None for a new run.
    """
    for name in run.config.compile.only:
        modules_named(model, name)
    if run.precision.fp8 is not None:
        _refuse_fp8(run.precision.name, model)
    _refuse_schedule(run.job)
    if run.job.swa is not None:
        _refuse_averaging(run.job, run.job.swa, model)
    source = run.job.init_from
    if checkpoint is None and source is not None:
        run.world.main_does(lambda: _refuse_weights(Path(source)))


def _refuse_fp8(precision: str, model: nn.Module) -> None:
    if not any(fits_fp8(layer) for block in repeated_blocks(model).values() for layer in block.modules()):
        raise DrivetrainError(
            f"--precision {precision}: the model's repeated blocks have no linear layer that it would speed up, of at "
            f"least {LEAST_FEATURES} features in and out, and multiples of {MULTIPLE}",
            remedy="use --precision bf16",
        )


def _refuse_weights(source: Path) -> None:
    try:
        read_weights(source)
    except DrivetrainError as error:
        raise DrivetrainError(f"init_from: {error.message}", remedy=error.remedy) from None


def _refuse_schedule(job: Job) -> None:
    """Raise if the first or the last step has no learning rate; a schedule of the user's own may also raise itself."""
    for name in job.optims:
        _refuse_schedule(job.with_one(name))
    if not is_factor(job.schedule):
        return
    num_steps = job.num_steps
    for step in {0, (num_steps or 1) - 1}:
        factor = job.lr_factor(step, num_steps)
        if not -1e-9 < factor < math.inf:  # a little below 0 by rounding
            raise DrivetrainError(
                f"Job.schedule returned {factor} for step {step + 1}",
                remedy="return a finite number, 0 or more, for every step, as max(0.0, …) does",
            )


def _refuse_averaging(job: Job, swa: SWA, model: nn.Module) -> None:
    """Raise where no weights would be averaged, or where the statistics of batch-norm layers cannot be computed."""
    num_steps = job.num_steps
    if num_steps is None and not isinstance(swa.start, int):
        raise DrivetrainError(
            f"Job.swa: start={swa.start} is a fraction of the steps, and their number is not known beforehand",
            remedy="give max_steps, or start as a number of steps: dt.SWA(start=1000)",
        )
    if num_steps is not None:
        per_epoch = job.steps_per_epoch
        period = per_epoch if swa.every == "epoch" else swa.every
        last = num_steps if period is None else num_steps // period * period
        first = swa.first_step(num_steps)
        if last < first:
            raise DrivetrainError(
                f"Job.swa: {swa} averages nothing: it begins after {first} of {num_steps} steps, and no multiple of "
                f"{period} steps follows",
                remedy="an earlier start, or every=1",
            )
    if batch_norms(model) and job.source.is_iterable:
        raise DrivetrainError(
            "Job.swa: the averaged weights need new batch-norm statistics, and the data can only be iterated",
            remedy="give a data set with a length and items, or use ema=0.999, which keeps the statistics of training",
        )
