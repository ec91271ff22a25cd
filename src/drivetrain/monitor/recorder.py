"""The recorder of the main process: writes a run's files, its trackers, and the terminal."""

import math
import queue
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import torch
import yaml

from drivetrain.config import Config
from drivetrain.core.aims import BatchSizes
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.goodput import stamp, start_marks
from drivetrain.core.log import LOGGER, redacted
from drivetrain.core.metrics import Media, StepRecord
from drivetrain.core.run_folder import JsonLines, RunFolder, as_row, read_rows, read_yaml, yaml_text
from drivetrain.core.value import format_count
from drivetrain.hardware import Gpu, Hardware
from drivetrain.hardware.gpu_drivers import label, load_nvml
from drivetrain.monitor.console import RunConsole
from drivetrain.monitor.doctor import Checkups, Diagnosis, Observed
from drivetrain.monitor.phases import DATA, LOGGING, Laps, NoClock, PhaseClock, StepProfiler, peak_rate
from drivetrain.monitor.sampler import Sampler
from drivetrain.monitor.tracking import BackgroundTracker, TrackerStart, keep_media, start_trackers
from drivetrain.plan.plan import with_earlier_reasons


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run, as it is written to plan.yaml and shown at the start."""

    world_size: int
    num_devices: int
    micro_batch: int
    accumulation: int
    global_batch: int
    strategy: str
    precision: str
    precision_reason: str
    device: str
    num_workers: int
    data_path: str = "in the training process"
    items: str = "items"  # what the loss is over where that is not samples
    way: str = ""  # of running a step, in words
    batch_over_steps: str = ""  # in words, where the global batch changes; `global_batch` is the largest then

    @property
    def batch_in_words(self) -> str:
        """The batch as `8 × 2 accumulated × 4 devices = 64`, with `holds` for `=` where it does not divide."""
        devices = f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"
        product = self.micro_batch * self.accumulation * self.world_size
        sign = "=" if product == self.global_batch else "holds"
        each = -(-self.micro_batch * self.world_size // self.num_devices)  # the devices of a process share its part
        words = f"{each} × {self.accumulation} accumulated × {devices} {sign} {self.global_batch}"
        return f"{words}, the largest" if self.batch_over_steps else words

    def divided(self, micro_batch: int) -> "RunPlan":
        """Return the same plan with steps divided into other micro-batches."""
        accumulation = math.ceil(math.ceil(self.global_batch / self.world_size) / micro_batch)
        return replace(self, micro_batch=micro_batch, accumulation=accumulation)


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that the recorder needs."""

    name: str
    path: Path
    num_steps: int | None  # None: until the data ends
    steps_per_epoch: int | None  # None: not known, or not the same in each
    resumed_from: int
    device: torch.device
    plan: RunPlan
    batch_sizes: BatchSizes = ()  # where the global batch changes
    gpu: Gpu | None = None  # of the main process
    gpus: tuple[Gpu, ...] = ()  # that the run uses on this machine
    flops_per_sample: float | None = None  # forward and backward; None: not counted
    planned: Mapping[str, Any] = field(default_factory=dict)  # the plan with its reasons, as it is written
    num_cores: int = 1  # of this machine, for each of the run's processes on it
    may_add_workers: bool = True  # false: the data can only be read in one pass
    is_resident: bool = False  # whether the data set is held on the device
    pins_memory: bool = False
    compiled: bool = False
    captured: bool = False
    settled: Mapping[str, str] = field(default_factory=dict)  # why the plan leaves a remedy, by its setting
    first_set: str = ""  # the name of the first validation set; empty for a single one, which has none
    joined_at: float = 0.0  # when the ranks had met, on the monotonic clock


