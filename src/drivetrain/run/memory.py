"""The memory of a run: that of its steps, predicted and measured, and which data sets are held on the device."""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.precision import Precision
from drivetrain.core.value import PrecisionName, format_bytes
from drivetrain.data.division import Division
from drivetrain.data.keyed_items import Collate
from drivetrain.data.loader import Loader
from drivetrain.data.resident import NotResidentError, Resident, make_resident, num_bytes_in_memory, why_not_resident
from drivetrain.data.source import Source
from drivetrain.job import Job
from drivetrain.plan.fitting import Held, Needs, Simulated, count_held, does_not_fit, forecast_held, num_bytes, simulate
from drivetrain.plan.forecast import MemoryModel, Peak, next_size_to_measure
from drivetrain.strategies.layers import recompute, repeated_blocks

# ----------------------------------------------------------------------------------------------------------------------
# The memory of a run's steps: predicted before any of them ran, and measured.
#
# Predictions count a job's state, and simulate activations on shapes alone. A peak is measured by the allocator's own
# count on a GPU, by the kernel's on a CPU.

MANY_CLASSES = 4096  # of which logits may be worth chunks: a vocabulary
MOST_SAMPLES = 16  # that a step is followed with; beyond, it is a line
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets the peak of resident memory to what it is now


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
    notes += _logits_note(model, smallest.module_bytes)
    sizes = [num_bytes(block.parameters()) for block in (blocks or dict(model.named_children())).values()]
    return Needs(
        held=held,
        keep=keep,
        recompute=again,
        activation_bytes=smallest.activation_bytes // num_samples,
        block_bytes=max(sizes, default=held.parameters),
        flops=smallest.flops / num_samples,
        num_operations=smallest.num_operations,
        weights=weights,
        activations={name: size // num_samples for name, size in smallest.module_bytes.items() if size > 0},
        notes=notes,
    )


def _logits_note(model: nn.Module, module_bytes: Mapping[str, int]) -> tuple[str, ...]:
    """Return a note where most activations are those of the loss, over the many classes of a last layer."""
    of_loss, all_of_them = module_bytes.get("", 0), sum(size for size in module_bytes.values() if size > 0)
    widths = [each.out_features for each in model.modules() if isinstance(each, nn.Linear)]
    if 2 * of_loss <= all_of_them or max(widths, default=0) < MANY_CLASSES:
        return ()
    return (
        f"{of_loss / all_of_them:.0%} of activations are those of the loss, over {max(widths):,} classes: "
        "torch.nn.functional.linear_cross_entropy (torch 2.13) computes it in chunks, without all logits at once",
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
        self._hold_workspaces()
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._before)

    def _hold_workspaces(self) -> None:
        """Make torch allocate what its matrix products work in, which it keeps: 64 MiB on some GPUs.

        Otherwise the first step that is large enough to need it would seem to take so much more than the others.
        """
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.zeros(1024, 1024, device=self._device, dtype=dtype)
            nn.functional.linear(square @ square, square, square[0])


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


def peak_meter(device: torch.device, *, may_be_coarse: bool = True) -> PeakMeter:
    """Return what counts the memory of a device.

    Args:
        device: The device.
        may_be_coarse: Whether pages of the whole process will do, where tensors cannot be counted; else nothing is.
    """
    if device.type == "cuda":
        return CudaPeakMeter(device)
    if not may_be_coarse:
        return NoPeakMeter()
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


# ----------------------------------------------------------------------------------------------------------------------
# Decides which data sets of a run are held on its device: each is copied there once, and that is reported.

COMFORTABLE = 0.25  # of the free memory: so much is taken without asking what else needs it
MOST = 0.9  # of the free memory, where it was asked for or measured


class Residency:
    """Decides for each data set of a run, makes its resident form, and collects the notes to report about it.

    By itself it takes only data that is made of tensors already, and fits comfortably: that costs no reading, and
    cannot lose. The rest is for the planner, which knows what reading costs and what a step takes.
    """

    def __init__(self, config: Config, device: torch.device, free_host_bytes: int, *, quiet: bool) -> None:
        self._wanted, self._num_workers = config.data.resident, config.data.num_workers
        self._device, self._free_host_bytes, self._quiet = device, free_host_bytes, quiet
        self._made: dict[int, tuple[Any, Resident]] = {}  # by id, with the data set itself: the id is then its alone
        self._notes: list[str] = []

    def of(
        self, source: Source, collate: Collate, *, channels_last: bool, num_workers: int, planned: bool | None
    ) -> Resident | None:
        """Return the resident form of a data set; None if its items are fetched batch by batch.

        `planned` is the planner's decision for `auto`: whether data that has to be read first is made resident as well.
        """
        key = id(source.dataset)
        if key in self._made:
            resident = self._made[key][1]
            resident.turn(channels_last)  # a plan may settle on the other format after the first look
            return resident
        limit = self._limit(source, channels_last, planned)
        if limit is None:
            return None
        try:
            resident = make_resident(
                source,
                collate,
                self._device,
                limit,
                channels_last=channels_last,
                num_workers=num_workers,
                say=self._say,
            )
        except NotResidentError as error:
            if self._wanted == "on" and not self._made:  # of a run it is the training set that was meant
                message = f"the data set cannot be resident: {error.message}"
                raise ConfigError([Problem("--resident", message, "on", remedy=error.remedy)]) from None
            self._notes.append(f"not resident on {self._device}: {error.message}")
            return None
        self._made[key] = source.dataset, resident
        return resident

    def is_expected(self, source: Source, collate: Collate, *, channels_last: bool, planned: bool | None) -> bool:
        """Return whether a data set will be resident, as far as that is known before it is made so."""
        num_notes = len(self._notes)
        limit = self._limit(source, channels_last, planned)
        del self._notes[num_notes:]  # they are told when it is made
        return limit is not None and not why_not_resident(source, collate, limit)

    @property
    def num_bytes(self) -> int:
        """The bytes of the data sets that were made resident."""
        return sum(resident.num_bytes for _, resident in self._made.values())

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def free_bytes(self) -> int:
        """Return the bytes that are free on the device now."""
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0]
        return self._free_host_bytes

    def _limit(self, source: Source, channels_last: bool, planned: bool | None) -> float | None:
        """Return how much memory a data set may take; None if it is not to be resident."""
        if self._wanted == "off" or (self._wanted == "auto" and self._num_workers > 0):
            return None  # workers that were asked for are used
        if self._wanted == "on" or planned:
            return self.free_bytes() * MOST
        known = None if source.is_iterable else num_bytes_in_memory(source.dataset)
        if known is None or planned is False:
            return None
        if self._device.type == "cpu" and not channels_last:
            return float(known)  # it is there already, and stays where it is
        limit = self.free_bytes() * COMFORTABLE
        if known > limit:
            self._notes.append(
                f"not resident on {self._device}: its {format_bytes(known)} are more than a quarter of the "
                f"{format_bytes(self.free_bytes())} that are free"
            )
            return None
        return limit

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(f"  data       {text}", flush=True)
