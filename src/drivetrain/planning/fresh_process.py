"""Runs the first steps of a job in a fresh process: to see whether they repeat, and to compile in the background.

The first steps of a job are run as `train` would, on a copy of its model, and the bits of what came out are kept. A
fresh process gets the job as a restart would: it runs the target again (the recipe, the function, or the script up to
its first `dt.train`).

Whether steps repeat bit by bit is tried twice in this process, and in a fresh one with its own empty compile caches,
since kernels are chosen by timing when they are compiled.

To compile in the background, the fresh process fills the compiler's caches while the run trains eagerly, and the run
then finds there what it needs. Timing decides at which step that is, and compiled steps round otherwise than eager
ones: so the number of that step is on disk before it is run, and a run that is resumed goes over at the same one.
"""

import gc
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.isolation import copied, untouched
from drivetrain.core.launchers import CHANNEL, without_launcher
from drivetrain.core.log import notice
from drivetrain.core.metrics import StepRecord
from drivetrain.core.precision import as_real
from drivetrain.core.run_folder import write_switch
from drivetrain.core.value import format_duration
from drivetrain.core.world import World, synchronize
from drivetrain.data.division import Division
from drivetrain.loop.read_back import Reading
from drivetrain.monitor.recorder import NoRunRecorder, RunRecorder
from drivetrain.plan.knobs import StepWay
from drivetrain.plan.tune import Bits, RepeatTrial
from drivetrain.run.assemble import assemble, make_loader, make_stepper, trial_of
from drivetrain.run.model_factory import prepare_model
from drivetrain.run.session import Session, module_of_run, target_to_rerun
from drivetrain.strategies import SingleStrategy
from drivetrain.strategies.loss_parts import LossParts

