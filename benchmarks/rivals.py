"""How the competitors of a contest train: the same model, loss, data, optimizer and global batch, each in its own way.

Time is taken over windows of steps with the device awaited at both ends of each window, after a warm-up that is not
counted. The loops by hand have their data on the device from the start, shuffled there: as lean as it gets.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from benchmarks.contest import Competitor, Measured
from drivetrain import Job, Verdict, configure, train


@dataclass(frozen=True)
class Pace:
    """The number of steps that are run, and how many of them are timed."""

    warm_steps: int
    window_steps: int
    num_windows: int

    @property
    def num_steps(self) -> int:
        return self.warm_steps + self.window_steps * self.num_windows


WARMING = Pace(2, 1, 0)


@dataclass(frozen=True)
class Workload:
    """The work that is trained, the same for all."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    global_batch: int
    pace: Pace
    data: Callable[[], tuple[Tensor, ...]] = tuple  # columns in host memory
    dataset: Callable[[], Dataset[Any]] | None = None  # samples that have to be read, in place of columns
    learning_rate: float = 1e-4
    job_steps: int = 20_000  # how long the job says it is: what a plan may spend depends on it
    loader: Mapping[str, Any] = field(default_factory=dict)  # how a user would call DataLoader
    compiler: str = "inductor"  # a tiny size, to try all of it out on a CPU, takes a quick one
    # Makes a batch of a list of rows, of which each is a tuple of a row of every column, where batches differ in shape.
    collate: Callable[[list[tuple[Tensor, ...]]], list[Tensor]] | None = None

    def optimizer(self, parameters: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate, **options)

    def compiled_loss(self) -> Any:
        """Return the loss compiled with the model inside: a large vocabulary makes the loss alone worth compiling.

        Where batches differ in shape it is compiled once for all shapes.
        """
        return torch.compile(self.loss, backend=self.compiler, dynamic=True if self.collate else None)

    def paced(self, **changes: int) -> "Workload":
        return replace(self, pace=replace(self.pace, **changes))

    def warming(self) -> "Workload":
        return replace(self, pace=WARMING)


def the_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Stopwatch:
    """Takes the time at each step's end. It waits for the device at the ends of windows only."""

    def __init__(self, device: torch.device, pace: Pace) -> None:
        self._device, self._pace = device, pace
        self._steps = 0
        self.start()
        self._next = pace.warm_steps
        self.seconds: list[float] = []
        self.warm_seconds = 0.0

    def start(self) -> None:
        """Begin here: what came before is not counted."""
        self._began = self._mark = time.perf_counter()

    def step(self) -> bool:
        """Hear of a step's end; return whether it was the last."""
        self._steps += 1
        if self._steps < self._next:
            return False
        wait(self._device)
        now = time.perf_counter()
        if self._steps == self._pace.warm_steps:
            self.warm_seconds = now - self._began
        else:
            self.seconds.append((now - self._mark) / self._pace.window_steps)
        self._next += self._pace.window_steps
        self._mark = time.perf_counter()
        return self._steps >= self._pace.num_steps

    def measured(self, **facts: Any) -> Measured:
        usual = sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else 0.0
        setup = max(0.0, self.warm_seconds - self._pace.warm_steps * usual)
        if self._device.type == "cuda":
            facts["peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return Measured(self.seconds, {"setup_seconds": round(setup, 2), **facts})


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def autocast(device: torch.device, precision: str, *, cache: bool = True) -> AbstractContextManager[Any]:
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=cache)


