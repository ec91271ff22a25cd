"""Choices by rule, when nothing was measured: pure functions of the hardware, of the data, and of what is pinned."""

from math import ceil
from typing import Generic, Literal, TypeVar

from drivetrain.core.plugins import strategy_facts
from drivetrain.core.value import PrecisionName, Value, format_bytes, format_count, format_seconds
from drivetrain.hardware import Gpu, Hardware

# ----------------------------------------------------------------------------------------------------------------------
# Chooses settings when nothing was measured: pure functions of the hardware and of what the user pinned.
#
# They are a start, not an answer: the micro-batch that is fastest depends on the model.
#
# Nothing is decided without its reason: every value is a `Choice`.

T = TypeVar("T")


class Choice(Value, Generic[T]):
    """A value, why it was taken, what else there is, and whether the user pinned it."""

    value: T
    reason: str
    alternatives: tuple[str, ...] = ()
    pinned: bool = False


TARGET_BATCH = 256

# Micro-batch by the memory of the smallest GPU, in GB (10^9 bytes, as cards are sold): at least this much, this many.
MICRO_BATCH_BY_MEMORY: tuple[tuple[float, int], ...] = ((20, 16), (14, 12), (10, 8), (6, 4), (0, 2))
CPU_MICRO_BATCH = 4

# Below this a model of ordinary size runs out of memory sooner over activations than over weights.
RECOMPUTE_BELOW_GB = 16
ZERO_3_BELOW_GB = 6

# Of a GPU's free memory, for weights, gradients and optimizer. Activations and the allocator need the rest.
MOST_FOR_A_WHOLE_COPY = 0.8

# Casting weights and activations costs time that a matrix product alone does not show.
LEAST_GAIN_OF_BF16_ON_CPU = 1.3

MAX_WORKERS = 8
LEAST_SHM_BYTES = (
    256 * 1024**2
)  # loader workers hand batches over in /dev/shm; Docker's default of 64 MiB is too little


class Pins(Value):
    """The values that the user fixed. `None` and `auto` leave them to the rules; a pinned value is never overridden."""

    gpu_mode: Literal["auto", "cpu", "single_gpu", "multi_gpu"] = "auto"
    device: str = "auto"
    device_ids: tuple[int, ...] | None = None
    precision: Literal["auto", PrecisionName] = "auto"
    mixed: bool | None = None
    activations: Literal["auto", "keep", "recompute", "offload"] = "auto"
    strategy: str = "auto"
    micro_batch: int | None = None
    accumulation: int | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    prefetch_factor: int | None = None
    zero_stage: int | None = None


class Settings(Value):
    """The settings that would be used here, each choice with its reason."""

    devices: Choice[tuple[str, ...]]
    strategy: Choice[str]
    precision: Choice[PrecisionName]
    micro_batch: Choice[int]
    accumulation: Choice[int]
    effective_batch: int
    activations: Choice[Literal["keep", "recompute", "offload"]]
    zero_stage: Choice[int]
    num_workers: Choice[int]
    prefetch_factor: Choice[int]
    pin_memory: Choice[bool]


def choose_settings(hardware: Hardware, pins: Pins | None = None) -> Settings:
    """Choose the settings for this machine by rule alone."""
    pins = pins or Pins()
    gpus = _gpus_to_use(hardware, pins)
    num_ranks = max(1, len(gpus))
    micro_batch = _micro_batch(gpus, pins)
    accumulation = _accumulation(micro_batch.value, num_ranks, pins)
    num_processes = 1 if strategy_facts(pins.strategy).processes == "one" else num_ranks
    num_workers = _num_workers(hardware, num_processes, bool(gpus), pins)
    return Settings(
        devices=_devices(hardware, gpus, pins),
        strategy=_strategy(gpus, pins),
        precision=_precision(hardware, gpus, pins),
        micro_batch=micro_batch,
        accumulation=accumulation,
        effective_batch=micro_batch.value * accumulation.value * num_ranks,
        activations=_activations(gpus, pins),
        zero_stage=_zero_stage(gpus, pins),
        num_workers=num_workers,
        prefetch_factor=_prefetch_factor(hardware, num_workers.value, pins),
        pin_memory=_pin_memory(gpus, pins),
    )


