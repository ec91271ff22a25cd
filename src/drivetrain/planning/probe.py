"""Runs a way of doing a step on a throw-away copy of the model, and returns what it took.

The run is not touched: weights, buffers, optimizer, randomness and the place in the data are afterwards what they were
before, also when a probe ran out of memory. Before each probe a line is written to a journal on the disk: after a crash
that takes the process with it, the next start finds the line and leaves that way out.

How long fetching takes is measured by really reading some batches; by that it is decided how samples reach the device.
"""

import json
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import copied, generators_kept, is_out_of_memory, untouched
from drivetrain.core.metrics import LossSum, logging_loss
from drivetrain.core.optimizers import Turn
from drivetrain.core.precision import Precision
from drivetrain.core.run_folder import read_rows
from drivetrain.core.schedules import is_factor
from drivetrain.core.world import World, synchronize
from drivetrain.data.batch import leaves, to_device
from drivetrain.data.division import Division
from drivetrain.data.keyed_items import Columns
from drivetrain.data.loader import Loader
from drivetrain.data.resident import num_bytes_in_memory, probed
from drivetrain.job import Job
from drivetrain.loop import CapturedStep, CudaRecorder, MicroInput, make_capturable, own_stream, why_not_captured
from drivetrain.plan import Choice
from drivetrain.plan.fitting import count_held
from drivetrain.plan.knobs import StepWay
from drivetrain.plan.rules import DataFigures, DataPath, choose_data_path, workers_worth
from drivetrain.plan.tune import Measurement
from drivetrain.run.memory import peak_meter
from drivetrain.run.session import Session, step_numerics
from drivetrain.strategies import SingleStrategy, StrategyParts, Trial, make_average
from drivetrain.strategies.base import LossFunction
from drivetrain.strategies.compiling import (
    CompileOptions,
    compile_repeated,
    compiled,
    forget_compiled,
    leave_to,
    num_graphs,
    varying_dims_of,
)
from drivetrain.strategies.layers import recompute, repeated_blocks, split_recurrent_dropout, use_fp8
from drivetrain.strategies.loss_parts import LossParts
from drivetrain.strategies.optimizer_state import put_rates_on_device
from drivetrain.strategies.turns import OwnLoss, TurnsStrategy, clips_of, parts_by_turn, turns_in

WARM_STEPS, ROUNDS, MOST_STEPS, LAUNCH_LOOKS = 2, 3, 50, 2
LONG_STEP_SECONDS = 0.1  # one look at such a step's launching is enough
ROUND_SECONDS, BRIEF_PARTS = 0.02, 4
FORGOTTEN_AFTER = 600  # seconds: longer than any way is tried
MOST_LOOKED_AT, LOOK_SECONDS = 64, 0.3  # samples, for the longest
# How far a loss may be from fp32's: rounding of the type, many times over, but far from a wrong result.
LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 2e-2, "fp8": 0.1, "fp8-tensor": 0.1}
MOST_BATCHES, ENOUGH_SECONDS = 9, 0.5


