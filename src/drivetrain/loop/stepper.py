"""Runs one optimizer step over one global batch: forward and backward of each micro-batch, then the strategy's step."""

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from drivetrain.core.log import notice
from drivetrain.core.metrics import StepOutcome
from drivetrain.core.world import World
from drivetrain.data.batch import MicroBatch, note_one_sample
from drivetrain.data.division import Place, Stretch, key_of, mix
from drivetrain.data.keyed_items import DRAWS_FROM_ALL, Draws, host_states, seed_all
from drivetrain.monitor.phases import BACKWARD, COPY, DATA, FORWARD, OPTIMIZER, NoClock, PhaseClock
from drivetrain.strategies.base import ObjectiveCall, Strategy
from drivetrain.strategies.turns import TurnsStrategy

# Odd and far apart, so that no two (step, turn, micro-step) of a run meet before `mix` takes them apart.
_STEP, _MICRO_STEP, _TURN = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xA0761D6478BD642F
_HOOKS = 0x400C5  # in the key of what hooks draw


def _generator_of(device: torch.device) -> torch.Generator | None:
    """Return the generator that a model draws from on its device; None on a CPU, whose own is seeded anyway."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.mps._get_default_mps_generator() if device.type == "mps" else None


class Stepper:
    """Runs steps. What the model draws at random is keyed by (seed, step, turn, rank, micro-step), and so is not saved.

    What an optimizer draws is keyed by (seed, step, turn), and what a hook draws by (seed, step, number of the hook):
    copies of the model have to move alike on all ranks.

    torch's are set for every model, since a dropout may begin later than the first step. Python's and numpy's are set
    only for models that were seen to draw from them (`draws`): all three take 6 µs of a step, and torch's alone 1.4.
    """

    def __init__(
        self,
        strategy: Strategy,
        objective: ObjectiveCall,
        world: World,
        seed: int,
        *,
        draws: Draws = DRAWS_FROM_ALL,
        update_key: Callable[[], int | None] = lambda: None,
        before_micro_step: Callable[[Any], None] | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """Prepare to run steps.

        Args:
            strategy: How a step is run.
            objective: What the strategy made for the forward.
            world: The ranks.
            seed: The job's seed.
            draws: The generators that the model was seen to draw from.
            update_key: Returns the key of what the optimizer draws, before its first step; None: it draws nothing.
            before_micro_step: Called with each batch.
            clock: Measures the phases of a step.
        """
        self.clock = clock or NoClock()
        self.why_not = ""  # why steps are not captured (any more), if capture was asked for
        self._strategy, self._objective, self._world = strategy, objective, world
        self._turns = strategy if isinstance(strategy, TurnsStrategy) else None
        self._key, self._hooks_key = key_of(seed, world.rank), key_of(seed, _HOOKS)
        self._find_update_key: Callable[[], int | None] | None = update_key
        self._update_key: int | None = None
        self._now = 0, 0  # the step and the turn
        self._draws = draws
        self._host_states: Any = None  # of Python's and numpy's generators before a batch, if they are looked at
        # To a GPU, the feed has told the wait for the data; since then it was the copy that had to be waited for.
        self._arrives = COPY if world.device.type == "cuda" else DATA
        self._before_micro_step = before_micro_step
        # The sizes of micro-batches that compiled steps were compiled for; others run eagerly. None: any size.
        self.compiled_sizes: Container[int] | None = None
        self.keeps_batch = False  # whether the last batch will be asked for: only then it is not freed
        self._last_batch: Any = None
        # The losses of this rank's last micro-steps, each with its step, to tell whose was bad.
        self._own_losses: deque[tuple[int, torch.Tensor]] | None = deque(maxlen=512) if world.size > 1 else None
        # Called with the first loss of each epoch, before its backward; not while steps are recorded.
        self.look_at_loss: Callable[[int, torch.Tensor], None] | None = None
        self._looked_in = -1  # the epoch
        self.is_moving = False  # whether the strategy's step is being run: weights may be half moved if it fails
        self._generator = _generator_of(world.device)

    def run(self, place: Place, micro_batches: Iterable[MicroBatch], stop: float) -> StepOutcome:
        if self._turns is not None:
            return self._run_turns(self._turns, place, list(micro_batches), stop)
        num_samples = 0
        try:
            for micro in micro_batches:
                num_samples = micro.num_samples
                self.forward_backward(self.begin(place, micro), place, micro)
        except Exception as error:
            note_one_sample(error, num_samples)
            raise
        return self.end(stop)

    def _run_turns(
        self, strategy: TurnsStrategy, place: Place, micro_batches: Sequence[MicroBatch], stop: float
    ) -> StepOutcome:
        """Take the turns of a step, each over all of its micro-batches."""
        for turn in strategy.due(place.step):
            with strategy.taking(turn, stop):
                for micro in micro_batches:
                    self.forward_backward(self.begin(place, micro, turn), place, micro)
                self.seed_update()
        return self.end(stop)

    def end(self, stop: float) -> StepOutcome:
        """Run the strategy's step after the last micro-step."""
        self.is_moving = True
        self.seed_update()
        outcome = self._strategy.step(stop)
        self.is_moving = False
        self.clock.lap(OPTIMIZER)
        return outcome

    def seed_update(self) -> None:
        """Set the generators for the optimizer's step, if it may draw from them."""
        find, self._find_update_key = self._find_update_key, None
        if find is not None:
            self._update_key = find()
        if self._update_key is None:
            return
        step, turn = self._now
        self._seed_everything(mix(self._update_key + step * _STEP + turn * _TURN))

    def seed_hook(self, step: int, number: int) -> None:
        """Set the generators for one of the hooks after a step: alike on all ranks, where it may change weights."""
        self._seed_everything(mix(self._hooks_key + step * _STEP + number * _MICRO_STEP))

    def _seed_everything(self, key: int) -> None:
        seed_all(key)
        if self._generator is not None:
            self._generator.manual_seed(key >> 1)

    @property
    def may_go_on(self) -> bool:
        """Whether similar steps can follow the last one without being handed their batches."""
        return False

    def go_on(self, stretch: Stretch, begins: Iterable[int]) -> StepOutcome:
        """Run the steps that `begins` yields, of the range after the last step. The outcome covers all of them."""
        raise NotImplementedError

    def look_again(self) -> None:
        """Check for changes: the model may have been modified in Python since the last step."""

    def start_over(self) -> None:
        """Discard captured steps: what they compute has changed."""

    def close(self) -> None:
        """Release captured steps, at the end of a run: before the process group whose collectives they hold."""

    def in_words(self) -> str:
        """Return whether steps are captured, for the summary; empty if capture was not asked for."""
        return f"not captured: {self.why_not}" if self.why_not else ""

    def begin(self, place: Place, micro: MicroBatch, turn: int = 0) -> Any:
        """Return the data of a micro-step, which the feed copied to the device, with the generators set for it."""
        self.clock.lap(self._arrives)
        self._now = place.step, turn
        self._seed_model(self._key_of(place.step, micro.number, turn))
        is_looked_at = not self._draws.python and (place.start == 0 or place.step & (place.step - 1) == 0)
        self._host_states = host_states() if is_looked_at else None
        if self._before_micro_step is not None:
            self._before_micro_step(micro.batch)
        if self.keeps_batch and micro.weight:
            self._last_batch = micro.batch
        return micro.batch

    def last_batch(self) -> Any:
        """Return the last batch of this step, as the loss function got it; None where none counted or was kept."""
        return self._last_batch

    def keep_batch(self, keep: bool) -> None:
        """Set whether the batch of the step that begins is kept."""
        self.keeps_batch, self._last_batch = keep, None

    def forward_backward(self, batch: Any, place: Place, micro: MicroBatch) -> None:
        """Run forward and backward of one micro-batch; gradients add up."""
        if self.runs_eagerly(micro):  # the backward, too, which may run a forward again
            with torch.compiler.set_stance("force_eager"):
                self._forward_backward(batch, place, micro)
        else:
            self._forward_backward(batch, place, micro)
        if self._host_states is not None and self._host_states != host_states():
            self._draws = DRAWS_FROM_ALL
            notice(
                f"step {place.step + 1} draws from Python's or numpy's generators, and the first one did not: what was "
                "drawn before now has no key, so a run that is resumed differs. From the next step on it has one. "
                "torch's generators always have: torch.rand(()) in place of random.random()"
            )

    def runs_eagerly(self, micro: MicroBatch) -> bool:
        """Return whether this micro-batch runs uncompiled in compiled steps."""
        return self.compiled_sizes is not None and micro.num_samples not in self.compiled_sizes

    def _forward_backward(self, batch: Any, place: Place, micro: MicroBatch) -> None:
        strategy, clock = self._strategy, self.clock
        if micro.is_last:
            objective = self._objective(batch, micro.num_samples, place.num_samples, micro.weight)
            clock.lap(FORWARD)
            self._note(objective, place)
            if self._own_losses is not None:
                clock.watch_backward(objective)
            strategy.backward(objective)
            clock.end_backward()
        else:
            with strategy.accumulate():
                objective = self._objective(batch, micro.num_samples, place.num_samples, micro.weight)
                clock.lap(FORWARD)
                self._note(objective, place)
                strategy.backward(objective)
                clock.lap(BACKWARD)

    def _note(self, objective: torch.Tensor, place: Place) -> None:
        if self._own_losses is not None:
            self._own_losses.append((place.step, objective.detach()))
        if self.look_at_loss is not None and place.epoch != self._looked_in:
            self._looked_in = place.epoch
            self.look_at_loss(place.epoch, objective)

    def own_loss_is_bad(self, step: int) -> bool:
        """Return whether this rank had a loss that is not finite in the step that followed `step` steps.

        The host waits for the device: it is called after bad steps only.
        """
        return any(of == step and not math.isfinite(loss.item()) for of, loss in self._own_losses or ())

    def _key_of(self, step: int, micro_step: int, turn: int = 0) -> int:
        return mix(self._key + step * _STEP + micro_step * _MICRO_STEP + turn * _TURN)

    def _seed_model(self, key: int) -> None:
        if self._draws.python:
            seed_all(key)
        else:
            torch.default_generator.manual_seed(key >> 1)
        if self._generator is not None:
            self._generator.manual_seed(key >> 1)
