"""Decides whether a way of running a step repeats bit by bit, and finds the cheapest one that does.

It only decides. The caller runs the first steps of the job in two processes and passes the results; nothing here
knows devices or models, so every decision can be tested with made-up trials.
"""

from collections.abc import Callable, Iterator

from pydantic import Field

from drivetrain.core.value import Value
from drivetrain.plan.knobs import Repeat, StepWay

MOST_COST = 0.03  # of a step's time, for which a way that repeats is taken by itself
IN_WORDS: dict[Repeat, str] = {
    "off": "the fastest kernels",
    "fixed": "kernels that are not chosen by timing",
    "strict": "deterministic kernels",
}


class Bits(Value):
    """The results of a way's first steps in one process: a digest for each thing that is compared."""

    losses: tuple[str, ...] = ()  # by step
    tensors: dict[str, str] = Field(
        default_factory=dict
    )  # weights, buffers and optimizer state after the last of them, by name
    repeats_here: bool = True  # whether the same process got the same once more
    problem: str = ""  # why there are none

    def difference(self, other: "Bits") -> str:
        """Return the first thing that differs, in words; empty if nothing does."""
        for step, (one, two) in enumerate(zip(self.losses, other.losses, strict=False), start=1):
            if one != two:
                return f"the loss of step {step}"
        for name in [*self.tensors, *(name for name in other.tensors if name not in self.tensors)]:
            if self.tensors.get(name) != other.tensors.get(name):
                return f"{name} after step {len(self.losses)}"
        return "" if len(self.losses) == len(other.losses) else "the number of steps"


class RepeatTrial(Value):
    """A way, and whether its first steps gave the same results in two processes."""

    way: StepWay
    repeats: bool = False
    difference: str = ""  # the first thing that differed
    repeats_here: bool = True  # inside each of the two
    processes: int = 2  # 1: one after the other in this process, as the job cannot be made elsewhere
    problem: str = ""  # why it could not be tried
    cost: float | None = None  # relative to a step of the fastest way; None: not measured


class Repeatability(Value):
    """The row `repeatable` of a plan."""

    value: bool | None = None  # None: not measured
    reason: str = ""
    cost: float | None = None  # of the way that is followed, relative to the fastest
    trials: tuple[RepeatTrial, ...] = ()

    def as_plain(self) -> dict[str, object]:
        value = {True: "yes", False: "no", None: "not measured"}[self.value]
        cost = {} if self.cost is None else {"cost": f"{100 * self.cost:+.1f} %"}
        tried = [
            {
                "way": str(trial.way),
                "repeats": "not tried: " + trial.problem if trial.problem else "yes" if trial.repeats else "no",
                **({"differs": trial.difference} if trial.difference else {}),
                **({} if trial.cost is None else {"cost": f"{100 * trial.cost:+.1f} %"}),
            }
            for trial in self.trials
        ]
        return {"value": value, "why": self.reason, **cost, **({"tried": tried} if tried else {})}


Attempt = Callable[[StepWay], RepeatTrial]  # runs its first steps: twice in this process, or here and in a fresh one
CostOf = Callable[[StepWay], float | None]  # relative to the chosen way, measured side by side; None: it could not be
WhyNot = Callable[[], str]  # why nothing more is to be tried; empty while there is time