class StepProbe:
    """Measures ways for the planner. Collective: all ranks try the same way, and the slowest rank's figures count."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        world: World,
        make_loader: Callable[[Division], Loader],
        journal: "Journal",
        *,
        cudnn_benchmark: bool = True,
        takes_any_number: bool = False,
    ) -> None:
        self._takes_any_number = takes_any_number and world.device.type == "cpu" and world.size == 1
        self._job, self._model, self._world = job, model, world
        self._cudnn_benchmark = cudnn_benchmark
        self._make_loader, self._journal = make_loader, journal
        self._alone = World(device=world.device)
        self._longest: list[int | None] | None = None
        self._found_to_stray: dict[str, str] = {}  # by precision: why it is not to be trusted, or nothing
        self.read_sample_seconds = math.inf  # of the micro-batch that was read the quickest, collating included

    def __call__(self, way: StepWay, seconds: float, *, of_part: bool = False) -> Measurement:
        """Measure a way for some seconds; 0 is a brief look: `of_part` of a micro-batch, where a CPU can."""
        if self._world.any(self._journal.crashed_in(way)):
            return Measurement(problem="the last start crashed while it was tried")
        self._journal.begin(way)
        self.leave_to(way)
        with untouched(self._world.device):
            own = self._measured(way, seconds, of_part)
        self._journal.end(way)
        return self._agreed(own)

    def _agreed(self, own: Measurement) -> Measurement:
        found = [Measurement.model_validate(each) for each in self._world.gather(own.model_dump(mode="json"))]
        failed = next((each for each in found if each.problem), None)
        if failed is not None:
            return failed.model_copy(update={"out_of_memory": any(each.out_of_memory for each in found)})
        worst = ("sample_seconds", "peak_bytes", "setup_seconds", "launch_share")
        return own.model_copy(update={name: max(getattr(each, name) for each in found) for name in worst})

    def _measured(self, way: StepWay, seconds: float, of_part: bool) -> Measurement:
        try:
            with own_stream(self._world.device) if way.capture else nullcontext():
                part = of_part and self._takes_any_number and way.compile_mode is None
                return self._run(way, seconds, BRIEF_PARTS if part else 1)
        except MemoryError:
            return Measurement(problem="out of host memory", out_of_memory=True)
        except Exception as error:  # noqa: BLE001  (a way that fails is one that is not used, whatever the reason)
            if is_out_of_memory(error):
                return Measurement(problem="out of memory", out_of_memory=True)
            return Measurement(problem=f"{type(error).__name__}: {_first_line(error)}")

    def _run(self, way: StepWay, seconds: float, num_parts: int) -> Measurement:
        job, device = self._job, self._world.device
        share = -(-(job.largest_batch or 1) // self._world.size)
        meter = peak_meter(device, may_be_coarse=False)
        meter.reset()
        batch, num_samples = self._batch(way.but(micro_batch=max(1, way.micro_batch // num_parts)))
        model = self._copy(way)
        precision = Precision(way.precision, device.type)
        # As the run has them: otherwise kernels would be measured that the run does not use. A brief look is for
        # memory: with many convolutions, cuDNN would spend ten seconds and more on looking for the fastest of each.
        with step_numerics(way, precision, cudnn_benchmark=self._cudnn_benchmark and seconds > 0):
            problem = self._strays(model, batch, way, precision)
            if problem:
                return Measurement(problem=problem)
            graphs = num_graphs() if way.compile_mode else 0  # to look for the compiler alone takes seconds
            optimizer, count = job.make_optimizer(model), -(-share // way.micro_batch)
            problem = self._made_capturable(optimizer, precision, count) if way.capture else ""
            if problem:
                return Measurement(problem=problem)
            parts, strategy = self._parts(model, optimizer, precision, way)
            began = time.perf_counter()
            objective = strategy.prepare(parts, Trial(batch, num_samples))
            captured: dict[int, CapturedStep] = {}  # by their number of micro-steps

            def step(num_micro_steps: int) -> None:
                if captured:
                    captured[num_micro_steps].replay()
                    return
                for turn in turns_in(strategy):
                    with turn:
                        for _ in range(num_micro_steps):
                            strategy.backward(objective(batch, num_samples, num_samples * num_micro_steps, 1))
                strategy.step(False)

            at_once = 1 if count == 1 else 2  # the second micro-step is the first to hold gradients
            # A brief look on a CPU takes the first step as it is: nothing is set up there, and it is an estimate.
            for _ in range(WARM_STEPS if seconds else int(device.type != "cpu" or way.compile_mode is not None)):
                step(at_once)
            if way.capture:
                record, same = CudaRecorder(device), MicroInput(batch, num_samples)
                for number in range(1, at_once + 1):
                    captured[number] = CapturedStep(record, strategy, objective, [same] * number)
            synchronize(device)
            warm = time.perf_counter() - began
            if way.compile_mode and not self._was_compiled(graphs, blocks_of=None if way.compiles_loss else model):
                return Measurement(problem="nothing was compiled")
            one, more = _step_seconds(step, device, seconds, count, at_once)
            whole = one + (count - 1) * max(more, 0.0) if num_parts == 1 else one / num_samples * share
            held = count_held(model, optimizer)
            return Measurement(
                sample_seconds=whole / share,
                peak_bytes=meter.peak_bytes(),
                setup_seconds=max(0.0, warm - (WARM_STEPS + 1) * one) if way.compile_mode else 0.0,
                parameter_bytes=held.parameters + held.buffers,
                gradient_bytes=held.gradients,
                optimizer_bytes=held.optimizer,
                launch_share=_launch_share(lambda: step(1), device, one) if seconds else 0.0,
                is_brief=not seconds,
            )

    def leave_to(self, way: StepWay) -> None:
        """Forget what was compiled before in this process, of another job or in another scope."""
        leave_to(way, self._model, self._job.step_parts)

    def losses(self, way: StepWay, num_steps: int) -> list[float]:
        """Train a copy for some steps of one micro-batch each, and return the losses of this rank.

        Steps are run eagerly: how numbers are rounded does not depend on how kernels are launched.
        """
        job, device = self._job, self._world.device
        precision = Precision(way.precision, device.type)
        division = Division(job.num_samples or 1, job.largest_batch or 1, way.micro_batch, self._world.size)
        with untouched(device), step_numerics(way, precision, cudnn_benchmark=False):
            model, loader = self._copy(way.but(compile_mode=None, capture=False)), self._make_loader(division)
            optimizer, found = job.make_optimizer(model), list[float]()
            rates = [group["lr"] for group in optimizer.param_groups]
            for step in range(num_steps):
                batch = to_device(loader.micro_batch(division.place(step), 0).batch, device)
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * (job.lr_factor(step, job.num_steps) if is_factor(job.schedule) else 1.0)
                torch.manual_seed(step)  # the same dropout in every precision
                with precision.around_forward() or nullcontext():
                    loss = _total(job, job.loss_function(model, batch), batch)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss.detach()))  # waits for the device: nothing is timed here
        return found

    def _made_capturable(self, optimizer: Optimizer, precision: Precision, num_micro_steps: int) -> str:
        """Prepare an optimizer for captured steps; return why they cannot be captured, else nothing."""
        shape: dict[str, Any] = {"num_micro_steps": num_micro_steps, "has_turns": bool(self._job.turns)}
        problem = why_not_captured(self._alone, SingleStrategy.name, optimizer, precision, **shape)
        if not problem:
            make_capturable(optimizer)
            put_rates_on_device(optimizer)
        return problem

    def _parts(
        self, model: nn.Module, optimizer: Optimizer, precision: Precision, way: StepWay
    ) -> tuple[StrategyParts, SingleStrategy | TurnsStrategy]:
        """Return what is tried: the parts, and the strategy that they are for."""
        job = self._job

        def called(loss: LossFunction) -> LossFunction | None:
            return compiled(loss, CompileOptions.of(way)) if way.compiles_loss else None

        def own(turn: Turn) -> OwnLoss:
            alone = LossParts(None, None, self._alone, alone=True)
            return OwnLoss(logging_loss(turn.loss), called(turn.loss), alone)

        parts = StrategyParts(
            model,
            logging_loss(job.loss_function),
            optimizer,
            None if job.optims else job.clip_norm,
            precision,
            clips=clips_of(job, optimizer),
            called_loss=None if job.turns else called(job.loss_function),
            average=make_average(model, job.ema, job.swa, job.num_steps),
            loss_parts=LossParts(job.loss_weights, job.count, self._alone, alone=True),
        )
        turns = parts_by_turn(job, parts, own)
        if not turns:
            return parts, SingleStrategy(self._alone)
        return parts, TurnsStrategy(lambda: SingleStrategy(self._alone), turns)

    def _copy(self, way: StepWay) -> nn.Module:
        """Return a copy of the model, prepared for a way of running a step."""
        model = copied(self._model)
        forget_compiled(model)
        use_fp8(model, Precision(way.precision, self._world.device.type).fp8)
        if way.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if way.compiles_blocks:
            compile_repeated(model, CompileOptions.of(way), varying_dims_of(self._job.loss_function))
        if way.splits_recurrent_dropout:
            split_recurrent_dropout(model)
        if way.recompute:
            recompute(model)
        return model

    def _was_compiled(self, graphs_before: int, *, blocks_of: nn.Module | None) -> bool:
        """Return whether something was compiled, in this probe or by an earlier one whose code is used again.

        Args:
            graphs_before: How many graphs the compiler had made before this probe.
            blocks_of: The model whose blocks are compiled by themselves; None where the loss function is.
        """
        if num_graphs() > graphs_before:
            return True
        if blocks_of is not None:
            return any(_has_compiled(type(block).forward) for block in repeated_blocks(blocks_of).values())
        return all(_has_compiled(logging_loss(loss)) for loss in self._job.losses)

    def _batch(self, way: StepWay) -> tuple[Any, int]:
        """Return the job's first micro-batch; where samples have different sizes, one of the largest found."""
        job, device = self._job, self._world.device
        division = Division(job.num_samples or 1, job.largest_batch or 1, way.micro_batch, self._world.size)
        loader, began = self._make_loader(division), time.perf_counter()
        first = loader.first(job.max_steps, job.epochs)
        batch, num_samples = first.batch, first.num_samples
        self.read_sample_seconds = min(self.read_sample_seconds, (time.perf_counter() - began) / num_samples)
        if self._longest is None:
            self._longest = [_longest(job.source.dataset)]
        if self._longest[0] is not None:
            batch = job.collate([job.source.dataset[self._longest[0]]] * num_samples)
        return to_device(batch, device, channels_last=way.channels_last), num_samples

    def _strays(self, model: nn.Module, batch: Any, way: StepWay, precision: Precision) -> str:
        """Return why this precision's loss cannot be trusted; empty if it is near fp32's. Each is checked once."""
        if way.precision == "fp32":
            return ""
        if way.precision not in self._found_to_stray:
            # To look for the fastest convolutions of both would take longer than the rest of the probe.
            with step_numerics(way, precision, cudnn_benchmark=False):
                reference = _loss(self._job, model, batch, Precision("fp32", precision.device_type))
                found = _loss(self._job, model, batch, precision)
            # A loss that is not a number is near nothing: any comparison with it is false.
            is_near = abs(found - reference) <= LOSS_TOLERANCE[way.precision] * max(abs(reference), 1e-3)
            self._found_to_stray[way.precision] = (
                ""
                if is_near
                else f"its loss is {found:.5g} where fp32 has {reference:.5g}: more than {way.precision} explains"
            )
        return self._found_to_stray[way.precision]


