"""The memory of a run's steps: predicted before any of them ran, measured, and limited after a run was out of memory.

Predictions count a job's state, and simulate activations on shapes alone. A peak is measured by the allocator's own
count on a GPU, by the kernel's on a CPU.

A run that was out of memory goes on with smaller micro-batches; what a step means stays as it was. The cap is kept in
the run's folder, so that it holds for every later start on the same kind of device with as many processes. A run of
one process goes on by itself, from its last checkpoint. Of several, a rank that is out of memory leaves the others
waiting in a collective: all of them have to be started again, as `drivetrain launch` does.
"""

import ctypes
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.precision import Precision
from drivetrain.core.run_folder import write_atomically
from drivetrain.core.value import PrecisionName, format_bytes
from drivetrain.data.division import Division
from drivetrain.data.loader import Loader
from drivetrain.job import Job
from drivetrain.monitor.recorder import NoRunRecorder, RunRecorder
from drivetrain.plan.fitting import Needs, does_not_fit
from drivetrain.plan.memory import MemoryModel, Peak, next_size_to_measure
from drivetrain.plan.simulate import Held, Simulated, count_held, forecast_held, num_bytes, simulate
from drivetrain.run.saver import CHECKPOINTS
from drivetrain.run.session import Session
from drivetrain.strategies.layers import recompute, repeated_blocks

MOST_SAMPLES = 16  # that a step is followed with; beyond, it is a line
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets the peak of resident memory to what it is now
CAP_FILE = "memory.json"
_OF_THE_HOST = "DefaultCPUAllocator: can't allocate memory"
_OTHER_WAYS_OUT = "--activations recompute or offload, --precision bf16, or fsdp on several GPUs"


