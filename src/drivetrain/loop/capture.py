"""CUDA-graph capture of the whole step, from forward to optimizer.

The first steps of a run are the warm-up, and are real ones. They are watched: a step that waits for the device, or that
changes something in Python, cannot be replayed, and the run goes on without capture and reports the reason. Then one
step of each shape that is not rare is captured, and replayed from there on, and of the first two shapes that are rare:
an epoch's last step may take as long as a dozen replays otherwise. Other steps run eagerly.

All of it is on one stream that is not CUDA's default (`own_stream`): that one cannot be captured. What changes from
step to step reaches a replay through memory: the batch is copied into place, or is gathered by the replay itself from
resident data, whose `Window` says which samples are next; the learning rate is on the device
(`strategies.optimizer_state`); the generators' seeds are read when a replay begins. A step on resident data enqueues
nothing but the replay: it writes its results into a table on the device, and the host copies many rows at once
(`loop.read_back.DeviceResultTable`).

A step with several turns is one graph for each turn, and one of several micro-batches is one graph for each of these:
between two of them the generators are seeded for the next. Gradients add up in place, in the order of a step that is
not captured.
"""

import gc
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.core.metrics import StepOutcome
from drivetrain.core.world import World
from drivetrain.data.batch import MicroBatch, to_device
from drivetrain.data.division import Place, Stretch
from drivetrain.data.resident import Resident, Rows, Window
from drivetrain.loop.capture_rules import (
    TURNS_OF_MICRO_STEPS,
    NotStaticError,
    State,
    changes,
    generators_state,
    python_state,
    signature,
    with_tensors,
)
from drivetrain.loop.read_back import DeviceResultTable, TableRow
from drivetrain.loop.stepper import Stepper
from drivetrain.monitor.phases import DATA, STEP
from drivetrain.strategies.base import CapturableStrategy, ObjectiveCall
from drivetrain.strategies.optimizer_state import put_rates_on_device
from drivetrain.strategies.turns import TurnsStrategy

WARM_STEPS = 3  # of a shape, before it is recorded; all but the first are watched
RARE = 16  # a shape that fewer than one in so many steps have is rare
MOST_RARE, MOST_GRAPHS = 2, 8
MOST_SHAPES = 1024  # that are counted
MOST_STARTS = 5  # how often hooks may change the model before steps are no longer recorded

CAPTURED, NOT_CAPTURED = "step captured", "step not captured"  # events

# Gets what is to be recorded, calls it once, and returns what runs it again.
Record = Callable[[Callable[[], None]], Callable[[], None]]


class MicroInput(NamedTuple):
    """Holds the arguments of one micro-step of a captured step."""

    batch: Any
    num_samples: int
    weight: int = 1


class _Passage(NamedTuple):
    """A step that finds its samples in a window by itself. It keeps the tensors that the graph only reads."""

    resident: Resident
    window: Window
    offsets: Sequence[Tensor]  # of the samples of each micro-step, from the window's place
    results: DeviceResultTable
    num_samples: int

    def gather(self, number: int) -> Any:
        return self.resident.gather(self.window.chosen(self.offsets[number]))

    def keep(self, outcome: StepOutcome) -> None:
        """Write the outcome into the table, and go on to the samples of the next replay."""
        self.results.keep(self.window.place, outcome)
        self.window.place.add_(self.num_samples)

    def begin(self, start: int, most: int) -> TableRow:
        """Prepare for up to `most` replays from sample `start` on, each on the samples after the previous one's."""
        rows = self.results.expect(start, most, self.num_samples)
        self.window.go_to(start)
        return rows

    def end(self, rows: TableRow, count: int) -> None:
        """Record that `count` of the replays were enqueued."""
        self.results.cut(rows, count)
        self.window.passed(count * self.num_samples)


def _passage_of(batches: Sequence[Any], num_other_values: int) -> _Passage | None:
    first = batches[0]
    if not isinstance(first, Rows) or first.window is None:
        return None
    window, device = first.window, first.window.place.device
    begins = [batch.start - first.start for batch in batches]
    offsets = [
        torch.arange(start, start + batch.count, device=device) for start, batch in zip(begins, batches, strict=True)
    ]
    results = DeviceResultTable(len(window.numbers), device, num_other_values)
    return _Passage(first.resident, window, offsets, results, sum(batch.count for batch in batches))


