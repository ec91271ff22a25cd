"""What a run does when something fails: out of memory, bad numbers; and faults that are put into it on purpose."""

import gc
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from drivetrain.checkpoint import Files
from drivetrain.checkpoint.files import Written, steps_in
from drivetrain.core.errors import GOES_ON_WITH, DrivetrainError
from drivetrain.core.faults import ENVIRONMENT, Faults, parse_faults
from drivetrain.core.isolation import is_out_of_memory, raised_while_compiling
from drivetrain.core.log import notice
from drivetrain.core.run_folder import write_atomically
from drivetrain.data.division import Place
from drivetrain.data.loader import Loader
from drivetrain.loop import Stepper
from drivetrain.loop.bad_numbers import NO_SKIPS, RollBackError, Skips, facts_of
from drivetrain.monitor.recorder import NoRunRecorder, RunRecorder
from drivetrain.run.assemble import RunParts
from drivetrain.run.saver import CHECKPOINTS, CheckpointSaver
from drivetrain.run.session import Session
from drivetrain.strategies import SingleStrategy

# ----------------------------------------------------------------------------------------------------------------------
# What a run does when it is out of memory: it goes on with smaller micro-batches, and a step stays what it was.
#
# A run of one process repeats the step that failed, from the same state, with half the micro-batch. Where that state
# may have changed (in the optimizer's step, in buffers, in a captured step) it goes on from its last checkpoint
# instead. Of several processes, a rank that is out of memory leaves the others waiting in a collective, inside a
# backward that cannot be begun again: all of them are started again, as `drivetrain launch` does. The caps are kept in
# the run's folder, each with the step it holds from: later starts on the same kind of device with as many processes
# divide every step alike.

CAP_FILE, SNAPSHOT = "memory.json", "memory-snapshot.pickle"
_OTHER_WAYS_OUT = "--activations recompute or offload, --precision bf16, or fsdp on several GPUs"
_ASKED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]?i?B)")
Caps = Mapping[int, int]  # the micro-batch from a step on, by the number of steps done before it


@dataclass(frozen=True)
class Shortage:
    """Where memory ran out: in which phase of a step, in which module, and what was asked for."""

    phase: str
    module: str = ""  # its name in the model; empty outside of a forward
    asked: str = ""  # such as `2.00 GiB`; empty where the allocator does not say

    def __str__(self) -> str:
        words = f"in {self.phase}"
        if self.module:
            words += f" of {self.module}"
        return f"{words}, {self.asked} more asked for" if self.asked else words


def find_shortage(error: BaseException, model: nn.Module) -> Shortage:
    """Return where memory ran out, from the frames that an error went through.

    Args:
        error: The error.
        model: The model, whose modules are looked for.
    """
    names = {id(module): name for name, module in model.named_modules()}
    module, phase = "", "planning"
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        file, function = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module):
            module = names.get(id(own), module)
        phase = _phase_of(file, function) or phase
        trace = trace.tb_next
    if raised_while_compiling(error) is not None:
        phase = "compiling"
    asked = _ASKED.search(str(error))
    return Shortage(phase, "" if phase == "the optimizer's step" else module, "" if asked is None else asked[1])


def _phase_of(file: str, function: str) -> str:
    if file.endswith("loop/stepper.py"):
        return {"forward_backward": "the forward", "end": "the optimizer's step"}.get(function, "")
    if file.endswith("loop/validation.py"):
        return "validation"
    if "/drivetrain/strategies/" in file and function in ("backward", "_backward"):
        return "the backward"
    return "the trial before the first step" if function == "try_out" else ""