def _write_plan(folder: RunFolder, plan: RunPlan, planned: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    told = with_earlier_reasons({**asdict(plan), **planned}, before)
    folder.write("plan.yaml", yaml_text(told, width=120, explicit_end=True))


def _earlier_plan(folder: RunFolder) -> dict[str, Any]:
    """Return the plan of the start before; empty where there was none, or it cannot be read."""
    try:
        found = read_yaml(folder.path / "plan.yaml")
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _plan_in_words(way: str, planned: Mapping[str, Any]) -> str:
    """Return the plan in one line; all of it is in plan.yaml."""
    if not planned:
        return ""
    tried = [row for row in planned["tried"] if "problem" not in row and not row.get("is_brief")]
    if not tried:
        return "; ".join([way, *planned["notes"][:1]])
    seconds = planned["planning_seconds"]
    return f"{way}; the fastest of {len(tried)} ways measured in {seconds:.1f} s (plan.yaml says why)"


def _console_of(facts: RunFacts, line_every: int | None, *, quiet: bool) -> RunConsole:
    return RunConsole(
        facts.num_steps,
        facts.steps_per_epoch,
        facts.resumed_from,
        quiet=quiet,
        line_every=line_every,
        batch_sizes=facts.batch_sizes,
    )


def _tag(name: str) -> str:
    """Return the tag of a figure in trackers, which show what is before the slash as a group."""
    if "/" in name:
        return name
    for kind in ("valid", "test"):
        if name.startswith(f"{kind}_"):
            return f"{kind}/{name.removeprefix(f'{kind}_')}"
    return f"speed/{name}" if name in ("samples_per_second", "items_per_second", "mfu") else f"train/{name}"


def _logged_means(window: Sequence[StepRecord]) -> dict[str, float]:
    """Return the mean of each logged value over the steps that had one."""
    found: dict[str, list[float]] = {}
    for record in window:
        for name, value in (record.logged or {}).items():
            if not math.isnan(value):
                found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _part_losses(window: Sequence[StepRecord]) -> dict[str, float]:
    """Return each loss part's mean over some steps, by its own count, except for parts without an item in them."""
    sums = dict[str, list[float]]()
    for record in window:
        for name, part in (record.parts or {}).items():
            if part.num_items:
                total = sums.setdefault(f"loss_{name}", [0.0, 0.0])
                total[0] += part.loss * part.num_items
                total[1] += part.num_items
    return {name: total / count for name, (total, count) in sums.items()}


class _LoopTime:
    """Accounts for the time of the loop since this start; see `core/goodput.py`.

    Laps leave no gap: what is neither data, validation, a checkpoint nor records is the work of steps and their hooks.
    Compilation is in the first step: what that took more than those behind it belongs to the start.
    """

    NUM_FIRST = 9
    IS_COMPILED = 2.0  # a first step that took this many times as long as others

    def __init__(self, resumed_from: int) -> None:
        self.step, self.noted_at = resumed_from, time.monotonic()
        self.spent = {"eval": 0.0, "ckpt_block": 0.0, "data_wait": 0.0, "other": 0.0}
        self._began = self.noted_at
        self._first: list[float] = []
        self._within_first = 0.0  # of the first step's seconds: already in another bucket

    def spend(self, bucket: str, seconds: float) -> None:
        self.spent[bucket] += seconds
        if not self._first:
            self._within_first += seconds

    def saw(self, record: StepRecord) -> None:
        self.step = record.step
        if len(self._first) < self.NUM_FIRST:
            self._first.append(record.seconds - (0.0 if self._first else self._within_first))

    def saw_laps(self, laps: Laps) -> None:
        self.spent["data_wait"] += laps.seconds[DATA]
        self.spent["other"] += laps.seconds[LOGGING]

    def as_spent(self, started_at: float | None) -> dict[str, float]:
        """Return the seconds by bucket; `started_at` is when the first step was begun."""
        began = started_at or (self._began if self._first else self.noted_at)  # a loop of the user's does not say
        init = max(0.0, began - self._began)
        if len(self._first) > 1:
            usual = statistics.median(self._first[1:])
            init += self._first[0] - usual if self._first[0] > self.IS_COMPILED * usual else 0.0
        rest = self.noted_at - self._began - init - sum(self.spent.values())
        return {**self.spent, "init": init, "step": max(0.0, rest)}


def _last_written(path: Path) -> dict[str, float]:
    """Return when the start before this one last wrote down a step, and which. A kill leaves no other record."""
    try:
        found = path.stat()
        with path.open("rb") as file:
            file.seek(max(0, found.st_size - 4096))
            rows = [row for line in file.read().split(b"\n") if (row := as_row(line)) is not None]
    except OSError:
        return {}
    steps = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    return {"last_write": found.st_mtime, "last_step": steps[-1]} if steps else {}


def _cut_after(folder: RunFolder, step: int, logs: Mapping[str, JsonLines], last_step: float) -> Iterator[str]:
    """Drop the rows of steps that are done again, and yield what is to be told of that."""
    for name in ("steps", "metrics", "speed"):
        with folder.writing():
            num_damaged = logs[name].keep_up_to(step)
        if num_damaged:
            yield f"{num_damaged} damaged lines of {name}.jsonl are left out"
    if last_step and not step:
        yield f"{last_step:,.0f} steps were recorded here, and there is no checkpoint: training begins anew with step 1"


class NoRunRecorder:
    """The recorder of ranks other than the main one: writes nothing."""

    before_step: Callable[[int], None] | None = None  # wants to be called before each step, with its number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def write(self, record: StepRecord) -> None:
        pass

    def metrics(self, step: int, epoch: int, values: Mapping[str, float], seconds: float, best: str = "") -> None:
        pass

    def test(self, step: int, epoch: int, values: Mapping[str, float], seconds: float, of_step: int) -> None:
        pass

    def logged(self, step: int, epoch: int, values: Mapping[str, float], media: Mapping[str, Media]) -> None:
        pass

    def spend(self, bucket: str, seconds: float) -> None:
        """Account for time of the loop that no step took: `eval`, `ckpt_block`."""

    def flush(self) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def measuring(self, what: str, of: str, share: float) -> None:
        """Show how much of a set was measured, by its name, which may be empty; `what` is such as `validating`."""

    def event(self, kind: str, **facts: Any) -> None:
        pass

    def finish(self, finished: bool, steps: int, because: str = "", **facts: Any) -> None:
        pass

    def last_words(self, finished: bool, steps: int, because: str = "") -> None:
        pass

    def replan(self, planned: Mapping[str, Any], micro_batch: int, way: str) -> None:
        pass


def _step_figures(record: StepRecord, phases: Mapping[str, float]) -> dict[str, float]:
    figures = {"lr": record.lr, "epoch": float(record.epoch)}
    if record.grad_norm is not None:
        figures["grad_norm"] = record.grad_norm
    return figures | {f"phase_ms/{name}": 1e3 * value for name, value in phases.items()}


def _device_figures(sampler: Sampler | None) -> dict[str, float]:
    return {
        f"{device}/{name}": float(value)
        for device, row in (sampler.latest if sampler is not None else {}).items()
        for name, value in row.items()
        if isinstance(value, (int, float))
    }


def _known(facts: RunFacts, peak_flops: float | None, peak_origin: str, *, saves_beside: bool) -> Observed:
    """Return what the doctor is told of the run before it begins."""
    plan = facts.plan
    return Observed(
        steps=0,
        phases={},
        device=facts.device.type,
        precision=plan.precision,
        world_size=plan.world_size,
        num_workers=plan.num_workers,
        num_cores=facts.num_cores,
        may_add_workers=facts.may_add_workers,
        is_resident=facts.is_resident,
        pins_memory=facts.pins_memory,
        accumulation=plan.accumulation,
        micro_batch=plan.micro_batch,
        compiled=facts.compiled,
        captured=facts.captured,
        settled=facts.settled,
        peak_flops=peak_flops,
        peak_origin=peak_origin,
        saves_beside=saves_beside,
    )


class RunRecorder(NoRunRecorder):
    """The recorder of one run, on its main process. A failing write is reported once; the run goes on."""

    DEFAULT_LOG_EVERY = 10
    TIME_SECONDS = 60.0  # at most between two accounts of the time, while steps are done
    LEAST_SECONDS = 0.5  # between points if the number of steps is not given: short steps need no hundred a second

    def __init__(
        self,
        folder: RunFolder,
        facts: RunFacts,
        config: Config,
        hardware: Hardware,
        clock: PhaseClock | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self._folder, self._facts, self._config, self._hardware = folder, facts, config, hardware
        self._clock, self._plan_before = clock or NoClock(), _earlier_plan(folder) if facts.resumed_from else {}
        # Messages of threads are written by this one: neither the console nor a log is theirs.
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._broken: set[str] = set()
        every = config.watch.log_every
        self._log_every = self.DEFAULT_LOG_EVERY if every is None else every
        self._least_seconds = self.LEAST_SECONDS if every is None else 0.0
        self._console = _console_of(facts, every or None, quiet=quiet)
        written = _last_written(folder.path / "steps.jsonl")
        self._logs = {name: folder.log(f"{name}.jsonl") for name in ("steps", "metrics", "speed", "events")}
        for words in _cut_after(folder, facts.resumed_from, self._logs, written.get("last_step", 0)):
            self._messages.put(words)
        self._steps = self._logs["steps"]
        if facts.resumed_from and not quiet:
            self._console.take_up(read_rows(folder.path / "steps.jsonl")[0])
        folder.write("hardware.json", hardware.to_json())
        folder.write("config.yaml", yaml_text(redacted(config.model_dump(mode="json"))))
        _write_plan(folder, facts.plan, facts.planned, self._plan_before)
        self._time = _LoopTime(facts.resumed_from)
        began = {**asdict(facts.plan), **stamp(), "since": start_marks.take(facts.joined_at), **written}
        self.event("resume" if facts.resumed_from else "start", step=facts.resumed_from, **began)
        self._peak_flops, origin = self._say_flops()
        self._checkups = Checkups(_known(facts, self._peak_flops, origin, saves_beside=config.checkpoint.async_save))
        self._last: StepRecord | None = None
        self._laps: Laps | None = None  # since the last row of speed.jsonl, as far as they were read
        self._window: list[StepRecord] = []  # since the last row of speed.jsonl
        self._window_began = time.monotonic()
        self._trackers: list[BackgroundTracker] = []
        self._sampler: Sampler | None = None
        self._profiler: StepProfiler | None = None

    def replan(self, planned: Mapping[str, Any], micro_batch: int, way: str) -> None:
        """Write the plan again: micro-batches are smaller since memory ran out, or compiled code is ready."""
        try:
            divided = self._facts.plan.divided(micro_batch)
            _write_plan(self._folder, replace(divided, way=way), planned, self._plan_before)
        except DrivetrainError as error:  # the run goes on: plan.yaml has the plan that it began with
            self.say(f"plan.yaml is not up to date: {error.message}")

    def __enter__(self) -> Self:
        facts, plan = self._facts, self._facts.plan
        verb, many = "training", "in steps"
        if facts.resumed_from:
            verb = f"going on from step {facts.resumed_from}{'' if facts.num_steps is None else ' of'}"
        if facts.num_steps is not None:
            many = format_count(facts.num_steps, "step")
        samples = plan.batch_over_steps or format_count(plan.global_batch, "sample")
        self._console.say(f": {verb} {many} of {samples}", bold=facts.name)
        name = facts.gpu.name if facts.gpu is not None else ""
        for heading, words in (
            ("processes", f"{plan.world_size} ({plan.strategy})"),
            ("device", f"{plan.device}{f' ({name})' if name else ''}"),
            ("precision", f"{plan.precision}: {plan.precision_reason}"),
            ("batch", plan.batch_in_words),
            ("plan", _plan_in_words(plan.way, facts.planned)),
            ("loader", plan.data_path),
            ("folder", str(facts.path)),
        ):
            if words:
                self.say(f"  {heading:<10} {words}")
        self._start_watching()
        self._console.__enter__()
        return self

    def _start_watching(self) -> None:
        facts, config, report = self._facts, self._config, self._messages.put
        if config.watch.trackers:
            values = {**redacted(config.model_dump(mode="json")), "plan": asdict(facts.plan)}
            start = TrackerStart(facts.path, facts.name, values, facts.resumed_from, report)
            self._trackers = start_trackers(config.watch.trackers, start)
        if config.watch.monitor_gpu and config.watch.gpu_log_interval != 0:
            log = self._folder.log("gpu.jsonl", up_to=facts.resumed_from)
            every = config.watch.gpu_log_interval
            nvml = load_nvml() if facts.gpus else None
            own = None if facts.gpu is None else (facts.gpu, facts.device)
            self._sampler = Sampler(log, facts.gpus, own, every, facts.resumed_from, report, nvml)
            if self._sampler.missing:
                self._messages.put(f"GPU figures are incomplete: {self._sampler.missing}")
        if config.watch.profile is not None:
            self._profiler = StepProfiler.of_window(
                config.watch.profile, facts.path, facts.device, facts.resumed_from, facts.num_steps, report
            )
            if self._profiler is not None:
                self.before_step = self._profiler.before_step
        self._pass_messages_on()

    def __exit__(self, *error: Any) -> None:
        """Close all outputs. This never hides the error that ended the run, and never raises another one."""
        for part in (self._profiler, self._sampler, *self._trackers):
            if part is not None:
                part.close()
        self._console.__exit__(*error)
        self._pass_messages_on()
        if error[1] is not None:
            self._note_time()
            self.event("stopped by an error", error=f"{type(error[1]).__name__}: {error[1]}", **stamp())
        start_marks.run_over()
        for name, log in self._logs.items():
            self._guarded(name, log.close)

    def write(self, record: StepRecord) -> None:
        if "steps" in self._broken:
            self._steps.hold(record)
        else:
            try:
                self._steps.append(record)
            except OSError as error:
                self._break("steps", error)
        self._time.saw(record)
        self._console.show(record)
        step = record.step
        if self._sampler is not None:
            self._sampler.at_step(step)
        if not self._log_every:
            return
        self._last = record
        self._window.append(record)
        if step % self._log_every == 0 and time.monotonic() - self._window_began >= self._least_seconds:
            self._write_speed(record)

    def _write_speed(self, record: StepRecord, *, is_over: bool = False) -> None:
        """Write one row for the steps since the last row, and the same to the trackers."""
        if time.monotonic() - self._time.noted_at > self.TIME_SECONDS:
            self._note_time()
        self._take_laps()
        window, laps, self._laps = self._window, self._laps, None
        assert laps is not None
        phases, seconds = laps.per_step(), sum(found.seconds for found in window)
        row = {"step": record.step, "epoch": record.epoch, "steps": len(window), "seconds": seconds}
        figures = self._rates(window, seconds)
        self._append("speed", {**row, **figures, "phase_steps": laps.steps, "phases": phases})
        if self._trackers and window:
            self._track({**figures, **_step_figures(record, phases), **_device_figures(self._sampler)}, record.step)
        self._window, self._window_began = [], time.monotonic()
        self._see_doctor(laps, figures.get("mfu"), is_over=is_over)
        self._pass_messages_on()

    def _see_doctor(self, laps: Laps, mfu: float | None, *, is_over: bool = False) -> None:
        checkups, gpu = self._checkups, self._facts.gpu
        # What is read after the last step is of the last save: a card that is idle then did not wait for anybody.
        if self._sampler is not None and gpu is not None and not is_over:
            checkups.saw_card(self._sampler.latest.get(label(gpu)))
        checkups.saw_steps(laps, mfu)
        found, is_news = checkups.look()
        if found is not None:
            self._console.warn(found.warning)
            if is_news:
                self._tell_verdict(found)

    def _tell_verdict(self, found: Diagnosis, *, is_final: bool = False) -> None:
        step = self._last.step if self._last is not None else self._facts.resumed_from
        findings = [finding.as_dict() for finding in found.findings]
        self.event("verdict", step=step, final=is_final, steps=found.steps, findings=findings)

    def _rates(self, window: Sequence[StepRecord], seconds: float) -> dict[str, float]:
        """Return mean loss and throughput of some steps; checkpoints, validation and hooks are not in their time."""
        if not seconds:
            return {}
        samples, items = sum(record.samples for record in window), sum(record.num_items for record in window)
        loss = sum(record.loss * record.num_items for record in window if record.num_items) / (items or 1.0)
        rates = {"loss": loss, "samples_per_second": samples / seconds}
        if window[-1].parts is not None:
            rates |= _part_losses(window)
        if window[-1].logged is not None:
            rates |= _logged_means(window)
        if items != samples:
            rates["items_per_second"] = items / seconds
        if self._peak_flops and self._facts.flops_per_sample:
            rates["mfu"] = self._facts.flops_per_sample * samples / seconds / self._peak_flops
        return rates

    def _track(self, figures: Mapping[str, float], step: int) -> None:
        tagged = {_tag(name): value for name, value in figures.items()} if self._trackers else {}
        for tracker in self._trackers:
            tracker.log(tagged, step)

    def metrics(self, step: int, epoch: int, values: Mapping[str, float], seconds: float, best: str = "") -> None:
        """Record a validation after `step` steps, in `epoch` (from 0). `best` is the best value so far, in words."""
        self._checkups.saw_validation()
        self.spend("eval", seconds)
        self._append("metrics", {"step": step, "epoch": epoch, **values, "seconds": seconds})
        self._track(values, step)
        # Of several sets, the first has its values twice: under its own name, and without one.
        own = f"valid_{self._facts.first_set}" if self._facts.first_set else None
        again = {name for name in values if own is not None and f"{own}{name.removeprefix('valid')}" in values}
        self._console.validated({name: value for name, value in values.items() if name not in again}, best)

    def test(self, step: int, epoch: int, values: Mapping[str, float], seconds: float, of_step: int) -> None:
        """Record the test after the last step, with the weights of the step `of_step`."""
        self._console.end_steps()
        self.spend("eval", seconds)
        row = {"step": step, "epoch": epoch, **values, "seconds": seconds, "weights_of_step": of_step}
        self._append("metrics", row)
        self._track(values, step)
        shown = "   ".join(f"{name.removeprefix('test_').replace('_', ' ')} {it:.6g}" for name, it in values.items())
        self.say(f"  test       {shown}, with the weights of step {of_step}")

    def logged(self, step: int, epoch: int, values: Mapping[str, float], media: Mapping[str, Media]) -> None:
        """Record what a hook, or a loop of the user's, logged after `step` steps."""
        if values:
            self._append("metrics", {"step": step, "epoch": epoch, **values})
            self._track(values, step)
        for name, value in media.items():
            try:
                keep_media(self._folder.path, name, value, step)
            except OSError as error:
                self._messages.put(f"{name!r} of step {step} cannot be written: {error.strerror or error}")
            for tracker in self._trackers:
                tracker.log_media(_tag(name), value, step)

    def spend(self, bucket: str, seconds: float) -> None:
        self._time.spend(bucket, seconds)

    def _take_laps(self) -> None:
        """Read the clock, for the account of the time and for the next row of speed.jsonl."""
        laps, before = self._clock.take(), self._laps
        self._time.saw_laps(laps)
        self._laps = laps if before is None else before.and_then(laps)

    def _note_time(self) -> None:
        self._take_laps()
        self._time.noted_at = time.monotonic()
        self.event("time", step=self._time.step, spent=self._time.as_spent(self._clock.started_at), **stamp())

    def flush(self) -> None:
        """Write buffered rows before a checkpoint, which counts on them. A disk that was full may have room again."""
        self._note_time()  # what was spent on steps that the checkpoint holds is known from now on
        for name, log in self._logs.items():
            if self._guarded(name, log.flush):
                self._broken.discard(name)

    def say(self, text: str) -> None:
        self._console.say(text)

    def measuring(self, what: str, of: str, share: float) -> None:
        self._console.measuring(f"{what} {of}".strip(), share)

    def event(self, kind: str, **facts: Any) -> None:
        if kind in ("checkpoint", "save failed"):
            self._checkups.saw_save(facts.get("seconds", 0.0), facts.get("waited_seconds", 0.0))
        LOGGER.debug("event %s: %s", kind, facts)
        self._append("events", {"event": kind, "time": datetime.now(UTC).isoformat()} | facts)
        if "events" not in self._broken:
            self._guarded("events", self._logs["events"].flush)

    def finish(self, finished: bool, steps: int, because: str = "", **facts: Any) -> None:
        """Record the end of the loop. `facts` go to its event."""
        self._console.end_steps()
        self._clock.finish()
        if self._last is not None:
            self._write_speed(self._last, is_over=True)
        self._conclude()
        self._note_time()
        why = {"because": because} if because else {}
        self.event("finish" if finished else "stop", step=steps, **why, **facts, **stamp())
        if finished:
            self._folder.finish({"steps": steps})
            if self._trackers:
                self._guarded("metrics", self._logs["metrics"].flush)
                results = self._results()
                for tracker in self._trackers:
                    tracker.finish(results)

    def last_words(self, finished: bool, steps: int, because: str = "") -> None:
        """Say why the run ended before its end, below everything else; nothing of a run that did all of its steps."""
        if because:
            self.say(f"stopped at step {steps}: {because}")
        elif not finished:
            of = "" if self._facts.num_steps is None else f" of {self._facts.num_steps}"
            self.say(f"stopped at step {steps}{of}; the same command goes on from there")

    def _results(self) -> dict[str, float]:
        """Return the last value of each metric, and after how many steps it was measured, under their tags."""
        last = {name: value for row in read_rows(self._folder.path / "metrics.jsonl")[0] for name, value in row.items()}
        found = {name: value for name, value in last.items() if name not in ("epoch", "seconds")}
        return {_tag(name): float(value) for name, value in found.items() if isinstance(value, (int, float))}

    def _conclude(self) -> None:
        """Record the verdict on the whole run: all of it in the records, its leading finding on the terminal."""
        found = self._checkups.final()
        if found is None:
            return
        self._tell_verdict(found, is_final=True)
        leading = found.leading
        self.say(f"  verdict    {leading}")
        if leading.next_step:
            self.say(f"  next       {leading.next_step}")

    def _say_flops(self) -> tuple[float | None, str]:
        """Record the counted FLOPs. Returns the peak of all devices together, in FLOP/s, and its origin."""
        facts = self._facts
        if not facts.flops_per_sample:
            return None, ""
        rate = peak_rate(self._hardware, facts.device, facts.plan.precision)
        peak = None if rate is None else rate.value * 1e12 * facts.plan.num_devices
        self.event(
            "flops",
            flops_per_sample=facts.flops_per_sample,
            peak_flops_per_second=peak,
            peak_origin=None if rate is None else rate.origin,
            peak_source=None if rate is None else rate.source,
        )
        return peak, "" if rate is None else rate.origin

    # ---- a disk that is full does not end a run: what cannot be written waits, and is tried again with checkpoints

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if name in self._broken:
            self._logs[name].hold(row)
        else:
            self._guarded(name, lambda: self._logs[name].append(row))

    def _guarded(self, name: str, action: Any) -> bool:
        try:
            action()
        except OSError as error:
            self._break(name, error)
            return False
        return True

    def _break(self, name: str, error: OSError) -> None:
        if name not in self._broken:
            self._broken.add(name)
            self.say(
                f"{name}.jsonl cannot be written ({error.strerror or error}); training goes on, and it is tried again "
                "at each checkpoint"
            )

    def _pass_messages_on(self) -> None:
        while not self._messages.empty():
            text = self._messages.get()
            self.say(text)
            self.event("note", text=text)