def _loss(job: Job, model: nn.Module, batch: Any, precision: Precision) -> float:
    around = precision.around_forward()
    torch.manual_seed(0)  # the same dropout in both
    with torch.no_grad():
        if around is None:
            result = job.loss_function(model, batch)
        else:
            with around:
                result = job.loss_function(model, batch)
    return float(_total(job, result, batch))


def _total(job: Job, result: Any, batch: Any) -> Tensor:
    """Return the mean that a loss function's result stands for."""
    if isinstance(result, Mapping):
        result = LossParts(job.loss_weights, job.count).total(result, batch)
    mean: Tensor = result.total / result.count if isinstance(result, LossSum) else result
    return mean


class Journal:
    """Keeps on disk which way is being tried right now, so that the next start leaves out one that crashed.

    Jobs that start together share it. One that another process is still trying has not crashed: a row names its
    process. Processes of other hosts cannot be asked; those that began long ago count as gone.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._crashed: set[str] = set()
        if path is not None and path.exists():
            rows, _ = read_rows(path)  # a damaged line forgets a crash, which is then met again
            ended = {_trial(row) for row in rows if row.get("event") == "end"}
            begun = [row for row in rows if row.get("event") == "begin" and _trial(row) not in ended]
            self._crashed = {row.get("way", "") for row in begun if not _may_be_running(row)}

    def crashed_in(self, way: StepWay) -> bool:
        return way.model_dump_json() in self._crashed

    def begin(self, way: StepWay) -> None:
        self._write("begin", way)

    def end(self, way: StepWay) -> None:
        self._write("end", way)

    def _write(self, event: str, way: StepWay) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                row = {"event": event, "way": way.model_dump_json(), "time": time.time(), **_own_process()}
                file.write(json.dumps(row) + "\n")
        except OSError:
            self._path = None  # nowhere to write: a crash cannot be remembered


def _own_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": psutil.Process().create_time()}


def _trial(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("way", "host", "pid", "began"))


def _may_be_running(row: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote the row may still be trying its way. Old rows do not name one."""
    if row.get("host") != socket.gethostname():
        return bool(time.time() - row.get("time", 0.0) < FORGOTTEN_AFTER)
    try:
        return bool(psutil.Process(row["pid"]).create_time() == row["began"])
    except (KeyError, psutil.Error):
        return False