def needs_of(job: Job, model: nn.Module, precision: PrecisionName, at_most: int, limit_bytes: float) -> Needs:
    """Return what a step needs, for a job whose samples have numbers.

    The model is not changed, nor is the position in the data.
    """
    held, notes = _held(job, model)
    weights = {
        name: num_bytes(module.parameters(recurse=False))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    steps = _Steps(job, model, precision)
    keep = _line(steps, held, at_most, limit_bytes, None)
    blocks = repeated_blocks(model)
    again = _line(steps, held, at_most, limit_bytes, recompute) if blocks else None
    smallest, num_samples = steps.smallest
    if smallest.is_real:
        notes += ("the loss looks at values, so the step was run on the CPU to count its memory",)
    sizes = [num_bytes(block.parameters()) for block in (blocks or dict(model.named_children())).values()]
    return Needs(
        held=held,
        keep=keep,
        recompute=again,
        activation_bytes=smallest.activation_bytes // num_samples,
        block_bytes=max(sizes, default=held.parameters),
        flops=smallest.flops / num_samples,
        weights=weights,
        activations={name: size // num_samples for name, size in smallest.module_bytes.items() if size > 0},
        notes=notes,
    )


def explained(
    job: Job,
    model: nn.Module,
    precision: PrecisionName,
    where: str,
    free_bytes: float,
    fraction: float,
    *,
    num_devices: int = 1,
    micro_batch: int = 1,
    recomputes: bool = False,
) -> DrivetrainError:
    """Return the error for samples that do not fit: what takes how much memory, and the remedies."""
    limit = free_bytes * fraction
    try:
        needs = needs_of(job, model, precision, micro_batch, limit)
    except Exception:  # noqa: BLE001  (reports what is known of the weights if a step cannot be simulated)
        held, notes = _held(job, model)
        line = MemoryModel(fixed_bytes=held.total, sample_bytes=0.0)
        needs = Needs(held=held, keep=line, notes=(*notes, "activations are not known: a step could not be followed"))
    how_much = f"{format_bytes(limit)} to use ({format_bytes(free_bytes)} free × {fraction:g})"
    return does_not_fit(needs, limit, where, how_much, num_devices, micro_batch, recomputes=recomputes)


def _held(job: Job, model: nn.Module) -> tuple[Held, tuple[str, ...]]:
    held = forecast_held(model, job.make_optimizer)
    if held is not None:
        return held, ()
    counted = count_held(model, torch.optim.SGD([torch.empty(0)], lr=0.0))
    guessed = counted.model_copy(update={"optimizer": 2 * counted.gradients})
    return guessed, ("what the optimizer holds is not known before it ran: taken as two values per weight",)


class _Steps:
    """Simulates steps of given sizes, each kind and size once."""

    def __init__(self, job: Job, model: nn.Module, precision: PrecisionName) -> None:
        self._job, self._model, self._precision = job, model, Precision(precision, "cpu")
        self._kept: dict[int, Simulated] = {}

    @property
    def smallest(self) -> tuple[Simulated, int]:
        """The smallest step that was simulated with all activations kept, and its number of samples."""
        size = min(self._kept)
        return self._kept[size], size

    def __call__(self, size: int, change: Callable[[nn.Module], object] | None) -> Simulated:
        batch = self._batch(size)
        found = simulate(self._model, self._job.loss_function, batch, self._precision, change, accumulates=True)
        if change is None:
            self._kept[size] = found
        return found

    def _batch(self, size: int) -> Any:
        job = self._job
        division = Division(job.num_samples or size, size, size, 1)
        return Loader(job.source, division, 0, job.seed, job.collate, shuffle=job.shuffle).first(1).batch


def _line(
    steps: _Steps, held: Held, at_most: int, limit_bytes: float, change: Callable[[nn.Module], object] | None
) -> MemoryModel:
    peaks: list[Peak] = []
    most = min(at_most, MOST_SAMPLES)
    size: int | None = min(2, most)  # one sample alone is refused by batch normalization
    while size is not None:
        peaks.append(Peak(size, held.total + steps(size, change).peak_bytes))
        # Nothing is held that could run out: the limit only says how far it is worth to look.
        size = next_size_to_measure(peaks, max(limit_bytes, 4 * peaks[-1].num_bytes), most, held.total)
    return MemoryModel.fitted(peaks, held.total)


class PeakMeter(Protocol):
    is_coarse: bool  # whether it sees whole pages of the whole process, not tensors

    def reset(self) -> None:
        """Start counting here."""

    def peak_bytes(self) -> int:
        """Return the most memory held since `reset`, above what was held then; 0 where nothing is counted."""


class CudaPeakMeter:
    """Counts tensors, in the blocks that the allocator gave them."""

    is_coarse = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._before)


class ResidentPeakMeter:
    """Counts the pages of the process, with those of every other thread: good to some ten megabytes."""

    is_coarse = True

    def __init__(self) -> None:
        self._before = 0

    def reset(self) -> None:
        _give_back_free_heap()
        _CLEAR.write_text(_RESET_PEAK)
        self._before = _status("VmRSS")

    def peak_bytes(self) -> int:
        return max(0, _status("VmHWM") - self._before)


class NoPeakMeter:
    """Counts nothing: for a CPU without Linux, or where /proc cannot be read."""

    is_coarse = True

    def reset(self) -> None: ...

    def peak_bytes(self) -> int:
        return 0


def peak_meter(device: torch.device) -> PeakMeter:
    if device.type == "cuda":
        return CudaPeakMeter(device)
    try:
        meter = ResidentPeakMeter()
        meter.reset()
    except (OSError, StopIteration):
        return NoPeakMeter()
    return meter


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _give_back_free_heap() -> None:
    """Give free heap pages back to the system: they would be used again without being counted."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):  # not glibc
        return


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _OF_THE_HOST in str(error)


def heed_cap(run: Session) -> None:
    """Follow smaller micro-batches if earlier ones ran out of memory. Collective, once the folder is claimed."""
    found = run.world.agree(_read_cap(run) if run.world.is_main else None)
    if found is not None and found["micro_batch"] < run.way.micro_batch:
        why = f"micro-batches of {found['ran_out']} samples or more ran out of memory"
        run.follow(replace(run.planned.but(micro_batch=found["micro_batch"]), why_capped=why))


def tell_cap(run: Session, recorder: RunRecorder | NoRunRecorder) -> None:
    why = run.planned.why_capped
    if why:
        recorder.event("micro-batch capped", words=why, micro_batch=run.way.micro_batch)
        recorder.say(f"  memory     {why}: now {run.way.micro_batch}, and a step stays what it was")


def lower_cap(run: Session, error: BaseException) -> None:
    """Have the next start take half the micro-batch; an error where there is nothing to halve."""
    before, held = run.way.micro_batch, run.weighting.holds_division
    if held:
        raise DrivetrainError(
            f"out of memory with micro-batches of {before} samples, which cannot be made smaller without changing what "
            f"is learned: {held}",
            remedy=f"{_OTHER_WAYS_OUT}; or return a LossSum, if the loss is a sum over samples or tokens",
        ) from error
    if before <= len(run.devices):
        raise DrivetrainError("out of memory with one sample at a time", remedy=_OTHER_WAYS_OUT) from error
    facts = {"micro_batch": before // 2, "ran_out": before, "machine": run.machine(), "world_size": run.world.size}
    # Several ranks may be out of memory at once.
    write_atomically(run.path / CAP_FILE, json.dumps(facts) + "\n", f".{run.world.rank}")


def can_go_on_here(run: Session) -> bool:
    """Return whether this process can start over: every changed state is in a checkpoint, or can be made again."""
    job = run.job
    if run.world.size > 1 or not job.source.is_keyed:
        return False
    return has_checkpoint(run) or not (isinstance(job.model, nn.Module) or job.hooks)


def has_checkpoint(run: Session) -> bool:
    return any((run.path / CHECKPOINTS).glob("step-*/manifest.json"))


def give_memory_back() -> None:
    """Drop what the failed start has left on the device. Nothing may hold a reference to its error any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _read_cap(run: Session) -> dict[str, int] | None:
    """Return the cap that was found with this device and world; None if there is none."""
    try:
        found = json.loads((run.path / CAP_FILE).read_text(encoding="utf-8"))
        is_of_here = (found["machine"], found["world_size"]) == (run.machine(), run.world.size)
        return {name: max(1, int(found[name])) for name in ("micro_batch", "ran_out")} if is_of_here else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