def _gpus_to_use(hardware: Hardware, pins: Pins) -> tuple[Gpu, ...]:
    if hardware.accelerator not in ("cuda", "rocm") or pins.gpu_mode == "cpu" or pins.device == "cpu":
        return ()
    gpus = hardware.gpus
    if pins.device.startswith("cuda:"):
        return tuple(gpu for gpu in gpus if gpu.index == int(pins.device[5:]))
    if pins.device_ids is not None:
        by_index = {gpu.index: gpu for gpu in gpus}
        gpus = tuple(by_index[index] for index in pins.device_ids if index in by_index)
    strategy = strategy_facts(pins.strategy)
    is_alone = strategy.processes == "one" and strategy.devices == "one"
    if pins.gpu_mode == "single_gpu" or pins.device == "cuda" or is_alone:
        return gpus[:1]
    return gpus


def _devices(hardware: Hardware, gpus: tuple[Gpu, ...], pins: Pins) -> Choice[tuple[str, ...]]:
    pinned = pins.gpu_mode != "auto" or pins.device != "auto" or pins.device_ids is not None
    if pins.device == "mps":
        return Choice(
            value=("mps",), reason="asked for; not tested on such a machine", alternatives=("cpu",), pinned=True
        )
    if not gpus:
        reason = "asked for" if pinned else "no GPU that drivetrain can use"
        return Choice(value=("cpu",), reason=reason, pinned=pinned)
    names = tuple(f"cuda:{gpu.index}" for gpu in gpus)
    if pinned:
        reason = "asked for"
    elif len(gpus) > 1:
        reason = f"all {len(gpus)} GPUs that this process may see"
    else:
        reason = "the GPU that this process may see"
    others = tuple(f"cuda:{gpu.index}" for gpu in hardware.gpus if gpu not in gpus)
    return Choice(value=names, reason=reason, alternatives=(*others, "cpu"), pinned=pinned)


def _strategy(gpus: tuple[Gpu, ...], pins: Pins) -> Choice[str]:
    if pins.strategy != "auto":
        return Choice(value=pins.strategy, reason="asked for", pinned=True)
    if not gpus:
        return Choice(
            value="single", reason="no GPU: one process on the CPU", alternatives=("ddp on several processes",)
        )
    if len(gpus) == 1:
        return Choice(value="single", reason="one GPU needs no communication")
    others = (
        "fsdp where the model does not fit one GPU",
        "deepspeed where nothing else fits",
        "data_parallel where asked for",
    )
    return Choice(value="ddp", reason="several GPUs, each with a whole copy of the model", alternatives=others)


def choose_strategy(
    held_bytes: int | None, free_bytes: int, num_ranks: int, offloaded_bytes: int | None = None
) -> Choice[str]:
    """Choose the strategy for a known model, by the free memory of a GPU.

    Args:
        held_bytes: what weights, gradients and optimizer take; None where that is not known.
        free_bytes: the least that is free on any GPU.
        num_ranks: how many processes train.
        offloaded_bytes: what each of them keeps on its GPU where DeepSpeed shards weights and gradients and holds the
            optimizer in host memory; None where DeepSpeed cannot be used.
    """
    single: Choice[str] = Choice(value="single", reason="one process needs no communication")
    if held_bytes is None or not free_bytes:
        reason = f"{num_ranks} processes, each with a whole copy of the model"
        return single if num_ranks == 1 else Choice(value="ddp", reason=reason, alternatives=("fsdp",))
    share = held_bytes / num_ranks
    figures = (
        f"weights, gradients and optimizer take {format_bytes(held_bytes)}, and {format_bytes(free_bytes)} are free "
    )
    figures += "on a GPU"
    fits_whole = held_bytes <= MOST_FOR_A_WHOLE_COPY * free_bytes
    fits_offloaded = offloaded_bytes is not None and offloaded_bytes <= MOST_FOR_A_WHOLE_COPY * free_bytes
    if num_ranks == 1 and (fits_whole or not fits_offloaded):
        return single
    if fits_whole:
        return Choice(value="ddp", reason=f"{figures}: a whole copy on each", alternatives=("fsdp",))
    if share <= MOST_FOR_A_WHOLE_COPY * free_bytes:
        return Choice(value="fsdp", reason=f"{figures}: a part of {format_bytes(share)} on each of {num_ranks}")
    if fits_offloaded:
        reason = f"{figures}: the optimizer goes to host memory, which makes steps slower"
        return Choice(value="deepspeed", reason=reason, alternatives=("more GPUs",))
    reason = f"{figures}: even a part of {format_bytes(share)} on each of {num_ranks} is too much"
    return Choice(value="fsdp", reason=reason, alternatives=("fsdp with --fsdp-offload", "more GPUs"))