def _step_seconds(
    step: Callable[[int], None], device: torch.device, seconds: float, count: int, at_once: int
) -> tuple[float, float]:
    """Return the seconds of one micro-step with the optimizer's step, and of each further one."""
    if not seconds:
        one = _timed(lambda: step(at_once), device, seconds) / at_once
        return one, one
    one = _timed(lambda: step(1), device, seconds)
    return one, _timed(lambda: step(2), device, seconds) - one if count > 1 else one


def _timed(step: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Return the median over some rounds of steps."""
    start = time.perf_counter()
    step()
    synchronize(device)
    first = time.perf_counter() - start
    if not seconds:
        return first
    num_steps = max(1, min(MOST_STEPS, int(ROUND_SECONDS / max(first, 1e-6))))
    times: list[float] = []
    began = time.perf_counter()
    while not times or time.perf_counter() - began < seconds:
        times += _rounds(step, num_steps, device)
    return statistics.median(times)


def _rounds(step: Callable[[], None], num_steps: int, device: torch.device) -> list[float]:
    """Return the seconds of a step in each of a few rounds. As in a run, the host does not wait after each step."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(ROUNDS):
            for _ in range(num_steps):
                step()
            synchronize(device)
            marks.append(time.perf_counter())
        return [(after - before) / num_steps for before, after in pairwise(marks)]
    # By the device's clock, from a step's end to another's: as in a run, the device does not wait for a first launch.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]  # type: ignore[no-untyped-call]
    step()
    events[0].record()
    for event in events[1:]:
        for _ in range(num_steps):
            step()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) / 1000 / num_steps for before, after in pairwise(events)]