class CapturedStep:
    """One captured step. Its inputs are tensors that are written over before each replay; so are its results.

    In a probe: inside `own_stream`, after `make_capturable` and `put_rates_on_device` and some ordinary steps,
    `CapturedStep(CudaRecorder(device), strategy, objective, [MicroInput(batch, samples)])`; then `replay()`, as often
    as it takes.

    Args:
        record: Records what it is given.
        strategy: What the step is run by.
        objective: The objective that its `prepare` returned.
        inputs: What each micro-step of the step is called with.
        step_samples: The samples of the step. Default: those of the inputs.
        begin_part: Called between two graphs of a step with the number of the turn or micro-step that begins.
    """

    def __init__(
        self,
        record: Record,
        strategy: CapturableStrategy,
        objective: ObjectiveCall,
        inputs: Sequence[MicroInput],
        step_samples: int | None = None,
        begin_part: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._strategy = strategy
        self._outcome: StepOutcome | None = None
        self.objectives: dict[int, Tensor] = {}  # of the last replay, by micro-step; overwritten by the next one
        self._passage = passage = _passage_of([each.batch for each in inputs], strategy.num_values)
        whole_samples = step_samples or sum(each.num_samples for each in inputs)

        def learn(number: int = 0) -> None:
            batch, num_samples, weight = inputs[number]
            if isinstance(batch, Rows):
                batch = batch.gather() if passage is None else passage.gather(number)
            value = objective(batch, num_samples, whole_samples, weight)
            self.objectives[number] = value.detach()
            strategy.backward(value)

        def end() -> None:
            outcome = _on_device(strategy.move())
            if passage is None:
                self._outcome = outcome._replace(packed=outcome.pack())
            else:
                passage.keep(outcome)
                self._outcome = outcome

        def micro_step(number: int) -> None:
            if number < len(inputs) - 1:
                with strategy.accumulate():
                    learn(number)
            else:
                learn(number)
                end()

        try:
            if isinstance(strategy, TurnsStrategy):
                bodies = _turn_bodies(strategy, learn, end)
            else:
                bodies = [partial(micro_step, number) for number in range(len(inputs))]
            self._replay = _one_after_the_other([record(body) for body in bodies], begin_part)
        except BaseException:
            strategy.abandon()
            raise
        finally:
            if passage is not None:
                passage.window.lose_place()
        # Other code may replace the gradients of parameters between replays: afterwards these are put back.
        self._gradients = [(parameter, parameter.grad) for parameter in strategy.parts.trained]

    def replay(self, stop: float = 0.0, start: int = 0) -> StepOutcome:
        """Replay the step. `start`: where in their window its samples are, if they are in one."""
        if self._passage is not None:
            return self.go_on(start, 1, (None,))._replace(stop=stop)
        self._replay()
        self._strategy.follow()
        outcome = self._outcome
        assert outcome is not None
        return outcome._replace(stop=stop) if stop else outcome

    @property
    def finds_samples(self) -> bool:
        """Whether it can be replayed again at once, on the samples that come next in their window."""
        return self._passage is not None

    def go_on(self, start: int, most: int, begins: Iterable[Any]) -> StepOutcome:
        """Replay once for each step that begins, `most` times at most. The outcome covers all of them."""
        passage, replay, follow, count = self._passage, self._replay, self._strategy.follow, 0
        assert passage is not None
        assert self._outcome is not None
        rows = passage.begin(start, most)
        for _ in begins:
            replay()
            follow()
            count += 1
        passage.end(rows, count)
        return self._outcome._replace(rows=rows)

    def show_gradients(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def _turn_bodies(
    strategy: TurnsStrategy, learn: Callable[[], None], end: Callable[[], None]
) -> list[Callable[[], None]]:
    """Return what to record of each turn of a step, the end of the step with the last."""
    last = len(strategy.turns) - 1

    def body(number: int) -> None:
        with strategy.taking(number):
            learn()
        if number == last:
            end()

    return [partial(body, number) for number in range(last + 1)]


def _one_after_the_other(
    replays: Sequence[Callable[[], None]], begin_part: Callable[[int], None]
) -> Callable[[], None]:
    """Return what replays all graphs of a step, with `begin_part` before each but the first."""
    first, *others = replays
    if not others:
        return first

    def replay() -> None:
        first()
        for number, follower in enumerate(others, start=1):
            begin_part(number)
            follower()

    return replay


def _on_device(outcome: StepOutcome) -> StepOutcome:
    """Keep tensors only where the device writes them in a replay. A count on the host is a constant of this shape."""
    count = outcome.num_items
    if isinstance(count, Tensor) and outcome.losses and count.device != outcome.losses[0][0].device:
        return outcome._replace(num_items=count.item())
    return outcome


class CudaRecorder:
    """Captures CUDA graphs. Graphs of one recorder share their memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            # Only this thread is held to what may be recorded: others save, sample and pin memory meanwhile. What
            # earlier runs left must not be destroyed in the middle: the end of a communicator cannot be recorded.
            with (
                _garbage_left(),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                body()
        except BaseException:
            self._mend()
            raise
        self._graphs.append(graph)
        return graph.replay

    def release(self) -> None:
        """Destroy its graphs, whatever still refers to them: an error that is on its way may, for long."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def _mend(self) -> None:
        """Reset the allocator and the generator, which a failed capture leaves in the middle of it."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with suppress(RuntimeError):  # it was ended properly
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        for _ in range(3):  # an error that is still pending on the device is raised once
            try:
                torch.zeros(1, device=self._device)
                torch.cuda.synchronize(self._device)
                return
            except RuntimeError:
                continue


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Have Python not look for garbage inside."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


LastBatch = list[weakref.ref[Tensor]]  # the tensors of a step's batches, without keeping them


class StepInput(NamedTuple):
    """A step that is to be run: its micro-batches, and their data on the device or as rows of resident data."""

    place: Place
    micros: list[MicroBatch]
    batches: list[Any]
    stop: float

    def key(self, leaves: list[Tensor]) -> Hashable:
        """Return a value that is equal for steps that one capture fits. The tensors are appended to `leaves`."""
        parts = [
            (micro.num_samples, micro.weight, signature(batch, leaves))
            for micro, batch in zip(self.micros, self.batches, strict=True)
        ]
        return self.place.num_samples, *parts


class RecordedShape:
    """A captured step for one shape, and the tensors that its batches are copied into."""

    def __init__(
        self, make: Callable[[list[Any]], CapturedStep], batches: list[Any], leaves: list[Tensor], before: LastBatch
    ) -> None:
        # A tensor that came in the last step, too, is a buffer that its owner fills: it is read in place.
        self._is_fixed = [leaf is last() for leaf, last in zip(leaves, before, strict=True)]
        self._inputs = [
            leaf if is_fixed else leaf.clone() for leaf, is_fixed in zip(leaves, self._is_fixed, strict=True)
        ]
        following = iter(self._inputs)
        self.step = make([with_tensors(batch, following) for batch in batches])

    def take(self, leaves: list[Tensor]) -> bool:
        """Copy the batch into place; false if it does not fit there."""
        for leaf, place, is_fixed in zip(leaves, self._inputs, self._is_fixed, strict=True):
            if is_fixed and leaf is not place:
                return False
        for leaf, place, is_fixed in zip(leaves, self._inputs, self._is_fixed, strict=True):
            if not is_fixed:
                place.copy_(leaf, non_blocking=True)
        return True


class CapturedStepper(Stepper):
    """Runs steps, and replays those that are captured."""

    def __init__(
        self,
        strategy: CapturableStrategy,
        objective: ObjectiveCall,
        world: World,
        seed: int,
        *,
        make_recorder: Callable[[torch.device], Record] = CudaRecorder,
        **options: Any,
    ) -> None:
        super().__init__(strategy, objective, world, seed, **options)
        self._takes_rows = self._channels_last = False
        put_rates_on_device(strategy.parts.optimizer)
        self._capturable, self._device = strategy, world.device
        self._norms = strategy.parts.norms
        self._make_recorder = make_recorder
        # Called with what to say of it, once steps are captured and once they are not any more.
        self.tell: Callable[[str, str], None] = lambda event, words: None
        self._num_steps = self._num_replays = self._num_starts = 0
        self._step = 0  # that runs: how many were done before it
        # Whether a step draws from the device's generator: if not, replays follow each other without it being set.
        self._draws_in_steps = self._draws.python or self._draws.torch
        self._drawn: list[str] | None = None  # generators that a step draws from, while it is watched
        self._generators: State = {}  # since when
        self._start()

    def start_over(self) -> None:
        self._start()

    def _start(self) -> None:
        """Begin with the warm-up, and release the captured graphs."""
        self._num_starts += 1
        if self._num_replays and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the host waits: a graph must not go while it runs
        self._record: Record | None = None
        self._recorded: dict[Hashable, RecordedShape] = {}
        self._not_used: list[RecordedShape] = []  # may be running: they go when the device was awaited
        self._num_rare = 0
        self._seen: dict[Hashable, int] = {}
        self._before: dict[Hashable, LastBatch] = {}  # the last batch of each shape
        self._shown: RecordedShape | None = None  # whose gradients the parameters have
        self._last: RecordedShape | None = None  # that was replayed, if the last step was a replay
        self._state: State | None = None  # when the first step was recorded
        self._looks_again = False

    def take_rows(self, *, channels_last: bool) -> None:
        """Gather or move batches: they come as `Rows` of resident data, or from the host as they are."""
        self._takes_rows, self._channels_last, self._arrives = True, channels_last, DATA

    def forward_backward(self, batch: Any, place: Place, micro: MicroBatch) -> None:
        super().forward_backward(batch.gather() if isinstance(batch, Rows) else self._moved(batch), place, micro)

    def _moved(self, batch: Any) -> Any:
        return to_device(batch, self._device, channels_last=self._channels_last) if self._takes_rows else batch

    def last_batch(self) -> Any:
        batch = super().last_batch()
        return batch.gather() if isinstance(batch, Rows) else self._moved(batch)

    def look_again(self) -> None:
        self._looks_again = bool(self._recorded)

    def in_words(self) -> str:
        if not self._num_replays:
            return super().in_words() or "not captured: the run was over first"
        shapes = f"{len(self._recorded)} shape{'s' if len(self._recorded) != 1 else ''}, "
        words = f"{'' if self.why_not else shapes}{self._num_replays} of {self._num_steps} steps replayed"
        return f"{words}; no longer: {self.why_not}" if self.why_not else words

    def run(self, place: Place, micro_batches: Iterable[MicroBatch], stop: float) -> StepOutcome:
        self._num_steps += 1
        if self.why_not:
            return super().run(place, micro_batches, stop)
        micros = list(micro_batches)
        if len(micros) > 1 and self._turns is not None:
            self._give_up(TURNS_OF_MICRO_STEPS)
            return super().run(place, micros, stop)
        if self._looks_again:
            self._compare()
        self._step = place.step
        self.begin(place, micros[0])
        if self.keeps_batch:
            self._last_batch = next((micro.batch for micro in reversed(micros) if micro.weight), None)
        batches = [micro.batch if isinstance(micro.batch, Rows) else self._moved(micro.batch) for micro in micros]
        step, leaves = StepInput(place, micros, batches, stop), list[Tensor]()
        try:
            key = step.key(leaves)
        except NotStaticError as reason:
            self._give_up(str(reason))
            return self._run_here(step)
        if self._norms.is_apart:
            return self._run_here(step)
        recorded = self._recorded.get(key)
        if recorded is None:
            return self._warm_up(key, step, leaves)
        if not recorded.take(leaves):
            return self._run_here(step)
        return self._replay(recorded, step)

    def _replay(self, recorded: RecordedShape, step: StepInput) -> StepOutcome:
        first = step.batches[0]
        outcome = recorded.step.replay(float(step.stop), first.start if type(first) is Rows else 0)
        if self._shown is not recorded:
            recorded.step.show_gradients()
            self._shown = recorded
        self._num_replays += 1
        self._last = recorded
        self.clock.lap(STEP)
        return outcome

    @property
    def may_go_on(self) -> bool:
        last = self._last
        return last is not None and last.step.finds_samples and not (self._looks_again or self.keeps_batch)

    def go_on(self, stretch: Stretch, begins: Iterable[int]) -> StepOutcome:
        assert self._last is not None
        outcome = self._last.step.go_on(stretch.start, stretch.num_steps, self._seeded(begins))
        assert outcome.rows is not None
        self._num_replays += outcome.rows.count
        self._num_steps += outcome.rows.count
        self.clock.lap(STEP)
        return outcome

    def _seeded(self, begins: Iterable[int]) -> Iterable[int]:
        if not self._draws_in_steps:
            return begins

        def seeded() -> Iterator[int]:
            for step in begins:
                self._step = step
                self._seed_model(self._key_of(step, 0))
                yield step

        return seeded()

    def _run_here(self, step: StepInput) -> StepOutcome:
        self._shown = self._last = None
        place, micros, batches, stop = step
        if self._turns is None:
            for number, (batch, micro) in enumerate(zip(batches, micros, strict=True)):
                if number:
                    self._begin_part(number)
                self.forward_backward(batch, place, micro)
            return self.end(stop)
        for turn in self._turns.due(place.step):
            if turn:
                self._begin_part(turn)
            with self._turns.taking(turn, stop):
                self.forward_backward(batches[0], place, micros[0])
        return self.end(stop)

    def _begin_part(self, number: int) -> None:
        """Set the generators for another turn, or another micro-step, of the step that runs."""
        self._look_at_draws()
        micro_step, turn = (number, 0) if self._turns is None else (0, number)
        self._seed_model(self._key_of(self._step, micro_step, turn))
        self._look_at_draws(begins=True)

    def _look_at_draws(self, *, begins: bool = False) -> None:
        """While a step is watched, note what draws from generators of the host: between `begins` and the next call."""
        if self._drawn is None:
            return
        now = generators_state(self._device)
        if not begins:
            self._drawn += changes(self._generators, now)
        self._generators = now

    def _warm_up(self, key: Hashable, step: StepInput, leaves: list[Tensor]) -> StepOutcome:
        elsewhere = next((leaf.device for leaf in leaves if leaf.device != self._device), None)
        if elsewhere is not None:
            self._give_up(f"a part of the batch is on {elsewhere}, and a replay reads {self._device}")
            return self._run_here(step)
        if len(self._seen) > MOST_SHAPES:
            self._seen.clear()
            self._before.clear()
        if any(self.runs_eagerly(micro) for micro in step.micros):
            return self._run_here(step)  # of another size than what was compiled: its launches are not worth recording
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        before = self._before.get(key)
        self._before[key] = [weakref.ref(leaf) for leaf in leaves]
        if seen == 1 or before is None:
            return self._run_here(step)
        if seen <= WARM_STEPS:
            return self._watched(step)
        is_rare = seen * RARE < self._num_steps
        if len(self._recorded) == MOST_GRAPHS or (is_rare and self._num_rare == MOST_RARE):
            return self._run_here(step)
        self._num_rare += is_rare
        return self._capture(key, step, leaves, before, is_rare=is_rare)

    def _watched(self, step: StepInput) -> StepOutcome:
        """Run a step of the warm-up. An effect that a replay would not have ends the attempt; the step is done."""
        before, self._drawn = self._python_state(), []
        generator = self._generator or torch.default_generator
        drawn_from = generator.get_state()
        self._look_at_draws(begins=True)
        with noticed_waits(self._device) as waits:
            outcome = self._run_here(step)
        self._look_at_draws()
        self._draws_in_steps |= not torch.equal(drawn_from, generator.get_state())
        found, self._drawn = changes(before, self._python_state()) + self._drawn, None
        if waits:
            self._give_up(f"the step waits for the device ({waits[0]}), and a replay cannot")
        elif found:
            self._give_up(f"the step changes {found[0]} in Python, which a replay would not")
        return outcome

    def _capture(
        self, key: Hashable, step: StepInput, leaves: list[Tensor], before: LastBatch, *, is_rare: bool
    ) -> StepOutcome:
        # A rare one may fail for want of memory, which the others have: it is recorded apart from them.
        is_apart = is_rare and bool(self._recorded)
        record = None if is_apart else self._record
        record = record or self._make_recorder(self._device)
        if not is_apart:
            self._record = record

        state = self._python_state()
        try:
            recorded = RecordedShape(partial(self._step_of, record, step), step.batches, leaves, before)
        except Exception as error:  # noqa: BLE001  (whatever cannot be recorded can be run)
            if is_apart:
                self._num_rare = MOST_RARE
            else:
                self._give_up(f"recording the step failed: {cause_of(error)}")
            self._begin_again()
            return self._run_here(step)
        found = changes(state, self._python_state())
        recorded.take(leaves)
        self._begin_again()
        outcome = self._replay(recorded, step)
        if found and is_apart:
            self._num_rare = MOST_RARE
            self._not_used.append(recorded)
            return outcome
        if found:
            # What Python did while this step was recorded belongs to it; the next must do it again.
            self._give_up(f"the step changes {found[0]} in Python, which a replay would not")
            return outcome
        if not self._recorded and self._num_starts == 1:
            self.tell(CAPTURED, f"replayed as {graphs_in_words(step)} from step {step.place.step + 1} on")
        self._state = state if self._state is None else self._state
        self._recorded[key] = recorded
        return outcome

    def _step_of(self, record: Record, step: StepInput, batches: list[Any]) -> CapturedStep:
        """Capture a step on these batches."""
        inputs = [
            MicroInput(batch, micro.num_samples, micro.weight)
            for batch, micro in zip(batches, step.micros, strict=True)
        ]
        samples = step.place.num_samples
        return CapturedStep(record, self._capturable, self._objective, inputs, samples, self._begin_part)

    def _begin_again(self) -> None:
        """Restore the generators to the beginning of the step."""
        self._seed_model(self._key_of(self._step, 0))

    def _compare(self) -> None:
        """Check state after hooks ran. Changes made in place reach a replay; anything else needs a new capture."""
        self._looks_again = False
        assert self._state is not None
        found = changes(self._state, self._python_state())
        if not found:
            return
        if self._num_starts == MOST_STARTS:
            self._give_up(f"hooks change {found[0]} again and again, and each time the step has to be recorded anew")
        else:
            self._start()

    def _python_state(self) -> State:
        parts = self._capturable.parts
        numbers = {f"what it logs as {name!r}": repr(value) for name, value in parts.step_log.numbers.items()}
        return python_state(parts.model, inspect.unwrap(parts.loss), parts.optimizer, self._device) | numbers

    def _give_up(self, reason: str) -> None:
        self.why_not = reason
        self._start()
        self.tell(NOT_CAPTURED, reason)


def graphs_in_words(step: StepInput) -> str:
    """Return how many graphs a step takes."""
    parts = len(step.micros)
    return "one CUDA graph" if parts == 1 else f"{parts} CUDA graphs, one for each micro-batch,"


def cause_of(error: BaseException) -> str:
    """Return the root cause of a failed capture: ending it raises another error over the one that broke it."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run everything inside on a stream that can be captured, ordered after the work enqueued before. Only on a GPU.

    The stream has high priority, since streams are taken in turn from a pool for each priority: no other user gets it.
    """
    if device.type != "cuda":
        yield
        return
    outer = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            with suppress(RuntimeError):  # of a device that failed: the first error is the news
                outer.wait_stream(stream)
                # Matrix products keep some 30 MB for each stream they ever ran on, and this one is not used again.
                torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def noticed_waits(device: torch.device) -> Iterator[list[str]]:
    """Collect where this thread makes the host wait for the device, as far as torch notices."""
    waits: list[str] = []
    if device.type != "cuda":
        yield waits
        return
    here, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def noticed(message: Any, category: Any, filename: str, lineno: int, *others: Any, **named: Any) -> None:
            if "synchronizing CUDA operation" not in str(message):
                show(message, category, filename, lineno, *others, **named)
            elif threading.get_ident() == here:
                waits.append(f"{filename}:{lineno}")

        warnings.showwarning = noticed
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.filterwarnings("ignore", message=".*[Ss]ynchronization debug mode")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)