NUM_STEPS, NUM_STEPS_CAPTURED = 4, 7  # a step is recorded after three, and replayed from there on
ROUNDS, ROUND_SECONDS, MOST_STEPS = 7, 0.15, 50
FEWER_ROUNDS, FEWER_SECONDS = 2, 2.5  # where a step takes longer than a round: at least so many, for so long
_CHUNK = 1 << 22
_ODD = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
CHILD = "drivetrain.commands.in_process"
LONGEST_SECONDS = 600.0  # that a process may take for one answer
CONTEXT_BYTES = 1 << 30  # that a process holds on a GPU besides its tensors
NICENESS = 5  # of the process that compiles: training goes first
SETTLING_STEPS, TIMED_STEPS = 3, 20  # after the switch: left out, and compared with as many before
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class FirstSteps:
    """Runs the first steps of a run, way by way, in one process on one device. The run itself is not changed."""

    def __init__(self, run: Session, built: nn.Module) -> None:
        self._run, self._built = run, built
        self._ready: dict[StepWay, Callable[[], object]] = {}  # runs one more step, for its time

    def bits(self, way: StepWay, *, twice: bool = True) -> Bits:
        """Run the first steps of a way and return their results. With `twice`, run them again, already compiled."""
        for _ in range(2):
            try:
                run = self._run.trying(way)
                with run.numerics(), run.stream():
                    found = self._once(run)
                    again = self._once(run) if twice else found
                return found.model_copy(update={"repeats_here": found == again})
            except torch.OutOfMemoryError:
                pass
            except Exception as error:  # noqa: BLE001  (a way that fails is one that is not used, whatever the reason)
                lines = str(error.message if isinstance(error, DrivetrainError) else error).strip().splitlines()
                return Bits(problem=f"{type(error).__name__}: {lines[0][:200] if lines else ''}")
            self.release()  # what other ways have left: a CUDA graph holds all its activations
        return Bits(problem="out of memory")

    def seconds(self, ways: Iterable[StepWay]) -> list[float]:
        """Return how long a step of each way takes, measured in turns, so that noise of the machine affects all."""
        ways, device = list(ways), self._run.world.device
        for way in ways:
            if way not in self._ready:
                self.bits(way, twice=False)
        times: dict[StepWay, list[float]] = {way: [] for way in ways}
        counts: dict[StepWay, int] = {}
        deadline = time.perf_counter() + FEWER_SECONDS
        for number in range(ROUNDS + 1):
            if number > FEWER_ROUNDS and max(counts.values()) == 1 and time.perf_counter() > deadline:
                break
            for way in ways:
                run = self._run.trying(way)
                with run.numerics(), run.stream():
                    step = self._ready[way]
                    if counts.get(way) != 1:  # a step that is long does not notice what the other way left behind
                        step()
                    synchronize(device)
                    began = time.perf_counter()
                    for _ in range(counts.get(way, 1)):
                        step()
                    synchronize(device)
                    seconds = (time.perf_counter() - began) / counts.get(way, 1)
                if way in counts:
                    times[way].append(seconds)
                else:
                    counts[way] = max(1, min(MOST_STEPS, int(ROUND_SECONDS / max(seconds, 1e-6))))
        return [statistics.median(times[way]) for way in ways]

    def release(self) -> None:
        """Free the memory of what was tried."""
        self._ready = {}
        gc.collect()
        if self._run.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _once(self, run: Session) -> Bits:
        way, job, world = run.way, run.job, World(device=run.world.device)
        self._ready.pop(way, None)
        division = Division(job.num_samples or 1, job.largest_batch or 1, way.micro_batch, 1)
        loader = make_loader(run, division, job.source, shuffle=job.shuffle)
        first = loader.first(job.max_steps, job.epochs)
        parts = assemble(
            run,
            prepare_model(run, copied(self._built)),
            trial_of(run, first.batch, first.num_samples),
            division,
            make_strategy=lambda: SingleStrategy(world),
            world=world,
            loss_parts=LossParts(job.loss_weights, job.count, world, alone=True),
        )
        stepper = make_stepper(run, parts, world=world)
        num_steps = min(NUM_STEPS_CAPTURED if way.capture else NUM_STEPS, job.num_steps or NUM_STEPS)
        losses: list[str] = []
        batches = loader.batches(0, num_steps, job.epochs)
        try:
            for place, micro_batches in batches:
                micro = list(micro_batches)
                values = Reading(stepper.run(place, micro, False), world.device).values()
                numbers = [*values[:5], *([] if values.named is None else values.named[1])]
                losses.append(" ".join(str(None if value is None else float(value).hex()) for value in numbers))
        finally:
            loader.close()
        self._ready[way] = lambda: stepper.run(place, micro, False)
        return Bits(
            losses=tuple(losses), tensors=_digests({shard.key: shard.tensor for shard in parts.strategy.save()[0]})
        )


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return a number for the bits of each tensor, computed on its device: only the numbers are copied to the host."""
    with torch.no_grad():
        sums = [_digest(tensor.detach()).cpu() for tensor in tensors.values()]
    return {name: f"{int(total) & (2**64 - 1):016x}" for name, total in zip(tensors, sums, strict=True)}


def _digest(tensor: Tensor) -> Tensor:
    """Return a sum over the bits of all elements, each multiplied by a different odd number, modulo 2^64."""
    flat = as_real(tensor).contiguous().reshape(-1)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(kind)
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        numbers = torch.arange(start, start + len(part), device=flat.device)
        total = total + ((part + 1) * (numbers * _signed(_ODD[0]) + _signed(_ODD[1]) | 1)).sum()
    return total


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


class ChildError(Exception):
    """Raised if a process does not answer, with the reason."""


class Child:
    """A fresh process that makes the job again, and answers questions about its first steps."""

    def __init__(self, run: Session, target: str, folder: Path, *, own_caches: bool = True) -> None:
        """Start the process.

        Args:
            run: The run whose job it makes.
            target: What it runs to get the job.
            folder: A folder to make, for its output and caches.
            own_caches: Whether it compiles everything anew, and for itself alone.
        """
        folder.mkdir()
        self._log = folder / "output.txt"
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        self._rest = b""
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
        caches = {name: str(folder / cache) for name, cache in CACHES.items()} if own_caches else {}
        environment = {**without_launcher(os.environ), **caches, "PYTHONPATH": path}
        environment.pop(CHANNEL, None)  # the supervisor listens to this process
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILD, str(theirs_in), str(theirs_out)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs_in, theirs_out),
            )
        os.close(theirs_in)
        os.close(theirs_out)
        config = run.config.model_dump(mode="json")
        self.tell({
            "target": target,
            "module": module_of_run(),
            "argv": sys.argv,
            "config": config,
            "identity": run.job.identity(),
            "weighting": run.weighting.model_dump(mode="json"),
        })  # fmt: skip

    def tell(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # a process that is gone does not answer: that says why
            os.write(self._to, json.dumps(message).encode() + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self) -> dict[str, Any]:
        """Return the answer of the process. The host waits here for it."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while (found := self.poll(max(0.0, deadline - time.monotonic()))) is None:
            if time.monotonic() >= deadline:
                raise ChildError(f"a fresh process took more than {LONGEST_SECONDS:.0f} s")
        return found

    def poll(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """Return the next answer of the process; None if it is not there within some seconds."""
        if b"\n" not in self._rest:
            if not select.select([self._from], [], [], seconds)[0]:
                return None
            read = os.read(self._from, 1 << 20)
            if not read:
                raise ChildError(f"a fresh process ended without an answer{self._last_words()}")
            self._rest += read
            if b"\n" not in self._rest:
                return None
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise ChildError(found["error"])
        return found

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return f": {lines[-1][:200]}" if lines else ""
        return ""

    def close(self) -> None:
        for end in (self._to, self._from):
            with suppress(OSError):
                os.close(end)
        self._process.kill()  # it holds nothing that is worth waiting for
        self._process.wait()


class RepeatProbe:
    """Provides `here`, `elsewhere` and `cost_of` for `plan.tune`."""

    def __init__(self, run: Session, model: nn.Module, micro_batch: int, *, holds_both: bool = False) -> None:
        """Prepare the probe.

        Args:
            run: The run.
            model: Its model, as it was built.
            micro_batch: With so many samples, the steps of another process fit beside what is held here.
            holds_both: Whether both may run such steps at the same time.
        """
        self._run, self._micro_batch, self._holds_both = run, micro_batch, holds_both
        self._target = target_to_rerun()
        self._folder = Path(tempfile.mkdtemp(prefix="drivetrain-repeat-"))
        self._why_not_elsewhere = "" if self._target else "no other process can make this job"
        # Made at once: it imports and builds the model while steps are run here.
        self._child = Child(run, self._target, self._folder / "fresh") if self._target else None
        self._steps, self._found = FirstSteps(run, model), dict[StepWay, Bits]()
        self._chosen: StepWay | None = None
        self._is_ready = False
        self._asked: StepWay | None = None  # of the fresh process, which has not answered yet
        self._answered: tuple[StepWay, Bits] | None = None

    def here(self, way: StepWay) -> RepeatTrial:
        """Run the first steps of a way twice in this process: what the search has compiled is used again.

        A variant that was not compiled yet is at the same time run in the fresh process, which compiles it as well, if
        the memory holds both. Only one with deterministic kernels: others may be chosen by timing.
        """
        is_new = self._chosen is not None and way.compile_mode is not None and way.repeat == "strict"
        self._chosen = self._chosen or way
        smaller = self._smaller(way)
        if is_new and self._holds_both and self._child is not None:
            with suppress(ChildError):
                self._ask(smaller)
        with untouched(self._run.world.device):
            self._found[way] = self._steps.bits(smaller)
            if self._found[way].problem and self._asked is not None:  # the other process may have had the memory
                with suppress(ChildError):
                    self._await_answer()
                self._found[way] = self._steps.bits(smaller)
        return _trial(way, [self._found[way]], 1)

    def elsewhere(self, way: StepWay) -> RepeatTrial:
        """Run them once more where everything is compiled anew: in a fresh process, or here if there can be none."""
        smaller = self._smaller(way)
        self._steps.release()  # the memory is for the other process
        if not self._why_not_elsewhere:
            try:
                return _trial(way, [self._found[way], self._of_child(smaller)], 2)
            except ChildError as error:
                self._why_not_elsewhere = str(error)
                self._end_child()
        with untouched(self._run.world.device), _own_caches(self._folder / f"here-{len(self._found)}"):
            if way.compile_mode is not None:
                torch.compiler.reset()
            again = self._steps.bits(smaller, twice=False)
        return _trial(way, [self._found[way], again], 1)

    def _smaller(self, way: StepWay) -> StepWay:
        return way.but(micro_batch=min(way.micro_batch, self._micro_batch))

    @property
    def note(self) -> str:
        """The reason why a restart was not tried, where something went wrong with it."""
        return self._why_not_elsewhere if self._target else ""

    def cost_of(self, way: StepWay) -> float | None:
        """Return how much longer a step takes than the first way's, as a share; None if it cannot be timed."""
        assert self._chosen is not None
        with suppress(ChildError):
            self._await_answer()  # what it computes would slow what is timed here
        try:
            with untouched(self._run.world.device):
                fast, other = self._steps.seconds([self._smaller(self._chosen), self._smaller(way)])
        except (KeyError, RuntimeError):
            return None
        return float(other / fast - 1)

    def close(self) -> None:
        self._end_child()
        self._steps.release()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None

    def _of_child(self, way: StepWay) -> Bits:
        self._await_answer()
        if self._answered is None or self._answered[0] != way or self._answered[1].problem:
            self._ask(way)
            self._await_answer()
        assert self._answered is not None
        return self._answered[1]

    def _ask(self, way: StepWay) -> None:
        """Have the fresh process run the first steps of a way, after what it was asked before."""
        assert self._child is not None
        self._await_answer()
        self._child.tell({"bits": way.model_dump(mode="json")})
        self._asked = way

    def _await_answer(self) -> None:
        """Wait until the fresh process has answered what it was asked, if anything."""
        if self._asked is None or self._child is None:
            return
        way, self._asked = self._asked, None
        if not self._is_ready:
            self._child.answer()
            self._is_ready = True
        self._answered = way, Bits.model_validate(self._child.answer()["bits"])


def _trial(way: StepWay, found: list[Bits], processes: int) -> RepeatTrial:
    problem = next((bits.problem for bits in found if bits.problem), "")
    if problem:
        return RepeatTrial(way=way, problem=problem, processes=processes)
    is_same_here = all(bits.repeats_here for bits in found)
    difference = found[0].difference(found[-1])
    if not difference and not is_same_here:
        difference = "the same steps once more in one process"
    return RepeatTrial(
        way=way, repeats=not difference, difference=difference, repeats_here=is_same_here, processes=processes
    )


@contextmanager
def _own_caches(folder: Path) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in CACHES}
    os.environ.update({name: str(folder / cache) for name, cache in CACHES.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


# ----------------------------------------------------------------------------------------------------------------------
# Compiling in the background


def refuse_background(run: Session) -> None:
    """Raise if the run is asked to go over to compiled code and cannot: only one process with a whole model can."""
    if run.way.compiled_from == 0:
        return
    if run.world.size > 1:
        why = f"{run.world.size} processes train this job"
    elif run.shards or len(run.devices) > 1:
        why = "the model is sharded" if run.shards else f"{len(run.devices)} GPUs share a step"
    else:
        return
    message = f"{why}, and only a run of one process on one device goes over to compiled code while it trains"
    raise ConfigError([Problem("--compile-from", message, remedy="leave it out: --compile compiles before step 1")])


class CompileSwitch:
    """Holds a run to eager steps until its compiled code is used. A context around all that runs the model."""

    def __init__(self, run: Session, first_step: int) -> None:
        """Look whether there is anything to wait for.

        Args:
            run: The run, as it is planned.
            first_step: How many steps were done before.
        """
        self._run, self._began = run, time.monotonic()
        self._child: Child | None = None
        self._folder: Path | None = None
        self._recorder: RunRecorder | NoRunRecorder = NoRunRecorder()
        self._eager_seconds: deque[float] = deque(maxlen=TIMED_STEPS)  # of the steps before the switch
        self._compiled_seconds: list[float] = []  # of those after it
        self._went_over_after: int | None = None  # how many steps
        way = run.way
        self.is_eager = not run.is_done and (way.compiled_from is None or first_step < way.compiled_from)
        self._why_here = why_not = _why_at_once(run) if self.is_eager else ""
        if why_not and way.compiled_from is None:
            self.is_eager = False
            run.follow(run.planned.compiled_from(0, f"before the first step: {why_not}"))
            if not run.quiet:
                notice(f"--compile-from ready is not obeyed, compiling comes before training: {why_not}")
        self._starts_child = self.is_eager and not why_not
        self._is_ready = False  # whether the other process has compiled the step

    def __enter__(self) -> Self:
        if self._starts_child:
            self._folder = Path(tempfile.mkdtemp(prefix="drivetrain-compile-"))
            self._child = Child(self._run, target_to_rerun(), self._folder / "fresh", own_caches=False)
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._child.pid, NICENESS)
            self._child.tell({"bits": self._run.way.model_dump(mode="json")})
        if self.is_eager:
            torch.compiler.set_stance("force_eager")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_eager:
            torch.compiler.set_stance("default")
        self._end_child()

    def before_steps(
        self, others: Callable[[int], None] | None, recorder: RunRecorder | NoRunRecorder
    ) -> Callable[[int], None] | None:
        """Return the function to call before each step, numbered from 1. `others` is called as well."""
        if not self.is_eager:
            return others
        self._recorder = recorder

        def before_step(step: int) -> None:
            if self.is_eager and self._is_time(step - 1):
                self._go_over(step - 1)
            if others is not None:
                others(step)

        return before_step

    def observe(self, record: StepRecord) -> None:
        """Tell once, from the seconds of the steps around the switch, how much faster compiled ones are."""
        if len(self._compiled_seconds) == SETTLING_STEPS + TIMED_STEPS:
            return
        if self.is_eager:
            self._eager_seconds.append(record.seconds)
        elif self._went_over_after is not None and record.step > self._went_over_after:
            self._compiled_seconds.append(record.seconds)
            if len(self._compiled_seconds) == SETTLING_STEPS + TIMED_STEPS and len(self._eager_seconds) == TIMED_STEPS:
                compiled_seconds = statistics.median(self._compiled_seconds[SETTLING_STEPS:])
                gain = statistics.median(self._eager_seconds) / compiled_seconds
                self._recorder.event("compiled steps", step=record.step, gain=round(gain, 4))
                advice = "" if gain >= 1 else ": without --compile, this job is faster"
                self._recorder.say(f"  compiling  steps are {gain:.2f} times as fast as before{advice}")

    def _is_time(self, num_done: int) -> bool:
        """Return whether the step after `num_done` steps is the first that is compiled."""
        if self._run.way.compiled_from is not None and num_done < self._run.way.compiled_from:
            return False
        self._look_at_child(num_done)
        return self._is_ready or self._run.way.compiled_from is not None

    def _look_at_child(self, num_done: int) -> None:
        """Note whether the other process is done, and tell once if it failed."""
        if self._child is None:  # there is none, or it failed
            return
        try:
            while (answer := self._child.poll()) is not None and "bits" not in answer:
                pass
            if answer is None:
                return
            problem = Bits.model_validate(answer["bits"]).problem
        except ChildError as error:
            problem = str(error)
        self._end_child()
        self._is_ready = not problem
        if problem:
            then = "steps stay eager" if self._run.way.compiled_from is None else "this process compiles"
            self._why_here = "the other one failed"
            self._recorder.event("compiling failed", step=num_done, error=problem)
            self._recorder.say(f"  compiling  failed in the background, and {then}: {problem}")

    def _go_over(self, num_done: int) -> None:
        """Use compiled code from here on. The step is on disk before it is run."""
        run, seconds = self._run, time.monotonic() - self._began
        if run.way.compiled_from is None:
            write_switch(run.path, num_done)
            planned = run.planned.compiled_from(num_done, f"compiled in the background in {format_duration(seconds)}")
            run.planned = planned
            if planned.plan is not None:
                self._recorder.replan(planned.plan.as_plain(), run.way.micro_batch, str(run.way))
        self._end_child()
        self.is_eager, self._went_over_after = False, num_done
        torch.compiler.set_stance("default")
        self._recorder.event("compiled from here", step=num_done, seconds=round(seconds, 3))
        how = "done in the background"
        if not self._is_ready:
            how = f"done by this process ({self._why_here or 'the other one is not ready'})"
        self._recorder.say(f"  compiling  {how}: steps are compiled from step {num_done + 1:,} on, and when resumed")

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def _why_at_once(run: Session) -> str:
    """Return why no other process compiles for the run; empty if one can."""
    if not target_to_rerun():
        return "no other process can make this job, since it is not the first of a script or function"
    if run.world.device.type != "cuda":
        return ""
    plan = run.planned.plan
    peak = None if plan is None else plan.forecast.run_peak_bytes
    if peak is None:
        return "the memory that a step takes was not measured, and another process needs as much"
    has_room = 2 * peak + CONTEXT_BYTES <= run.free_bytes() * run.config.memory.gpu_fraction
    return "" if has_room else "the GPU's memory does not hold the model and its optimizer twice"