def _launch_share(step: Callable[[], None], device: torch.device, step_seconds: float) -> float:
    """Return the share of a step's time that the host takes to launch it, from an idle device on. 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    shares = []
    for _ in range(LAUNCH_LOOKS if step_seconds < LONG_STEP_SECONDS else 1):
        synchronize(device)
        start = time.perf_counter()
        step()
        launched = time.perf_counter() - start
        synchronize(device)
        shares.append(launched / (time.perf_counter() - start))
    return min(shares)


def _longest(dataset: Any) -> int | None:
    """Return the largest of some samples, spread over the data; None where all have one size, or none can be seen."""
    if isinstance(dataset, (TensorDataset, Columns, Tensor)):
        return None
    number, began = len(dataset), time.perf_counter()
    sizes: dict[int, int] = {}
    for index in range(0, number, max(1, number // MOST_LOOKED_AT)):
        sizes[index] = _num_values(dataset[index])
        if time.perf_counter() - began > LOOK_SECONDS:
            break
    return max(sizes, key=sizes.__getitem__) if len(set(sizes.values())) > 1 else None


def _num_values(item: Any) -> int:
    return sum(leaf.numel() if isinstance(leaf, Tensor) else int(np.size(leaf)) for leaf in leaves(item))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else ""


def _has_compiled(function: Any) -> bool:
    """Return whether the compiler has made something of a function's code."""
    if str(getattr(function, "__module__", "")).startswith("torch."):
        # The compiler leaves torch's own modules alone, such as `nn.TransformerEncoderLayer`: it compiles a call of it.
        function = torch._dynamo.external_utils.wrap_inline(function)
    code = getattr(function, "__code__", None)
    return code is not None and bool(torch._dynamo.eval_frame._debug_get_cache_entry_list(code))