def find_repeatable(
    chosen: StepWay,
    here: Attempt,
    elsewhere: Attempt,
    cost_of: CostOf,
    why_stop: WhyNot,
    *,
    pinned: set[str],
    is_cudnn: bool,
    eager_cost: float | None,
) -> tuple[StepWay, Repeatability]:
    """Try the chosen way, and if it does not repeat, others until one does that costs little.

    A fresh process has to compile anew, which takes longer than all the rest. So a way gets there only if its steps
    repeat in this process, and if it costs so little that it would be taken.

    Args:
        chosen: The fastest way, or what the user pinned.
        here: Runs a way's first steps twice in this process.
        elsewhere: Runs them in a fresh process, and compares them with those that were run here.
        cost_of: Measures how much longer a step of a way takes.
        why_stop: Says why no more may be tried.
        pinned: Which fields of a way the user fixed: these are never changed.
        is_cudnn: Whether the model has modules that cuDNN computes, so that its deterministic kernels may be enough.
        eager_cost: What leaving the compiler out costs, as far as it was measured before; None: not known.
    """
    first = here(chosen)
    if first.repeats and not first.problem:
        first = elsewhere(chosen)
    trials = [first]
    if first.problem:
        return chosen, Repeatability(reason=f"could not be tried: {first.problem}", trials=tuple(trials))
    if first.repeats:
        return chosen, Repeatability(value=True, reason=_repeats(first), cost=0.0, trials=tuple(trials))
    found: list[RepeatTrial] = []
    stopped = ""
    for way in _variants(chosen, first, pinned, is_cudnn=is_cudnn, eager_cost=eager_cost):
        if found and way.compile_mode is None and (eager_cost is None or eager_cost >= (found[0].cost or 0.0)):
            continue  # dearer than what repeats already
        stopped = why_stop()
        if stopped:
            break
        trial, cost = here(way), None
        if trial.repeats:
            cost = cost_of(way)
            would_be_taken = "repeat" in pinned or (cost is not None and cost <= MOST_COST)
            trial = (elsewhere(way) if would_be_taken else trial).model_copy(update={"cost": cost})
        trials.append(trial)
        if not trial.repeats:
            continue
        found.append(trial)
        if would_be_taken:
            return way, Repeatability(value=True, reason=_taken(first, trial), cost=trial.cost, trials=tuple(trials))
    cheapest = min(found, key=lambda trial: float("inf") if trial.cost is None else trial.cost, default=None)
    reason = _not_taken(first, cheapest, trials[1:], stopped)
    return chosen, Repeatability(value=False, reason=reason, cost=0.0, trials=tuple(trials))


def _variants(
    chosen: StepWay, first: RepeatTrial, pinned: set[str], *, is_cudnn: bool, eager_cost: float | None
) -> Iterator[StepWay]:
    """Yield the variants, cheapest first. A difference inside one process is not due to kernels chosen by timing."""
    levels: tuple[Repeat, ...] = (chosen.repeat,)
    if "repeat" not in pinned:
        levels = ("fixed", "strict") if first.repeats_here or is_cudnn else ("strict",)
    may_be_eager = chosen.compile_mode is not None and "compile_mode" not in pinned
    eager = [chosen.but(compile_mode=None, repeat=level) for level in levels] if may_be_eager else []
    if eager_cost is not None and eager_cost <= MOST_COST:
        yield from eager
        eager = []
    if "repeat" not in pinned:
        yield from (chosen.but(repeat=level) for level in levels)
    yield from eager


def _repeats(trial: RepeatTrial) -> str:
    if trial.processes > 1:
        return "the same bits here and in a fresh process with compile caches of its own"
    return "the same bits twice in this process; a restart was not tried, as no other process can make this job"


def _taken(first: RepeatTrial, taken: RepeatTrial) -> str:
    cost = "its cost is not known" if taken.cost is None else f"it costs {100 * taken.cost:+.1f} % of a step's time"
    compiled = ", not compiled" if first.way.compile_mode and not taken.way.compile_mode else ""
    return (
        f"{IN_WORDS[taken.way.repeat]}{compiled}: {_repeats(taken)}; {cost}. "
        f"Without, {first.difference} differs between two runs"
    )


def _not_taken(first: RepeatTrial, cheapest: RepeatTrial | None, others: list[RepeatTrial], stopped: str) -> str:
    differs = f"{first.difference} differs between two runs of the same job"
    if cheapest is not None:
        cost = "an unknown cost" if cheapest.cost is None else f"{100 * cheapest.cost:+.1f} % of a step's time"
        way = cheapest.way
        flags = [] if way.compile_mode == first.way.compile_mode else ["--no-compile"]
        flags.append("--deterministic" if way.repeat == "strict" else f"--repeatable {way.repeat}")
        where = "" if cheapest.processes > 1 else " in one process"
        return f"{differs}; {IN_WORDS[way.repeat]} repeat{where}, at {cost}: {' '.join(flags)} takes them"
    if stopped:
        return f"{differs}; what would repeat was not looked for: {stopped}"
    failed = next((trial.problem for trial in others if trial.problem), "")
    return f"{differs}; nothing that was tried repeats" + (f" ({failed})" if failed else "")