def batches(num_samples: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """Yield indices, epoch after epoch, shuffled anew; the last of an epoch may be fewer."""
    while True:
        yield from torch.randperm(num_samples, device=device).split(size)


def by_hand(
    workload: Workload,
    *,
    micro_batch: int,
    precision: Literal["fp32", "bf16"] = "bf16",
    compiled: bool = False,
    channels_last: bool = False,
    cudnn_benchmark: bool = False,
    tf32: bool = True,
    device: torch.device | None = None,
) -> Measured:
    """Train by a loop with every flag: data on the device, fused AdamW, nothing read back, nothing logged."""
    device = device or the_device()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = cudnn_benchmark
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    steps = micro_batches(workload, micro_batch, device)
    model = workload.model().to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = workload.optimizer(model.parameters(), fused=True)
    loss_of = workload.compiled_loss() if compiled else workload.loss
    graphs = num_graphs()
    watch = Stopwatch(device, workload.pace)
    for step in steps:
        for batch, weight in step:
            with autocast(device, precision):
                loss = loss_of(model, batch)
            (loss * weight).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if watch.step():
            break
    facts: dict[str, Any] = {"micro_batch": micro_batch}
    if compiled:
        facts["graphs"] = num_graphs() - graphs
        if not facts["graphs"]:
            raise RuntimeError("nothing was compiled")
    return watch.measured(**facts)


def micro_batches(
    workload: Workload, micro_batch: int, device: torch.device
) -> Iterator[Iterator[tuple[list[Tensor], float]]]:
    """Yield the micro-batches of each step, each with its part of the step, from columns that are on the device.

    Batches that differ in shape come from loader workers instead, in one piece, by way of pinned memory.
    """
    if workload.collate is not None:
        loader = loader_of(workload, workload.data(), workload.global_batch, None)
        while True:
            for batch in loader:
                yield iter([([part.to(device, non_blocking=True) for part in batch], 1.0)])
    columns = [column.to(device) for column in workload.data()]
    for chosen in batches(len(columns[0]), workload.global_batch, device):
        parts = chosen.split(micro_batch)
        yield (([column[part] for column in columns], len(part) / len(chosen)) for part in parts)


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def captured(workload: Workload, *, precision: Literal["fp32", "bf16"] = "fp32", tf32: bool = True) -> Measured:
    """Train with the whole step in a CUDA graph: picking the samples, forward, backward, optimizer. One launch a step.

    An epoch's shorter last batch has a graph of its own. Without a GPU the same step runs as it is.
    """
    device = the_device()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    columns = [column.to(device) for column in workload.data()]
    num_samples, size = len(columns[0]), workload.global_batch
    model = workload.model().to(device)
    on_gpu = device.type == "cuda"
    optimizer = workload.optimizer(model.parameters(), fused=True, **{"capturable": True} if on_gpu else {})
    order = torch.randperm(num_samples, device=device)
    place = torch.zeros((), dtype=torch.int64, device=device)

    alive: list[Tensor] = []

    def step_of(size: int) -> Callable[[], None]:
        ahead = torch.arange(size, device=device)

        def step() -> None:
            chosen = order.index_select(0, place + ahead)
            with autocast(device, precision, cache=False):  # a cached cast would not be part of the graph
                loss = workload.loss(model, [column.index_select(0, chosen) for column in columns])
            loss.backward()
            optimizer.step()
            place.add_(size)

        alive.append(ahead)  # the graph reads it where it is, and does not hold it
        return _in_a_graph(step, optimizer, place) if on_gpu else _with_fresh_gradients(step, optimizer)

    whole = step_of(size)
    tail = step_of(num_samples % size) if num_samples % size else None
    watch = Stopwatch(device, workload.pace)
    while True:
        torch.randperm(num_samples, device=device, out=order)
        place.zero_()
        for _ in range(num_samples // size):
            whole()
            if watch.step():
                return watch.measured(micro_batch=size)
        if tail is not None:
            tail()
            if watch.step():
                return watch.measured(micro_batch=size)


def _in_a_graph(step: Callable[[], None], optimizer: torch.optim.Optimizer, place: Tensor) -> Callable[[], None]:
    """Record once, after a few runs on a side stream. Gradients are made inside: each replay writes them anew."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            place.zero_()
            optimizer.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    place.zero_()
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _with_fresh_gradients(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        step()

    return run


def by_lightning(
    workload: Workload,
    *,
    micro_batch: int,
    compiled: bool = False,
    channels_last: bool = False,
    fused: bool = False,
    tf32: bool = False,
    loader: Mapping[str, Any] | None = None,
    **flags: Any,
) -> Measured:
    """Train by Lightning. `flags` go to its Trainer; without any it is as it comes, but for checkpoints, which none
    writes here. Bar and logger, where they are on, write to a file and to a folder that is removed."""
    import lightning

    device = the_device()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    watch = Stopwatch(device, workload.pace)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            model = workload.model()
            if channels_last:
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.model = model
            self.loss_of = workload.compiled_loss() if compiled else workload.loss

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.loss_of(self.model, batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return workload.optimizer(self.parameters(), **{"fused": True} if fused else {})

    class Timer(lightning.Callback):  # type: ignore[misc]
        seen = 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            watch.start()

        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step > self.seen:
                self.seen = trainer.global_step
                watch.step()

    columns = workload.data()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=workload.pace.num_steps,
            accumulate_grad_batches=-(-workload.global_batch // micro_batch),
            devices=1,
            enable_checkpointing=False,
            default_root_dir=folder,
            callbacks=[Timer()],
            **flags,
        )
        source = loader_of(workload, columns, micro_batch, loader)
        trainer.fit(Module(), source)
    return watch.measured(micro_batch=micro_batch, loader_workers=source.num_workers)


def by_accelerate(workload: Workload, *, micro_batch: int, **flags: Any) -> Measured:
    """Train with Accelerate, as its guide has it. `flags` go to `Accelerator`; without any it is as it comes."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=-(-workload.global_batch // micro_batch), **flags)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    loader = loader_of(workload, workload.data(), micro_batch, None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch = Stopwatch(accelerator.device, workload.pace)
    while True:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = workload.loss(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and watch.step():
                return watch.measured(micro_batch=micro_batch, loader_workers=loader.num_workers)


QUIET: Mapping[str, bool] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def by_tuned_lightning(workload: Workload, *, micro_batch: int, **flags: Any) -> Measured:
    """Train by Lightning, with the flags of it, torch and AdamW that pay on a GPU whatever is trained."""
    return by_lightning(
        workload,
        micro_batch=micro_batch,
        compiled=True,
        fused=True,
        tf32=True,
        precision="bf16-mixed",
        **QUIET,
        **flags,
    )


def trainers_as_they_come(
    workload: Workload, *, micro_batch: int, cap_seconds: float, details: str = "", loading: str = ""
) -> tuple[Competitor, Competitor]:
    """Return Lightning and Accelerate with no flags; what else is known of them stands in `details` and `loading`."""
    words = f"as it comes: fp32, {details}AdamW"
    return (
        Competitor(
            "lightning-default",
            f"Lightning {words}; no checkpoints{loading}",
            lambda _: by_lightning(workload, micro_batch=micro_batch),
            cap_seconds=cap_seconds,
            needs=("lightning",),
        ),
        Competitor(
            "accelerate-default",
            f"Accelerate {words}{loading}",
            lambda _: by_accelerate(workload, micro_batch=micro_batch),
            cap_seconds=cap_seconds,
            needs=("accelerate",),
        ),
    )


def loader_of(
    workload: Workload, columns: tuple[Tensor, ...], micro_batch: int, options: Mapping[str, Any] | None
) -> DataLoader[Any]:
    options = workload.loader if options is None else options
    return DataLoader(TensorDataset(*columns), micro_batch, shuffle=True, collate_fn=workload.collate, **options)


class EndAfter:
    """Ends a job early: it says it is long, as real ones are, so that planning may spend what a real one would."""

    def __init__(self, num_steps: int) -> None:
        self.every = num_steps

    def __call__(self, context: Any) -> Verdict:
        return Verdict(stop=True)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def job_of(workload: Workload, *, max_steps: int, end_after: int | None = None) -> Job:
    return Job(
        name="contest",
        model=workload.model,
        data=TensorDataset(*workload.data()) if workload.dataset is None else workload.dataset(),
        loss=workload.loss,
        collate=workload.collate or default_collate,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=workload.learning_rate),
        global_batch=workload.global_batch,
        max_steps=max_steps,
        checkpoint_every=max_steps,  # one at the end: the others write none
        hooks=[] if end_after is None else [EndAfter(end_after)],
    )


def ours(workload: Workload, *, device: str = "auto", **settings: Any) -> Measured:
    """Train by `dt.train(job)` with no flag but where its files go. All that is watched by default is watched."""
    pace = workload.pace
    with tempfile.TemporaryDirectory() as folder:
        # One more than is timed: the last of a run waits until the device has done those that were launched ahead.
        job = job_of(workload, max_steps=workload.job_steps, end_after=pace.num_steps + 1)
        began = time.time()
        result = train(job, configure(output_dir=folder, device=device, **settings))
        whole = time.time() - began
        steps = step_seconds(result.folder)
        facts = {"whole_seconds": round(whole, 2), **plan_facts(result.folder, began)}
    timed = steps[pace.warm_steps : pace.num_steps]
    windows = [
        sum(timed[start : start + pace.window_steps]) / pace.window_steps
        for start in range(0, len(timed) - pace.window_steps + 1, pace.window_steps)
    ]
    usual = sorted(windows)[len(windows) // 2]
    first = sum(steps[: pace.warm_steps]) - pace.warm_steps * usual
    facts["first_steps_extra_seconds"] = round(max(0.0, first), 2)
    if "seconds_until_start" in facts:
        facts["seconds_until_trained"] = round(facts["seconds_until_start"] + steps[0], 2)
    return Measured(windows, facts)


def with_no_flags(workload: Workload, *, cap_seconds: float, device: str = "auto") -> Competitor:
    return Competitor(
        "ours",
        "dt.train(job) with no flags, everything watched that is watched by default",
        lambda _: ours(workload, device=device),
        cap_seconds=cap_seconds,
        alone=True,
    )


# What a run folder says. The only place that knows how plans and events are written.


def rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def step_seconds(folder: Path) -> list[float]:
    """Return the seconds of every step, as the run wrote them: from its start to the next one's, so they add up."""
    return [float(row["seconds"]) for row in rows(folder / "steps.jsonl")]


def plan_facts(folder: Path, began: float) -> dict[str, Any]:
    """Return facts of a run that was called at `began`: its plan, what that took, memory as forecast and needed."""
    events = rows(folder / "events.jsonl")
    plan = yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8"))
    facts: dict[str, Any] = {"plan": plan}
    started = next((event for event in events if event["event"] == "start"), None)
    if started is not None:
        moment = datetime.fromisoformat(started["time"]).timestamp()
        facts["seconds_until_start"] = round(moment - began, 2)
    tried, forecast = plan.get("tried", []), plan.get("forecast", {})
    facts["from_cache"] = any("earlier start" in note for note in plan.get("notes", []))
    facts["planning_seconds"] = plan.get("planning_seconds", 0.0)
    # What compiling took is known of each way that was compiled; ways that an earlier start tried took nothing now.
    compiling = 0.0 if facts["from_cache"] else sum(way.get("setup_seconds", 0.0) for way in tried)
    facts["compile_seconds"] = round(compiling, 2)
    facts["planning_without_compiling_seconds"] = round(max(0.0, facts["planning_seconds"] - compiling), 2)
    facts["out_of_memory_probes"] = sum(bool(way.get("out_of_memory")) for way in tried)
    peaks = [event["peak_allocated_bytes"] for event in events if event["event"] == "memory"]
    if peaks:
        facts["peak_bytes"] = max(peaks)
    expected = forecast.get("run_peak_bytes")
    if expected and peaks:
        facts["forecast_run_error_percent"] = round(100 * abs(expected / max(peaks) - 1), 2)
    foreseen, verified = forecast.get("peak_bytes"), forecast.get("measured_peak_bytes")
    if foreseen and verified:
        facts["forecast_peak_bytes"], facts["verified_peak_bytes"] = foreseen, verified
        facts["forecast_error_percent"] = round(100 * abs(foreseen / verified - 1), 2)
    return facts