def _precision(hardware: Hardware, gpus: tuple[Gpu, ...], pins: Pins) -> Choice[PrecisionName]:
    if pins.precision != "auto":
        is_on_cpu = not gpus and pins.device != "mps"
        reason = f"asked for{_emulated(hardware, pins.precision) if is_on_cpu else ''}"
        return Choice(value=pins.precision, reason=reason, pinned=True)
    if pins.device == "mps":
        return Choice(value="fp32", reason="on an Apple GPU, where nothing else was tried", alternatives=("bf16",))
    if not gpus:
        return _precision_on_cpu(hardware, pins)
    oldest = min(gpus, key=lambda gpu: gpu.capability or (0, 0))
    if all("bf16" in gpu.precisions for gpu in gpus):
        return Choice(
            value="bf16",
            reason=f"{_capability(oldest)} has bf16; it needs no loss scaling",
            alternatives=("fp16", "tf32", "fp32"),
        )
    which = f"cuda:{oldest.index} {oldest.name}, " if len(gpus) > 1 else ""
    reason = f"{which}{_capability(oldest)} has no bf16; fp16 with loss scaling"
    return Choice(value="fp16", reason=reason, alternatives=("fp32",))


def _emulated(hardware: Hardware, precision: str) -> str:
    """Say that the CPU has no instructions for a precision that was asked for; empty where that is not known."""
    known = hardware.cpu.precisions
    if precision != "bf16" or not known or "bf16" in known:
        return ""
    return "; this CPU has no instructions for it: expect it to be slower than fp32"


def _precision_on_cpu(hardware: Hardware, pins: Pins) -> Choice[PrecisionName]:
    if pins.mixed:
        reason = f"mixed precision was asked for{_emulated(hardware, 'bf16')}"
        return Choice(value="bf16", reason=reason, alternatives=("fp32",), pinned=True)
    bf16, fp32 = (hardware.cpu.peaks.get(name) for name in ("bf16", "fp32"))
    if bf16 is None or fp32 is None or bf16.origin != "measured" or fp32.origin != "measured":
        reason = "on a CPU, until `drivetrain verify --save` measures bf16 to be faster"
        return Choice(value="fp32", reason=reason, alternatives=("bf16",))
    figures = f"measured here: bf16 {bf16.value:.3g}, fp32 {fp32.value:.3g} TFLOP/s"
    if bf16.value > LEAST_GAIN_OF_BF16_ON_CPU * fp32.value:
        return Choice(value="bf16", reason=figures, alternatives=("fp32",))
    return Choice(value="fp32", reason=figures, alternatives=("bf16",))


def _capability(gpu: Gpu) -> str:
    return f"compute capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else gpu.architecture


def _smallest_gb(gpus: tuple[Gpu, ...]) -> float:
    """Return the least free memory of any GPU, not the total: what other processes hold cannot be used."""
    return min(gpu.memory_free_bytes for gpu in gpus) / 1e9


def _micro_batch(gpus: tuple[Gpu, ...], pins: Pins) -> Choice[int]:
    if pins.micro_batch is not None:
        return Choice(value=pins.micro_batch, reason="asked for", pinned=True)
    if not gpus:
        return Choice(value=CPU_MICRO_BATCH, reason="on a CPU, where larger ones gain little")
    free = _smallest_gb(gpus)
    value = next(size for least, size in MICRO_BATCH_BY_MEMORY if free >= least)
    whose = "on the smallest GPU" if len(gpus) > 1 else "on the GPU"
    return Choice(value=value, reason=f"{free:.1f} GB free {whose}")


