"""Plans for a machine that is not here: by the rules, the memory of a simulated step, and a forecast of its time.

The time of a step is that of one GPU, scaled by the model of `plan/forecast.py`. It comes from a step that was measured
on a GPU here, from a run that is recorded, or, where there is neither, from FLOPs that are counted on shapes and an
assumed part of the data sheet's rate. Each figure is computed three times: as expected, at best and at worst.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.value import PrecisionName, format_bytes, format_duration
from drivetrain.hardware import Hardware
from drivetrain.hardware.catalogue import Machine
from drivetrain.hardware.facts import Gpu
from drivetrain.job import Job
from drivetrain.plan import Choice, Pins, Settings, choose_settings
from drivetrain.plan.fitting import MemoryLayout, Needs, does_not_fit, first_that_fits, layouts
from drivetrain.plan.forecast import Basis, Interconnect, Pace, StepCost, StepWork, TimeForecast, scaling, step_time
from drivetrain.plan.plan import Forecast, Plan
from drivetrain.report.run_data import RunData
from drivetrain.run.job_settings import of_asked_length, refuse_other_batch
from drivetrain.run.memory import needs_of
from drivetrain.run.model_factory import checked, couples_samples, make_model, refuse_lazy, refuse_sparse

ACCURACY = (
    "memory is that of an eager step, by counting its tensors on shapes alone; compiled steps take less, and what "
    "kernels take inside themselves is left to the part of the memory that is not used"
)

NO_RATE = "No time is forecast: the rate of such a GPU is not known."
NO_FLOPS = "No time is forecast: the step has no FLOPs that are counted."
HOST_STEP = "No time is forecast: the optimizer would step in host memory, and how fast that is there is not known."
NO_LENGTH = "how long the whole job takes is not known: it says neither epochs nor steps"


@dataclass(frozen=True)
class Assumed:
    """One set of assumptions about a GPU and its links."""

    of_peak: float  # the part of the data sheet's FLOP/s that a step reaches
    of_bandwidth: float  # and of the memory's rate, in the optimizer's step
    launch_seconds: float  # of one operation, where a GPU waits for its host
    of_nvlink: float  # the part of the data sheet's rate that collectives reach
    of_pcie: float
    of_network: float
    overlap: float  # the part of the computing that an exchange is hidden behind
    busy_waiting: float  # the part of the time that a GPU computes in while it waits for its host, kernel by kernel
    hop_seconds: float = 5e-6
    node_hop_seconds: float = 15e-6


# FLOPs: GPT-2 reaches 46 % of an H200, ViT-B/16 35 %, ResNet-50 16 % (docs/benchmarks/index.md). Launching: a captured
# perceptron there takes 2 µs per operation, an eager one 30. NCCL gets 370 of 450 GB/s of NVLink after its protocol's
# overhead (NVIDIA/nccl-tests issue 212), and 28 of 64 GB/s between eight cards on PCIe (NVIDIA/nccl issue 1639).
EXPECTED = Assumed(0.30, 0.6, 8e-6, 0.80, 0.40, 0.7, overlap=0.8, busy_waiting=0.5)
BEST = Assumed(0.45, 0.8, 2e-6, 0.85, 0.70, 0.9, overlap=1.0, busy_waiting=0.0)
WORST = Assumed(0.15, 0.4, 30e-6, 0.60, 0.20, 0.4, overlap=0.0, busy_waiting=0.75)
LITTLE_WAITING = 0.05  # of a step, for data: less is not worth a word


@dataclass(frozen=True)
class MeasuredStep:
    """The time of a step on one GPU, and what that GPU is."""

    basis: Basis
    words: str  # where it was measured
    sample_seconds: float
    peak: float  # FLOP/s of that GPU, in the precision that the step was measured in
    bandwidth: float  # bytes/s of its memory
    micro_step_seconds: float = 0.0
    micro_batch: float = 0.0  # samples of a micro-step that was measured; 0: not known
    busy: float | None = None  # the part of the time in which that GPU computed; None: not known
    launch_seconds: float = 0.0  # until the host has launched a micro-step; 0: not measured
    is_fused: bool = False  # whether it was compiled or captured: that leaves less to launch
    data_seconds: float = 0.0  # of a step, for data: left out of all other figures

    @staticmethod
    def no_gpu() -> DrivetrainError:
        """Return the error for a machine on which nothing can be measured that holds for a GPU."""
        return DrivetrainError(
            "there is no GPU to measure on: the time of a step on a CPU says nothing of one on a GPU",
            remedy="leave --measure out (time is then by FLOPs), or give a run on a GPU: --from-run RUN",
        )

    @classmethod
    def of_plan(cls, found: Plan, here: Hardware) -> "MeasuredStep":
        """Return what `drivetrain plan --measure` found on the GPU here; raise where there is none."""
        if not here.gpus:
            raise cls.no_gpu()
        seconds, gpu = found.forecast.step_seconds, here.gpus[0]
        if not found.measured or seconds is None or found.choices["distributed.strategy"].value != "single":
            raise DrivetrainError(
                f"the step was not measured on one GPU: {'; '.join(found.notes) or 'it was planned by rule'}",
                remedy="leave --measure out: time is then by FLOPs",
            )
        sizes = {
            each.way.micro_batch: each.measurement.sample_seconds
            for each in found.tried
            if not each.measurement.problem and not each.measurement.is_brief and each.way.compile_mode is None
        }
        per_sample, fixed = seconds / found.global_batch, 0.0
        if len(sizes) > 1:
            small, large = min(sizes), max(sizes)
            # A micro-step takes a fixed time and one per sample: sample_seconds is c / size + s.
            fixed = max(0.0, (sizes[small] - sizes[large]) / (1 / small - 1 / large))
            fixed = min(fixed, per_sample * found.choices["batch.size"].value / 2)
            per_sample -= fixed / found.choices["batch.size"].value
        micro_batch = found.choices["batch.size"].value
        used = min(
            (each for each in found.tried if not each.measurement.problem and not each.measurement.is_brief),
            key=lambda each: abs(each.measurement.sample_seconds * found.global_batch - seconds),
            default=None,
        )
        launching = 0.0 if used is None else used.measurement.launch_share * (per_sample * micro_batch + fixed)
        rates = _rates_of(gpu, found.choices["precision.dtype"].value)
        words = f"measured here, on {gpu.name}"
        is_fused = used is not None and (used.way.capture or used.way.compile_mode is not None)
        return cls("measured", words, per_sample, *rates, fixed, micro_batch, None, launching, is_fused)

    @classmethod
    def of_run(cls, folder: Path) -> "MeasuredStep":
        """Return the time of a step of a run on one GPU, from its folder."""
        data = RunData.read(folder)
        gpus, steps = data.hardware.get("gpus") or [], data.steps[len(data.steps) // 4 :]
        remedy = "give a run of this job on one GPU, or leave --from-run out: time is then by FLOPs"
        on_gpu = gpus and str(data.plan.get("device", "")).startswith("cuda")
        if not on_gpu or len(steps) < 4:
            what = "it ran on no GPU" if not on_gpu else f"it has {len(data.steps)} steps"
            raise DrivetrainError(f"{folder} has no time of a step to forecast from: {what}", remedy=remedy)
        if data.plan.get("num_devices", 1) > 1:
            raise DrivetrainError(f"{folder} ran on several GPUs, whose steps include their exchange", remedy=remedy)
        gpu = Gpu.model_validate(gpus[0])
        rates = _rates_of(gpu, str(data.plan.get("precision", "fp32")))
        middle = sorted(steps, key=lambda row: row["seconds"] / row["samples"])[len(steps) // 2]
        seconds, busy, waiting = middle["seconds"], _busy(data), min(data.phases.get("data", 0.0), middle["seconds"])
        if waiting < LITTLE_WAITING * seconds:
            waiting = 0.0
        elif waiting < seconds:
            seconds -= waiting
            busy = None if busy is None else min(1.0, busy * middle["seconds"] / seconds)
        choices = data.plan.get("choices") or {}
        is_fused = any(
            (choices.get(name) or {}).get("value") in (True, "on") for name in ("compile.enabled", "kernels.capture")
        )
        return cls(
            "recorded",
            f"recorded in {folder}, on {gpu.name}",
            seconds / middle["samples"],
            *rates,
            micro_batch=middle["samples"] / max(1, int(data.plan.get("accumulation") or 1)),
            busy=busy,
            is_fused=is_fused,
            data_seconds=waiting,
        )

    def on(self, peak: float, bandwidth: float, flops: float) -> tuple[float, float, float]:
        """Return how much longer the same step takes on a GPU of other rates: as expected, at best, at worst.

        What computes at full speed follows the FLOP/s, the rest the memory's rate.
        """
        by_peak, by_memory = self.peak / peak, self.bandwidth / bandwidth
        share = min(1.0, flops / (self.sample_seconds * self.peak) / BEST.of_peak)
        expected = share * by_peak + (1 - share) * by_memory
        return expected, min(by_peak, by_memory), max(by_peak, by_memory)

    def host_share(self, assumed: Assumed) -> float:
        """Return the part of a step in which the GPU waits for its host, by how busy it was.

        The rest of the step it computes all the time. While it waits it computes for a part of the time as well, of
        which only a range is known.
        """
        return 0.0 if self.busy is None else min(1.0, (1 - self.busy) / (1 - assumed.busy_waiting))

    def cost(self, assumed: Assumed, longer: float, num_operations: int) -> StepCost:
        """Return what a step costs on a GPU that takes so many times longer for the same work.

        Launching takes as long as here: the host is taken to be as fast, and a smaller batch has as many kernels.
        """
        whole = self.sample_seconds * self.micro_batch + self.micro_step_seconds
        share = self.host_share(assumed)
        launching = self.launch_seconds or num_operations * self.operation_seconds(assumed)
        least = max(launching, num_operations * BEST.launch_seconds)  # a kernel takes as long, however little it does
        return StepCost(
            sample_seconds=self.sample_seconds * (1 - share) * longer,
            micro_step_seconds=self.micro_step_seconds * longer,
            least_seconds=min(whole, least) if whole else least,
            host_seconds=self.sample_seconds * self.micro_batch * share,
            meanwhile_seconds=self.sample_seconds * max(0.0, (self.busy or 0.0) - (1 - share)) * longer,
        )

    def operation_seconds(self, assumed: Assumed) -> float:
        """Return what the host is taken to need to launch an operation, where that was not measured."""
        if not self.is_fused:
            return assumed.launch_seconds
        return EXPECTED.launch_seconds if assumed is WORST else BEST.launch_seconds

    def launching_in_words(self) -> Iterator[str]:
        """Yield what is known or assumed of the part of a step that does not shrink with a GPU's share of it."""
        rest = "that does not shrink with a GPU's share of the batch"
        if self.launch_seconds:
            yield f"the host needs {format_duration(self.launch_seconds)} to launch a micro-step, as measured: {rest}"
            return
        if self.busy is not None:
            share, least, most = (f"{self.host_share(each):.0%}" for each in (EXPECTED, BEST, WORST))
            yield (
                f"the GPU was busy for {self.busy:.0%} of the time, so for {share} ({least} to {most}) of a step it "
                f"waits for its host, which launches kernels: {rest}"
            )
        unknown = "" if self.busy is not None else "; how busy the GPU was is not recorded, so it may be all of a step"
        each, least, most = (f"{self.operation_seconds(of) * 1e6:g}" for of in (EXPECTED, BEST, WORST))
        yield f"{each} µs ({least} to {most}) to launch an operation: {rest}{unknown}"
        if self.data_seconds:
            yield f"the {format_duration(self.data_seconds)} for which each step waited for data are left out"