class StepRetry:
    """Repeats a step that was out of memory with half the micro-batch, and takes up caps of earlier starts.

    The trainer asks `may_repeat` when a step fails, and `shrink` before it runs the step again.
    """

    def __init__(
        self,
        run: Session,
        parts: RunParts,
        loader: Loader,
        stepper: Stepper,
        recorder: RunRecorder | NoRunRecorder,
        ahead: Caps,
    ) -> None:
        """Remember the state that a repeated step must find.

        Args:
            run: The run.
            parts: Its parts.
            loader: The loader of its steps, whose division becomes finer.
            stepper: Runs a step.
            recorder: Takes what there is to report.
            ahead: Caps of an earlier start, which hold from steps that are still to come.
        """
        self._run, self._parts, self._loader, self._stepper, self._recorder = run, parts, loader, stepper, recorder
        self._ahead = dict(ahead)
        # The step before which the micro-batch changes, by the number of steps done; None if it stays.
        self.next_change = min(self._ahead, default=None)
        self._buffers = [(buffer, buffer._version) for buffer in parts.model.buffers()]
        self._found = Shortage("")

    def may_repeat(self, error: Exception, place: Place) -> bool:
        """Return whether a step that failed can be repeated from the state it began with; keeps what is known of it.

        Args:
            error: What it raised.
            place: The step.
        """
        if not is_out_of_memory(error):
            return False
        self._found = note_shortage(self._run, error, self._parts.model, self._recorder, place.step + 1)
        smaller_or_refused(self._run, error, self._found)
        return not self._why_not()

    def _why_not(self) -> str:
        run, stepper = self._run, self._stepper
        if run.world.size > 1 or type(self._parts.strategy) is not SingleStrategy:
            return "the other ranks are in the middle of that step"
        if type(stepper) is not Stepper:
            return "the step is captured"
        if stepper.is_moving:
            return "the optimizer may have moved some weights"
        if not run.job.source.is_keyed or self._loader.count_ahead is not None or self._loader.watch is not None:
            return "its samples were read already"
        now = list(self._parts.model.buffers())
        if len(now) != len(self._buffers) or any(
            before is not buffer or buffer._version != version
            for buffer, (before, version) in zip(now, self._buffers, strict=True)
        ):
            return "the forward changes buffers"
        return ""

    def shrink(self, step: int) -> None:
        """Divide steps from this one on into smaller micro-batches: as an earlier start did, or half as large.

        Args:
            step: The number of steps done.
        """
        run, loader = self._run, self._loader
        before = loader.division.micro_batch
        size = self._ahead.pop(step, None)
        self.next_change = min(self._ahead, default=None)
        if size is None:
            size = before // 2
            assert isinstance(self._parts.strategy, SingleStrategy)
            self._parts.strategy.abandon()
            self._parts.optimizer.zero_grad()
            keep_cap(run, step, size, before)
            notice(
                f"step {step + 1} was out of memory ({self._found}) with micro-batches of {before} samples: it is "
                f"repeated with {size}, and a step stays what it was"
            )
        give_memory_back()
        loader.division = replace(loader.division, micro_batch=size)
        why = f"micro-batches of {before} samples or more ran out of memory"
        planned = replace(run.planned.but(micro_batch=size), why_capped=why)
        if planned.plan is not None:
            planned = replace(planned, plan=planned.plan.capped(size, -(-run.rank_samples // size), why))
        run.follow(planned)
        tell_cap(run, self._recorder, step)
        if planned.plan is not None:
            self._recorder.replan(planned.plan.as_plain(), size, str(run.way))


def note_shortage(
    run: Session, error: BaseException, model: nn.Module, recorder: NoRunRecorder | None, step: int
) -> Shortage:
    """Find where memory ran out, and keep it: an event, and on a GPU the allocator's snapshot.

    Args:
        run: The run.
        error: The error.
        model: The model.
        recorder: Takes the event; None if there is none yet.
        step: The step, from 1; 0 before the first.
    """
    found = find_shortage(error, model)
    snapshot = ""
    if run.world.device.type == "cuda":
        with suppress(Exception):  # what is known so far is worth more than the reason why this is not
            path = run.path / SNAPSHOT.replace(".", f"-rank{run.world.rank}.")
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            snapshot = path.name
    facts = {"phase": found.phase, "module": found.module, "asked": found.asked, "snapshot": snapshot}
    if recorder is not None:
        recorder.event("out of memory", step=step, micro_batch=run.way.micro_batch, **facts)
    return found


def smaller_or_refused(run: Session, error: BaseException, found: Shortage | None = None) -> int:
    """Return half the micro-batch; an error where there is nothing to halve, or where it would change the meaning."""
    before, held = run.way.micro_batch, run.weighting.holds_division
    where = "" if found is None else f" ({found})"
    if held:
        raise DrivetrainError(
            f"out of memory{where} with micro-batches of {before} samples, which cannot be made smaller without "
            f"changing what is learned: {held}",
            remedy=f"{_OTHER_WAYS_OUT}; or return a LossSum, if the loss is a sum over samples or tokens",
        ) from error
    if before <= len(run.devices):
        raise DrivetrainError(f"out of memory with one sample at a time{where}", remedy=_OTHER_WAYS_OUT) from error
    return before // 2


def heed_cap(run: Session, step: int) -> Caps:
    """Follow smaller micro-batches if earlier ones ran out of memory, and return those of later steps. Collective.

    Args:
        run: The run, once its folder is claimed.
        step: The number of steps done.
    """
    found = run.world.agree(_read_caps(run) if run.world.is_main else None)
    if found is None:
        return {}
    caps = {int(first): size for first, size in found["caps"]}
    here = min((size for first, size in caps.items() if first <= step), default=None)
    if here is not None and here < run.way.micro_batch:
        why = f"micro-batches of {found['ran_out']} samples or more ran out of memory"
        run.follow(replace(run.planned.but(micro_batch=here), why_capped=why))
    return {first: size for first, size in caps.items() if first > step}


def tell_cap(run: Session, recorder: RunRecorder | NoRunRecorder, step: int = 0) -> None:
    why = run.planned.why_capped
    if why:
        recorder.event("micro-batch capped", words=why, micro_batch=run.way.micro_batch, step=step)
        recorder.say(f"  memory     {why}: now {run.way.micro_batch}, and a step stays what it was")


def lower_cap(run: Session, error: BaseException) -> bool:
    """Have the next start take half the micro-batch; an error where there is nothing to halve.

    Returns:
        Whether it will, also in another process.
    """
    is_kept = keep_cap(run, 0, smaller_or_refused(run, error), run.way.micro_batch)
    if is_kept:
        error.__dict__[GOES_ON_WITH] = f"micro-batches of {run.way.micro_batch // 2} samples"  # for the supervisor
    return is_kept


_NOT_WRITTEN: dict[Path, dict[str, Any]] = {}  # caps of this process's runs: it goes on with them all the same


def keep_cap(run: Session, step: int, size: int, ran_out: int) -> bool:
    """Keep that micro-batches have this size after `step` steps: 0 is for every step of a later start.

    Returns:
        Whether other processes will know it. Where it cannot be written, as on a full disk, that is told.
    """
    before = (_read_caps(run) or {"caps": []})["caps"]
    caps = [[first, most] for first, most in before if first < step]
    machine = {"machine": run.machine(), "world_size": run.world.size}
    facts = {"micro_batch": size, "ran_out": ran_out, **machine, "caps": [*caps, [step, size]]}
    try:  # several ranks may be out of memory at once
        write_atomically(run.path / CAP_FILE, json.dumps(facts) + "\n", f".{run.world.rank}")
    except OSError as error:
        _NOT_WRITTEN[run.path] = facts
        notice(
            f"{run.path / CAP_FILE} cannot be written ({error.strerror or error}), so a later start begins with "
            f"micro-batches of {ran_out} samples again: free space there, or give it --batch-size {size}"
        )
        return False
    _NOT_WRITTEN.pop(run.path, None)
    return True


def can_go_on_here(run: Session) -> bool:
    """Return whether this process can start over: every changed state is in a checkpoint, or can be made again."""
    return run.world.size == 1 and can_begin_again(run)


def can_begin_again(run: Session) -> bool:
    """Return whether the data can be read again, and there is a state to go back to: a checkpoint, or the first one."""
    job = run.job
    return job.source.is_keyed and (has_checkpoint(run) or not (isinstance(job.model, nn.Module) or job.hooks))


def has_checkpoint(run: Session) -> bool:
    return bool(saved_steps(run))


def saved_steps(run: Session) -> list[int]:
    """Return the steps of the run's checkpoints; they are not verified."""
    folder = run.path / CHECKPOINTS
    return steps_in(folder) if folder.is_dir() else []


def give_memory_back() -> None:
    """Drop what the failed start has left on the device. Nothing may hold a reference to its error any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _read_caps(run: Session) -> dict[str, Any] | None:
    """Return the caps that were found with this device and world; None if there are none."""
    try:
        found = _NOT_WRITTEN.get(run.path) or json.loads((run.path / CAP_FILE).read_text(encoding="utf-8"))
        if (found["machine"], found["world_size"]) != (run.machine(), run.world.size):
            return None
        caps = found.get("caps") or [[0, found["micro_batch"]]]
        return {"ran_out": int(found["ran_out"]), "caps": [[int(first), max(1, int(size))] for first, size in caps]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ----------------------------------------------------------------------------------------------------------------------
# Takes a run back to its last checkpoint after bad numbers, and keeps which steps are left out then.
#
# They are kept in the run's folder, so that a run that is killed and resumed leaves out the same steps.

SKIPS_FILE = "bad_steps.json"
MOST_ROLLBACKS, MOST_SINGLE = 3, 10


def read_skips(run: Session) -> Skips:
    """Return the steps that the run leaves out. Collective, once the folder is claimed."""
    found = run.world.agree(_read(run) if run.world.is_main else None)
    if found is None:
        return NO_SKIPS
    return Skips(frozenset(found["single"]), tuple((first, last) for first, last in found["past"]))


def _read(run: Session) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((run.path / SKIPS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def rolls_back(run: Session, error: RollBackError) -> bool:
    """Have the next start leave out the steps that went bad. Return whether this process can start over. Collective.

    Args:
        run: The run.
        error: What went wrong.
    """
    return bool(run.world.main_does(lambda: _kept(run, error)))


def _kept(run: Session, error: RollBackError) -> bool:
    if not can_begin_again(run):
        return False
    saved = saved_steps(run)
    if not saved and not error.single:
        return False  # to leave out all that there was would learn nothing: the settings are to blame
    before = _read(run) or facts_of(NO_SKIPS)
    step = max((each for each in saved if each < error.last), default=0)
    kind, most = ("single", MOST_SINGLE) if error.single else ("past", MOST_ROLLBACKS)
    if len(before[kind]) >= most:
        raise DrivetrainError(
            f"{error.message}; the run went back to a checkpoint {most} times already, and it did not help",
            remedy="a lower learning rate, clip_norm, or repaired data (bad step in events.jsonl names the samples); "
            f"remove {SKIPS_FILE} from the run's folder to let it try again",
        )
    before[kind].append(error.last if error.single else [step + 1, error.last])
    try:
        write_atomically(run.path / SKIPS_FILE, json.dumps(before) + "\n")
    except OSError as problem:
        raise DrivetrainError(
            f"{error.message}; to go back without these steps, they have to be kept, and "
            f"{run.path / SKIPS_FILE} cannot be written ({problem.strerror or problem})",
            remedy="free space there; the same command goes on from the last checkpoint",
        ) from problem
    where = f"the checkpoint of step {step}" if step else "the beginning"
    left_out = f"step {error.last}" if error.single else f"steps {step + 1} to {error.last}"
    notice(f"{error.message}: going back to {where}, without {left_out}")
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Puts injected faults where they happen in a run: before a step, inside it, in its data, in its checkpoints.


class FaultyFiles(Files):
    """The operations on the disk, of which a write may find it full."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
        self._faults.at_write()
        return super().write_file(path, chunks)


def faults_of(run: Session) -> Faults:
    """Return the faults to inject on this rank, once the run's folder is claimed. Mostly there are none.

    Args:
        run: The run, whose configuration or launcher names them.
    """
    text = run.config.watch.inject or os.environ.get(ENVIRONMENT, "")
    try:
        faults = parse_faults(text)
    except ValueError as error:
        raise DrivetrainError(f"{ENVIRONMENT}: {error}", remedy="unset it, or name faults that there are") from None
    return Faults(faults, run.world.rank, run.path)


def inject(
    faults: Faults,
    run: Session,
    parts: RunParts,
    loader: Loader,
    saver: CheckpointSaver,
    before_step: Callable[[int], None] | None,
) -> Callable[[int], None] | None:
    """Inject faults around steps, data and saves. Return the function to call before each step.

    Args:
        faults: Those of this rank.
        run: The run.
        parts: Its parts.
        loader: The loader of its steps.
        saver: Saves its checkpoints.
        before_step: What is called before each step anyway; None if nothing is.
    """
    if not faults:
        return before_step
    loader.before_step, saver.when_begun = faults.at_data, faults.at_save

    def called(step: int) -> None:
        faults.at_step(step, parts.model, run.world.barrier)
        if before_step is not None:
            before_step(step)

    return called
