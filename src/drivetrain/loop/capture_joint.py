"""CUDA-graph capture of the steps of several ranks that train with DDP: the all-reduces are part of the graphs.

NCCL asks that an operation is captured on all ranks or on none, and that a graph is replayed on all of them together
(its guide, "Using NCCL with CUDA Graphs"). So before a step that may be recorded or replayed, the ranks agree on what
is done with it: the least of what each of them could do. They agree over gloo, from host to host, without waiting for a
device. The kinds of steps need no agreement: they are known by the samples of the whole step and its micro-batches.

A rank that cannot record must not leave the others behind in a collective. So a step is recorded twice: first without
the other ranks, where anything may fail, and with them only if that has gone well on all.

Ranks have to stop and to save at the same step. So nothing here depends on a clock: there are no ranges of replays, and
the record of a step is read when the next one was enqueued, as of steps that are not captured.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import StepOutcome
from drivetrain.core.world import World
from drivetrain.data.batch import MicroBatch
from drivetrain.data.division import Place
from drivetrain.loop.capture import (
    CAPTURED,
    MOST_GRAPHS,
    MOST_STARTS,
    NOT_CAPTURED,
    RARE,
    CapturedStepper,
    CudaRecorder,
    LastBatch,
    Record,
    RecordedShape,
    StepInput,
    cause_of,
    graphs_in_words,
)
from drivetrain.loop.capture_rules import NotStaticError, changes
from drivetrain.strategies.base import ObjectiveCall
from drivetrain.strategies.ddp import DdpStrategy

# DDP times its first ten iterations, for which the host waits, and settles its buckets in the first two: torch's notes
# ask for 11 eager ones ("Usage with DistributedDataParallel"). The trial before the first step is one more.
EAGER_STEPS = 11
WATCHED_STEPS = 2  # of each kind, before it is recorded
MOST_UNLIKE = 100  # steps in a row whose batches did not fit on some rank, before any was recorded
TRIED = "this has been tried with one NCCL rank only"


class Ability(IntEnum):
    """Lists what a rank may be able to do with a step, least first. All ranks do the least that any of them can."""

    GIVE_UP = 0  # run this step and all others eagerly
    START_OVER = 1  # run it eagerly, and record anew what was recorded: the model has changed
    EAGER = 2
    RECORD = 3
    REPLAY = 4


class JointCapturedStepper(CapturedStepper):
    """Runs the steps of one of several ranks, and replays those that all ranks have captured together."""

    def __init__(
        self,
        strategy: DdpStrategy,
        objective: ObjectiveCall,
        world: World,
        seed: int,
        *,
        make_recorder: Callable[[torch.device], Record] = CudaRecorder,
        **options: Any,
    ) -> None:
        strategy.settle_timing()
        self._hosts = world.hosts()
        self._ddp = strategy
        self._eager_counts, self._watched_counts = Counter[Hashable](), Counter[Hashable]()
        self._own_reason = ""  # why this rank has to give up; not yet told to the others
        self._num_unlike = 0
        super().__init__(strategy, objective, world, seed, make_recorder=make_recorder, **options)

    def _start(self) -> None:
        super()._start()
        self._of_kind: dict[Hashable, tuple[Hashable, RecordedShape]] = {}  # each with the key of the batches that fit
        self._key_before: dict[Hashable, Hashable] = {}  # of the last step of each kind
        self._watched_counts.clear()
        self._must_start_over = False

    def run(self, place: Place, micro_batches: Iterable[MicroBatch], stop: float) -> StepOutcome:
        if self.why_not:
            return super().run(place, micro_batches, stop)
        self._num_steps += 1
        micros = list(micro_batches)
        self._step = place.step
        self.begin(place, micros[0])
        if self.keeps_batch:
            self._last_batch = next((micro.batch for micro in reversed(micros) if micro.weight), None)
        step = StepInput(place, micros, [self._moved(micro.batch) for micro in micros], stop)
        kind = place.num_samples, len(micros)  # the same on all ranks, as is all that is counted by it
        self._eager_counts[kind] += 1
        if self._num_steps <= EAGER_STEPS or self._eager_counts[kind] == 1:
            return self._run_here(step)
        if self._watched_counts[kind] < WATCHED_STEPS:
            self._watched_counts[kind] += 1
            return self._run_here(step) if self._own_reason else self._watched(step)
        if kind not in self._of_kind and self._is_rare(kind):
            return self._run_here(step)
        return self._together(kind, step)

    def close(self) -> None:
        # Without waiting for the device: after an error, the ranks may be gone that its collectives wait for.
        if isinstance(self._record, CudaRecorder):
            self._record.release()
        self._record = self._shown = self._last = None
        self._of_kind.clear()
        self._recorded.clear()

    def _is_rare(self, kind: Hashable) -> bool:
        return len(self._of_kind) == MOST_GRAPHS or self._eager_counts[kind] * RARE < self._num_steps

    def _together(self, kind: Hashable, step: StepInput) -> StepOutcome:
        """Do with a step what all ranks can do with it."""
        leaves = list[Tensor]()
        before = self._before.get(kind)
        agreed = self._agreed(self._ability(kind, step, leaves))
        if agreed is Ability.REPLAY:
            return self._replay(self._of_kind[kind][1], step)
        if agreed is Ability.RECORD:
            assert before is not None
            return self._record_together(kind, step, leaves, before)
        if agreed is Ability.GIVE_UP:
            self._give_up_together()
        elif agreed is Ability.START_OVER:
            self._start()
        elif not self._of_kind and not self._norms.is_apart:
            self._num_unlike += 1
            if self._num_unlike == MOST_UNLIKE:
                self._give_up(f"the shapes of the batches have changed on some rank in each of {MOST_UNLIKE} steps")
        return self._run_here(step)

    def _agreed(self, ability: Ability) -> Ability:
        """Return the least of what the ranks can do. The host waits here for the other hosts, not for a device."""
        return Ability(self._hosts.least(ability))

    def _ability(self, kind: Hashable, step: StepInput, leaves: list[Tensor]) -> Ability:
        """Return what this rank can do with a step. To be replayed, its batch is in place already."""
        if self._looks_again:
            self._compare()
        if self._own_reason:
            return Ability.GIVE_UP
        if self._must_start_over:
            return Ability.START_OVER
        if self._norms.is_apart:
            return Ability.EAGER
        try:
            key = step.key(leaves)
        except NotStaticError as reason:
            self._give_up(str(reason))
            return Ability.GIVE_UP
        if any(leaf.device != self._device for leaf in leaves):
            self._give_up(f"a part of the batch is not on {self._device}, which a replay reads")
            return Ability.GIVE_UP
        if kind in self._of_kind:
            fits, recorded = self._of_kind[kind]
            return Ability.REPLAY if key == fits and recorded.take(leaves) else Ability.EAGER
        is_alike = self._key_before.get(kind) == key
        self._key_before[kind], self._before[kind] = key, [weakref.ref(leaf) for leaf in leaves]
        return Ability.RECORD if is_alike else Ability.EAGER

    def _replay(self, recorded: RecordedShape, step: StepInput) -> StepOutcome:
        # The request reaches the others as that of an eager step: with the gradients of the next one.
        outcome = super()._replay(recorded, step._replace(stop=0.0))
        self._ddp.send_stop(step.stop)
        if self._own_losses is not None:
            self._own_losses.extend((self._step, value.clone()) for value in recorded.step.objectives.values())
        return outcome

    def _record_together(self, kind: Hashable, step: StepInput, leaves: list[Tensor], before: LastBatch) -> StepOutcome:
        """Record a step on all ranks, and replay it; or run it eagerly on all of them, and give up."""
        self._rehearse(step)
        if self._agreed(self._go_ahead) is Ability.GIVE_UP:
            self._give_up_together()
            return self._run_here(step)
        recorded = self._recorded_with(step, leaves, before)
        if self._agreed(self._go_ahead) is Ability.GIVE_UP:
            del recorded
            self._give_up_together()
            return self._run_here(step)
        assert recorded is not None
        is_first = not self._of_kind and self._num_starts == 1
        self._of_kind[kind] = step.key([]), recorded
        self._recorded[kind] = recorded
        self._state = self._python_state() if self._state is None else self._state
        if is_first:
            words = f"replayed as {graphs_in_words(step)} on all ranks from step {step.place.step + 1} on"
            self.tell(CAPTURED, f"{words}; {TRIED}")
        recorded.take(leaves)
        return self._replay(recorded, step)

    @property
    def _go_ahead(self) -> Ability:
        return Ability.GIVE_UP if self._own_reason else Ability.RECORD

    def _rehearse(self, step: StepInput) -> None:
        """Record forwards and backwards of a step without the other ranks, only to see whether that is possible."""
        record, ddp, samples = self._make_recorder(self._device), self._ddp, step.place.num_samples
        state, graphs = self._python_state(), []

        def learn(batch: Any, micro: MicroBatch) -> None:
            ddp.backward(ddp.alone(batch, micro.num_samples, samples, micro.weight))

        try:
            for number, (batch, micro) in enumerate(zip(step.batches, step.micros, strict=True)):
                if number:
                    self._begin_part(number)
                graphs.append(record(partial(learn, batch, micro)))  # kept: what they share is in use until the last
        except Exception as error:  # noqa: BLE001  (whatever cannot be recorded can be run)
            self._give_up(f"recording the step failed: {cause_of(error)}")
        finally:
            ddp.abandon()
            self._begin_again()
        if found := changes(state, self._python_state()):
            self._give_up(f"the step changes {found[0]} in Python, which a replay would not")

    def _recorded_with(self, step: StepInput, leaves: list[Tensor], before: LastBatch) -> RecordedShape | None:
        """Record a step with the other ranks; return None if that failed here."""
        record = self._record = self._record or self._make_recorder(self._device)
        state = self._python_state()
        try:
            recorded = RecordedShape(partial(self._step_of, record, step), step.batches, leaves, before)
        except Exception as error:
            if self._ddp.is_reducing:
                raise DrivetrainError(
                    f"recording the step failed while DDP reduced its gradients, which DDP does not get over: "
                    f"{cause_of(error)}",
                    remedy="the same command with --capture off goes on from the last checkpoint",
                ) from error
            self._give_up(f"recording the step failed: {cause_of(error)}")
            return None
        finally:
            self._begin_again()
        if found := changes(state, self._python_state()):
            self._give_up(f"the step changes {found[0]} in Python, which a replay would not")
        return recorded

    def _compare(self) -> None:
        """Check state after hooks ran, as for one process. What follows from it, all ranks do together."""
        self._looks_again = False
        found = changes(self._state, self._python_state()) if self._state is not None else []
        if found and self._num_starts == MOST_STARTS:
            self._give_up(f"hooks change {found[0]} again and again, and each time the step has to be recorded anew")
        self._must_start_over = bool(found)

    def _give_up(self, reason: str) -> None:
        """Note why this rank has to give up: with the next step on which the ranks agree, all of them do."""
        self._own_reason = self._own_reason or reason

    def _give_up_together(self) -> None:
        reasons = self._hosts.gather(self._own_reason)
        whose, reason = next((rank, found) for rank, found in enumerate(reasons) if found)
        self.why_not = self._own_reason or f"on rank {whose}, {reason}"
        self._start()
        self.tell(NOT_CAPTURED, self.why_not)