def _accumulation(micro_batch: int, num_ranks: int, pins: Pins) -> Choice[int]:
    if pins.accumulation is not None:
        return Choice(value=pins.accumulation, reason="asked for", pinned=True)
    value = max(1, TARGET_BATCH // (micro_batch * num_ranks))
    return Choice(value=value, reason=f"towards {TARGET_BATCH} samples per step")


def _activations(gpus: tuple[Gpu, ...], pins: Pins) -> Choice[Literal["keep", "recompute", "offload"]]:
    if pins.activations != "auto":
        return Choice(value=pins.activations, reason="asked for", pinned=True)
    others = ("recompute", "offload")
    if not gpus:
        return Choice(value="keep", reason="on a CPU anything else would only cost time", alternatives=others)
    for conflict in strategy_facts(pins.strategy).conflicts:
        if conflict.when == {"memory.activations": "recompute"}:
            return Choice(value="keep", reason=conflict.reason or conflict.message)
    free = _smallest_gb(gpus)
    if free < RECOMPUTE_BELOW_GB:
        reason = f"{free:.1f} GB free: less than {RECOMPUTE_BELOW_GB}"
        return Choice(value="recompute", reason=reason, alternatives=("keep", "offload"))
    reason = f"{free:.1f} GB free: enough for activations of a model of ordinary size"
    return Choice(value="keep", reason=reason, alternatives=others)


def _zero_stage(gpus: tuple[Gpu, ...], pins: Pins) -> Choice[int]:
    has_stages = strategy_facts(pins.strategy).memory == "zero"
    if len(gpus) < 2 and not has_stages:
        return Choice(value=0, reason="nothing to partition: one device")
    is_small = bool(gpus) and _smallest_gb(gpus) < ZERO_3_BELOW_GB
    stage = 3 if is_small else 2
    if has_stages:
        if pins.zero_stage is not None:
            return Choice(value=pins.zero_stage, reason="asked for", pinned=True)
        reason = "optimizer state and gradients are partitioned" if stage == 2 else "weights are partitioned, too"
        return Choice(value=stage, reason=f"{pins.strategy} is asked for: {reason}", alternatives=("1", "2", "3"))
    return Choice(value=0, reason="ddp holds whole copies", alternatives=(f"stage {stage} with deepspeed",))


def _num_workers(hardware: Hardware, num_ranks: int, has_gpu: bool, pins: Pins) -> Choice[int]:
    if pins.num_workers is not None:
        return Choice(value=pins.num_workers, reason="asked for", pinned=True)
    cores = hardware.cpu.num_usable / num_ranks
    share = f"{hardware.cpu.num_usable} usable cores" + (f" for {num_ranks} ranks" if num_ranks > 1 else "")
    if hardware.memory.shm_total_bytes < LEAST_SHM_BYTES:
        mib = hardware.memory.shm_total_bytes // 1024**2
        return Choice(value=0, reason=f"/dev/shm has {mib} MiB, too little to hand batches over")
    if not has_gpu:
        # On a CPU the loader takes cores from the model itself.
        return Choice(value=min(MAX_WORKERS, int(cores // 4)), reason=f"{share}, most of them for the model")
    return Choice(value=max(0, min(MAX_WORKERS, int(cores) - 1)), reason=f"{share}, one left for the training process")


def _prefetch_factor(hardware: Hardware, num_workers: int, pins: Pins) -> Choice[int]:
    if pins.prefetch_factor is not None:
        return Choice(value=pins.prefetch_factor, reason="asked for", pinned=True)
    if num_workers == 0:
        return Choice(value=0, reason="no workers, nothing is prefetched")
    ram_gb = hardware.memory.total_bytes / 1e9
    value = 4 if ram_gb > 64 else 3 if ram_gb > 32 else 2
    return Choice(value=value, reason=f"{ram_gb:.0f} GB of RAM")


def _pin_memory(gpus: tuple[Gpu, ...], pins: Pins) -> Choice[bool]:
    if pins.pin_memory is not None:
        return Choice(value=pins.pin_memory, reason="asked for", pinned=True)
    return Choice(value=bool(gpus), reason="copies to a GPU overlap with its work" if gpus else "no GPU to copy to")


# ----------------------------------------------------------------------------------------------------------------------
# Decides how samples reach the device: resident there, or fetched batch by batch with so many workers.
#
# A pure decision that does not change what a step sees. Its costs are measured: the seconds to fetch what a step takes,
# and the seconds that the device computes.

HARMLESS = 0.02  # of a step: reading that takes no more is done in the training process
LEAST_GAIN = 0.02  # of the time that is left: less is not worth the memory
RESIDENT_SHARE = 0.5  # of the memory that the step leaves free; allocators need room to turn
COPY_BYTES_PER_SECOND = 2e9  # of memory that is not pinned, to a device
WORTH_IT, NEARLY_BEST = 1.05, 1.02  # a smaller gain is not worth workers; so near to the best, fewer of them do
WORKER_START_SECONDS = 0.5  # of each, with its first batch
UNEVEN = 2.0  # a slowest batch this many times the usual one needs more fetched ahead


class DataFigures(Value):
    """The figures that were measured on one rank."""

    read_seconds: float  # to fetch what a step takes, in the training process
    slowest_read_seconds: float = 0.0
    step_seconds: float  # that a step takes when its data is there
    steps_left: int | None  # None: no end is known
    steps_per_epoch: int
    num_bytes: int | None = None  # of the whole data set as columns; None: not known
    batch_bytes: int = 0  # of one micro-batch
    free_bytes: int = 0  # on the device, beside what a step takes
    num_spare_cores: int = 0  # of this rank, for workers
    shm_bytes: int = 0
    is_in_memory: bool = False  # nothing has to be read: it is only copied
    why_not_resident: str = ""  # what its items have against it


class DataPath(Value):
    resident: bool = False
    num_workers: int = 0
    prefetch_factor: int = 0  # 0: nothing is fetched ahead


def forecast_step(read: float, rest: float, workers: int, cores: int, busy_cores: int = 1) -> float:
    """Forecast the seconds of a step that reads for so long, and takes `rest` otherwise.

    Workers share the reading in parallel with the rest of the step; without them it comes before it. Either way all of
    it is work for the cores, of which the rest of the step keeps some busy.
    """
    if not workers:
        return read + rest
    return max(rest, read / workers, (read + rest * busy_cores) / cores)


def workers_worth(read: float, rest: float, cores: int, busy_cores: int, steps_left: int | None) -> int:
    """Return how many workers are worth their cores where the model computes on the same ones; 0: none is."""
    alone = forecast_step(read, rest, 0, cores)
    found = {number: forecast_step(read, rest, number, cores, busy_cores) for number in range(1, cores + 1)}
    best = min(found.values(), default=alone)
    if not best or alone / best < WORTH_IT:
        return 0
    number = next(number for number, seconds in found.items() if seconds <= NEARLY_BEST * best)
    saved = float("inf") if steps_left is None else steps_left * (alone - found[number])
    return number if saved > number * WORKER_START_SECONDS else 0


def choose_data_path(
    figures: DataFigures, wanted: Literal["auto", "on", "off"] = "auto", num_workers: int | None = None
) -> Choice[DataPath]:
    """Choose the data path. `wanted` and `num_workers` are what the user pinned; None: workers by the figures."""
    fetched = _fetched(figures, num_workers)
    if wanted == "on":
        return Choice(value=DataPath(resident=True), reason="asked for", pinned=True)
    if wanted == "off":
        return fetched
    if num_workers:
        reason = f"{num_workers} workers were asked for"
        return Choice(value=fetched.value, reason=reason, alternatives=("resident",), pinned=True)
    problem = figures.why_not_resident or _too_large(figures)
    if problem:
        reason = f"{fetched.reason}; not resident: {problem}"
        return Choice(value=fetched.value, reason=reason, alternatives=fetched.alternatives, pinned=fetched.pinned)
    return _cheaper(figures, fetched)


def _too_large(figures: DataFigures) -> str:
    if figures.num_bytes is None:
        return "how much memory it takes is not known"
    limit = figures.free_bytes * RESIDENT_SHARE
    if figures.num_bytes <= limit:
        return ""
    return (
        f"it takes {format_bytes(figures.num_bytes)}, and half of what a step leaves free is {format_bytes(limit)}"
        if figures.free_bytes > 0
        else f"it takes {format_bytes(figures.num_bytes)}, and a step leaves nothing free"
    )


def _cheaper(figures: DataFigures, fetched: Choice[DataPath]) -> Choice[DataPath]:
    """Choose between resident and fetched data by the time that the remaining steps take with each."""
    setup = _setup_seconds(figures, fetched.value.num_workers)
    resident, ordinary = figures.step_seconds, _step_seconds(figures, fetched.value.num_workers)
    where = f"{format_bytes(figures.num_bytes or 0)} on the device"
    if figures.steps_left is None:
        gain, told = 1 - resident / ordinary, f"{ordinary * 1e3:.3g} ms a step against {resident * 1e3:.3g}"
    else:
        total, other = setup + figures.steps_left * resident, figures.steps_left * ordinary
        gain = 1 - total / other if other else 0.0
        told = f"{format_seconds(other)} against {format_seconds(total)} for the {figures.steps_left:,} steps that "
        told += f"are left, {format_seconds(setup)} of it to {'copy' if figures.is_in_memory else 'read'} it once"
    name = format_count(fetched.value.num_workers, "worker")
    if gain > LEAST_GAIN or (figures.is_in_memory and gain >= 0):
        reason = f"{where}: with {name} it would be {told}"
        return Choice(value=DataPath(resident=True), reason=reason, alternatives=(f"{name}: {fetched.reason}",))
    reason = f"{fetched.reason}; {where} would gain too little: {told}"
    return Choice(
        value=fetched.value, reason=reason, alternatives=("resident", *fetched.alternatives), pinned=fetched.pinned
    )


def _setup_seconds(figures: DataFigures, num_workers: int) -> float:
    if figures.is_in_memory:
        return (figures.num_bytes or 0) / COPY_BYTES_PER_SECOND
    return figures.read_seconds * figures.steps_per_epoch / max(1, num_workers)


def _step_seconds(figures: DataFigures, num_workers: int) -> float:
    """Return the seconds of a step. With workers, reading overlaps with computing; without, it comes on top."""
    if num_workers == 0:
        return figures.step_seconds + figures.read_seconds
    return max(figures.step_seconds, figures.read_seconds / num_workers)


def _fetched(figures: DataFigures, pinned: int | None) -> Choice[DataPath]:
    """Choose enough workers to keep up, as far as cores and shared memory go."""
    read, step = figures.read_seconds, figures.step_seconds
    share = read / step if step > 0 else float("inf")
    told = f"a step's data takes {read * 1e3:.3g} ms to read and {step * 1e3:.3g} ms to compute"
    prefetch = 4 if figures.slowest_read_seconds > UNEVEN * read else 2
    if pinned is not None:
        path = DataPath(num_workers=pinned, prefetch_factor=prefetch if pinned else 0)
        return Choice(value=path, reason="asked for", alternatives=(told,), pinned=True)
    if figures.is_in_memory:
        return Choice(value=DataPath(), reason=f"{told}, from memory: handing it over by workers would cost more")
    if share <= HARMLESS:
        return Choice(value=DataPath(), reason=f"{told}: no workers are needed", alternatives=("1 worker",))
    needed = ceil(share) if share < float("inf") else MAX_WORKERS
    limits = {
        f"{figures.num_spare_cores} spare cores": figures.num_spare_cores,
        f"{format_bytes(figures.shm_bytes)} of /dev/shm": _most_by_shm(figures, prefetch),
        "more gain little": MAX_WORKERS,
    }
    words, most = min(limits.items(), key=lambda limit: limit[1])
    count = max(0, min(needed, most))
    path = DataPath(num_workers=count, prefetch_factor=prefetch if count else 0)
    if count == needed:
        reason = f"{told}: {format_count(count, 'worker')} keep{'s' if count == 1 else ''} up"
        return Choice(
            value=path,
            reason=reason,
            alternatives=(format_count(count - 1, "worker"), format_count(count + 1, "worker")),
        )
    left = _step_seconds(figures, count)
    reason = f"{told}: {needed} workers would keep up, and there can be {count} ({words}): {left * 1e3:.3g} ms a step"
    return Choice(value=path, reason=reason)


def _most_by_shm(figures: DataFigures, prefetch: int) -> int:
    """Return how many workers half of shared memory allows: others use it too, and workers die if it is full."""
    if figures.shm_bytes < LEAST_SHM_BYTES:
        return 0
    return int(figures.shm_bytes / 2 // max(1, prefetch * figures.batch_bytes))