def _busy(data: RunData) -> float | None:
    """Return the part of the time in which a run's GPU computed, by the driver; None if that is not recorded."""
    last, own = data.steps[-1]["step"], [row for row in data.devices if str(row.get("device", "")).startswith("gpu")]
    shares = ((row.get("step", 0), row.get("utilisation_percent")) for row in own)
    found = sorted(float(share) for step, share in shares if share is not None and 0 < step < last)
    return found[len(found) // 2] / 100 if found else None


def _rates_of(gpu: Gpu, precision: str) -> tuple[float, float]:
    """Return FLOP/s and bytes/s of a GPU; raise where they are not known."""
    peak = {str(name): rate for name, rate in gpu.peaks.items()}.get(precision)
    if peak is None or gpu.memory_bandwidth is None:
        raise DrivetrainError(
            f"the rates of {gpu.name} in {precision} are not known, so its time says nothing of other GPUs",
            remedy="`drivetrain verify --save` measures them on that machine",
        )
    return peak.value * 1e12, gpu.memory_bandwidth.value * 1e9


def plan_elsewhere(
    job: Job,
    config: Config,
    machine: Machine,
    here: Hardware,
    measured: MeasuredStep | None = None,
    of_peak: float | None = None,
) -> Plan:
    """Return how the job would be run on so many GPUs of a kind, each choice with its reason.

    Args:
        job: What would be trained.
        config: What the user asked for.
        machine: The GPUs to plan for.
        here: This machine, on which shapes are followed.
        measured: The time of a step on one GPU; None: it is counted from FLOPs.
        of_peak: The part of the data sheet's FLOP/s to assume; None: a range.
    """
    job = of_asked_length(job, config)
    if job.num_samples is None:
        words = "data that can only be iterated cannot be planned for: its items would be used up"
        raise DrivetrainError(words, remedy="give data with a length and items by number")
    settings = _settings(config, machine, here)
    num_gpus = len(settings.devices.value)
    strategy = settings.strategy
    if strategy.pinned and strategy.value not in {layout.strategy for layout in layouts(num_gpus)}:
        raise DrivetrainError(
            f"{strategy.value} on {machine} is not planned for another machine: no memory model knows it",
            remedy="leave --parallel-strategy out, or plan on that machine",
        )
    planned = None if config.batch_asked.is_set else config.plan_pins.global_batch
    by_rule = min(settings.effective_batch, job.num_samples)
    if config.batch_asked.is_set and job.default_batch is not None:
        asked = config.batch_asked
        by_rule = (asked.size or job.default_batch) * (asked.accumulation or 1) * num_gpus
    global_batch = job.largest_batch or planned or by_rule
    refuse_other_batch(config, global_batch)
    share, step_samples = -(-global_batch // num_gpus), job.samples_in_words(global_batch)
    fraction = config.memory.gpu_fraction
    limit = machine.gpus()[0].memory_free_bytes * fraction
    model, needs = _model_and_needs(job, here, settings.precision.value, share, limit)
    layout, micro_batch, why = _laid_out(needs, limit, num_gpus, share, settings, config, model)
    if layout is None:
        free = machine.gpus()[0].memory_free_bytes
        how_much = f"{format_bytes(limit)} to use ({format_bytes(free)} × {fraction:g})"
        raise does_not_fit(needs, limit, str(machine), how_much, num_gpus)
    num_samples = _samples_of(job, global_batch)
    # Fewer GPUs take larger micro-batches, as far as they fit, except where their size is asked for.
    most = micro_batch if why == "asked for" else max(micro_batch, layout.largest(needs, limit, global_batch))
    work = _work(needs, layout, most, global_batch, settings.precision.value)
    time = _time(needs, work, machine, settings.precision.value, num_samples, measured, of_peak)
    time = HOST_STEP if layout.offloads_optimizer else time
    return Plan(
        job=config.run.name or job.name,
        global_batch=global_batch,
        num_steps=job.num_steps if job.largest_batch else None,
        choices=_choices(settings, layout, micro_batch, why, share, step_samples, limit),
        machine=str(machine),
        forecast=Forecast(
            memory=layout.forecast(needs, micro_batch),
            time=None if isinstance(time, str) else time,
            num_samples=num_samples,
        ),
        notes=(
            f"For {machine}, by rule and memory model; nothing was measured there.",
            *([time] if isinstance(time, str) else []),
            f"{ACCURACY[0].upper()}{ACCURACY[1:]}.",
            *needs.notes,
        ),
    )


def _work(
    needs: Needs, layout: MemoryLayout, micro_batch: int, global_batch: int, precision: PrecisionName
) -> StepWork:
    """Return what a step does and exchanges: gradients in full precision, gathered weights as computed with."""
    weights = needs.held.parameters
    is_low = precision in ("bf16", "fp16")
    return StepWork(
        global_batch=global_batch,
        micro_batch=micro_batch,
        gradient_bytes=needs.held.gradients,
        gathered_bytes=0 if layout.is_whole else weights // (2 if is_low else 1),
        num_blocks=max(1, weights // max(1, needs.block_bytes)),
        recomputes=layout.recomputes,
    )


def _time(
    needs: Needs,
    work: StepWork,
    machine: Machine,
    precision: PrecisionName,
    num_samples: int | None,
    measured: MeasuredStep | None,
    of_peak: float | None,
) -> TimeForecast | str:
    """Forecast the time on 1, 2, 4, ... of these GPUs; a sentence says why that cannot be done."""
    gpu = machine.gpus()[0]
    peaks: dict[Any, Any] = gpu.peaks  # of FP8 none is tabled
    peak = peaks.get(precision)
    if peak is None or gpu.memory_bandwidth is None:
        return NO_RATE
    if needs.flops <= 0 and measured is None:
        return NO_FLOPS
    flops, bandwidth = peak.value * 1e12, gpu.memory_bandwidth.value * 1e9
    longer = (1.0, 1.0, 1.0) if measured is None else measured.on(flops, bandwidth, needs.flops)
    paces = []
    for assumed, factor in zip((EXPECTED, BEST, WORST), longer, strict=True):
        if measured is not None:
            cost = measured.cost(assumed, factor, needs.num_operations)
        else:
            cost = _counted(needs, flops * (of_peak or assumed.of_peak), bandwidth, assumed)
        paces.append(Pace(cost=cost, links=_links(machine, assumed), overlap=assumed.overlap))
    expected, best, worst = paces
    num_steps = None if num_samples is None else num_samples / work.global_batch
    return TimeForecast(
        basis="counted" if measured is None else measured.basis,
        rows=scaling(expected, best, worst, work, machine.num_gpus, num_steps),
        sent_bytes=step_time(expected, work, machine.num_gpus).sent_bytes,
        assumes=tuple(_assumptions(machine, measured, of_peak, peak.value, precision)),
        why_no_job_time=NO_LENGTH if num_steps is None else "",
    )


def _counted(needs: Needs, flops: float, bandwidth: float, assumed: Assumed) -> StepCost:
    """Return the cost of a step by its FLOPs, its operations, and the bytes of the optimizer's step."""
    held = needs.held
    touched = 2 * (held.parameters + held.gradients + held.optimizer)  # each is read and written
    return StepCost(
        sample_seconds=needs.flops / flops,
        least_seconds=needs.num_operations * assumed.launch_seconds,
        optimizer_seconds=touched / (bandwidth * assumed.of_bandwidth),
    )


def _links(machine: Machine, assumed: Assumed) -> Interconnect:
    wires = machine.wires
    share = assumed.of_nvlink if wires.kind == "NVLink" else assumed.of_pcie
    return Interconnect(
        bytes_per_second=wires.gpu * 1e9 * share,
        hop_seconds=assumed.hop_seconds,
        devices_per_node=machine.gpus_per_node,
        node_bytes_per_second=wires.node * 1e9 * assumed.of_network,
        node_hop_seconds=assumed.node_hop_seconds,
    )


def _assumptions(
    machine: Machine, measured: MeasuredStep | None, of_peak: float | None, peak: float, precision: str
) -> Iterator[str]:
    """Yield what the forecast takes for granted, with the range that its bounds come from."""
    wires = machine.wires
    if measured is not None:
        yield f"a step as {measured.words}, scaled by the rates of the data sheets"
        yield from measured.launching_in_words()
    elif of_peak is not None:
        yield f"{of_peak:.0%} of {peak:,.0f} TFLOP/s in {precision}, as stated"
    else:
        yield (
            f"{EXPECTED.of_peak:.0%} ({WORST.of_peak:.0%} to {BEST.of_peak:.0%}) of {peak:,.0f} TFLOP/s in "
            f"{precision}, as ResNet-50 to GPT-2 reach on an H200; --mfu states another, --from-run takes a run's"
        )
        yield (
            f"{EXPECTED.launch_seconds * 1e6:g} µs ({BEST.launch_seconds * 1e6:g} to {WORST.launch_seconds * 1e6:g}) "
            "to launch an operation"
        )
    if machine.num_gpus > 1:
        share = {"NVLink": [a.of_nvlink for a in (EXPECTED, WORST, BEST)]}.get(
            wires.kind, [a.of_pcie for a in (EXPECTED, WORST, BEST)]
        )
        yield (
            f"{share[0]:.0%} ({share[1]:.0%} to {share[2]:.0%}) of {wires.gpu:,g} GB/s per GPU and direction by "
            f"{wires.kind}, {EXPECTED.overlap:.0%} (0 to all) of the backward hides it"
        )
    if machine.num_nodes > 1:
        yield (
            f"{EXPECTED.of_network:.0%} of {wires.node:,g} GB/s between nodes of {machine.gpus_per_node}; other "
            "networks differ widely"
        )
    yield "reading data, validation, checkpoints and restarts take no time"


def _samples_of(job: Job, global_batch: int) -> int | None:
    """Return how many samples the whole job trains on; None if that is not known."""
    if job.num_samples is None:
        return None
    by_epochs = None if job.epochs is None else job.epochs * job.num_samples
    by_steps = None
    if job.max_steps is not None and job.batch_sizes:
        by_steps = job.samples_between(0, job.max_steps)
    elif job.max_steps is not None:
        num_epochs, num_steps = divmod(job.max_steps, -(-job.num_samples // global_batch))
        by_steps = num_epochs * job.num_samples + num_steps * global_batch  # an epoch's last step may be smaller
    return min((each for each in (by_epochs, by_steps) if each is not None), default=None)


def _settings(config: Config, machine: Machine, here: Hardware) -> Settings:
    """Choose the settings of that machine by rule, regardless of which devices may be used on this one."""
    pins = {**config.pins(), "gpu_mode": "auto", "device": "auto", "device_ids": None}
    return choose_settings(machine.hardware(here), Pins(**pins))


def _model_and_needs(
    job: Job, here: Hardware, precision: PrecisionName, at_most: int, limit_bytes: float
) -> tuple[nn.Module, Needs]:
    """Make the model and simulate what a step needs.

    The model is made on the meta device if that works: it may be too large for this machine.
    """
    made = job.model
    if not isinstance(made, nn.Module):
        with suppress(Exception):  # whatever it is that looks at values
            with torch.device("meta"):
                model = checked(made()).train()
            return model, needs_of(job, model, precision, at_most, limit_bytes)
        torch.manual_seed(job.seed)
        made = make_model(made, here.memory.total_bytes)
    refuse_lazy(made)
    refuse_sparse(made)
    model = made.train()
    return model, needs_of(job, model, precision, at_most, limit_bytes)


def _laid_out(
    needs: Needs, limit: float, num_gpus: int, share: int, settings: Settings, config: Config, model: nn.Module
) -> tuple[MemoryLayout | None, int, str]:
    """Return the layout, the micro-batch, and the reason for them."""
    pinned = config.batch.size or (-(-share // config.batch.accumulation) if config.batch.accumulation else None)
    allowed = [layout for layout in layouts(num_gpus) if _is_allowed(layout, settings)]
    if pinned is not None:
        size = min(pinned, share)
        fitting = [layout for layout in allowed if layout.largest(needs, limit, size) >= size]
        return (fitting[0] if fitting else None), size, "asked for"
    if couples_samples(model):
        whole = first_that_fits(needs, limit, num_gpus, share)
        if whole is not None and whole in allowed:
            why = (
                "a rank's whole share: samples of a batch influence each other, so its size is part of what is learned"
            )
            return whole, share, why
    for layout in allowed:
        largest = layout.largest(needs, limit, share)
        if largest:
            # As equal as can be, in as few parts as fit.
            size = -(-share // -(-share // largest))
            return layout, size, f"the memory model lets up to {largest} of a rank's {share} fit"
    return None, 0, ""


def _is_allowed(layout: MemoryLayout, settings: Settings) -> bool:
    """Return whether a layout agrees with what the user pinned."""
    if settings.strategy.pinned and layout.strategy != settings.strategy.value:
        return False
    return not settings.activations.pinned or layout.recomputes == (settings.activations.value == "recompute")


def _choices(
    settings: Settings, layout: MemoryLayout, micro_batch: int, why: str, share: int, step_samples: str, limit: float
) -> dict[str, Choice[Any]]:
    num_gpus = len(settings.devices.value)
    is_whole = layout.is_whole
    strategy_reason = settings.strategy.reason if is_whole else f"whole copies do not fit: {layout}"
    if settings.strategy.pinned:
        strategy_reason = f"asked for: {layout}"
    recompute_reason = "the cheapest way that fits" if layout.recomputes else f"they fit in {format_bytes(limit)}"
    choices: dict[str, Choice[Any]] = {
        "distributed.strategy": Choice(
            value=layout.strategy,
            reason=strategy_reason,
            alternatives=settings.strategy.alternatives if is_whole else (),
            pinned=settings.strategy.pinned,
        ),
        "precision.dtype": settings.precision,
        "batch.size": Choice(value=micro_batch, reason=why, pinned=why == "asked for"),
        "batch.accumulation": Choice(
            value=-(-share // micro_batch), reason=f"follows: {step_samples} on {num_gpus} GPU(s)"
        ),
        "memory.activations": Choice(
            value="recompute" if layout.recomputes else "keep",
            reason="asked for" if settings.activations.pinned else recompute_reason,
            pinned=settings.activations.pinned,
        ),
    }
    if layout.offloads_optimizer:
        choices["deepspeed.offload_optimizer"] = Choice(value=True, reason="it does not fit on the GPUs")
    return choices