def measured_data_path(
    run: Session, micro_batch: int, step_seconds: float, steps_left: int | None, step_bytes: int = 0
) -> Choice[DataPath] | None:
    """Measure how samples are best fetched, and decide. None where that cannot be measured.

    `step_seconds` is what a step takes when its data is ready, `step_bytes` what it needs on the device beyond what is
    allocated now.
    """
    own = measure_data(run, micro_batch, step_seconds, steps_left, step_bytes)
    agreed = run.world.agree(None if own is None else own.model_dump(mode="json"))  # one plan for all ranks
    figures = None if agreed is None else DataFigures.model_validate(agreed)
    if figures is None:
        return None
    workers = run.config.data.num_workers
    return choose_data_path(figures, run.config.data.resident, None if workers < 0 else workers)


def measure_data(
    run: Session, micro_batch: int, step_seconds: float, steps_left: int | None, step_bytes: int = 0
) -> DataFigures | None:
    """Measure how long reading takes, and what the data takes in memory.

    Returns None for data that reading would use up, and for items that raise: the run reports that when it gets there.
    """
    job, source, hardware = run.job, run.job.source, run.hardware
    if source.is_iterable:
        return None
    # A sampler's order is not asked for: what its items take to read does not depend on it.
    division = Division(len(source.dataset), job.largest_batch or 1, micro_batch, run.world.size)
    loader = Loader(source.dataset, division, run.world.rank, job.seed, job.collate)
    known = num_bytes_in_memory(source.dataset)
    try:
        with generators_kept():
            seconds, batch_bytes = _read_some(loader)
        found = probed(source, job.collate, float("inf"))
    except DrivetrainError:
        return None
    share = -(-division.global_batch // run.world.size)
    read_seconds = statistics.median(seconds) * share
    return DataFigures(
        read_seconds=read_seconds,
        slowest_read_seconds=max(seconds) * share,
        step_seconds=step_seconds,
        steps_left=steps_left,
        steps_per_epoch=division.steps_per_epoch,
        num_bytes=found.num_bytes,
        batch_bytes=batch_bytes,
        free_bytes=max(0, run.residency.free_bytes() - step_bytes),
        num_spare_cores=_spare_cores(run, read_seconds, step_seconds, steps_left),
        shm_bytes=hardware.memory.shm_total_bytes,
        is_in_memory=known is not None,
        why_not_resident=found.why_not,
    )


def _spare_cores(run: Session, read_seconds: float, step_seconds: float, steps_left: int | None) -> int:
    """Return the CPU cores that this rank can spare for loader processes.

    One stays for the training process; on a CPU most of them are for the model, unless reading takes most of the time.
    """
    if run.world.device.type != "cuda":
        cores = max(1, run.hardware.cpu.num_usable // run.world.size)
        busy = min(cores, torch.get_num_threads())
        return max(cores // 4, workers_worth(read_seconds, step_seconds, cores, busy, steps_left))
    return max(0, run.hardware.cpu.num_usable // min(run.world.size, len(run.hardware.gpus)) - 1)


def _read_some(loader: Loader) -> tuple[list[float], int]:
    """Return the seconds per sample of some micro-batches, spread over an epoch; and the bytes of one."""
    division = loader.division
    count = min(MOST_BATCHES, division.steps_per_epoch)
    began = time.perf_counter()
    seconds: list[float] = []
    num_bytes = 0
    for number in range(count):
        place = division.place(number * division.steps_per_epoch // count)
        start = time.perf_counter()
        micro = loader.micro_batch(place, 0)
        seconds.append((time.perf_counter() - start) / micro.num_samples)
        tensors = [leaf for leaf in leaves(micro.batch) if isinstance(leaf, Tensor)]
        num_bytes = max(num_bytes, sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        if time.perf_counter() - began > ENOUGH_SECONDS:
            break
    # The first one opens files and fills caches; where there are others, it does not count.
    return seconds[1:] if len(seconds) > 2 else seconds, num_bytes
