"""When a job counts as hanging, on a simulated clock, and which rank it hangs on."""

import pytest

from drivetrain.launch.root_cause import HangWatch, main_stack, odd_ranks

PACKAGE = "/site-packages/"


def dump(*frames: str) -> str:
    """What `faulthandler` writes, innermost first, with another thread before it."""
    lines = "\n".join(f'  File "{PACKAGE}{frame.split(":")[0]}", line 7 in {frame.split(":")[1]}' for frame in frames)
    other = (
        'Thread 0x0000ffff80 [pt_autograd_0] (most recent call first):\n  File "/x/threading.py", line 1 in wait\n\n'
    )
    return f"{other}Current thread 0x0000ffff95 [python] (most recent call first):\n{lines}\n"


ROOT = ("drivetrain/loop/trainer.py:run", "drivetrain/launch/worker.py:main", "<string>:<module>")
BACKWARD = dump(
    "torch/autograd/graph.py:_engine_run_backward", "drivetrain/strategies/ddp.py:backward",
    "drivetrain/loop/stepper.py:learn", *ROOT,
)  # fmt: skip
LOADER = dump("drivetrain/core/faults.py:_wait_for_data", "drivetrain/data/loader.py:batches", *ROOT)
GIL = dump("drivetrain/core/faults.py:_hold_gil", "drivetrain/run/recovery.py:called", *ROOT)
BARRIER = dump(
    "torch/distributed/distributed_c10d.py:barrier", "drivetrain/core/world.py:barrier",
    "drivetrain/core/faults.py:at_step", *ROOT,
)  # fmt: skip


@pytest.mark.parametrize("odd", [LOADER, GIL, BARRIER, ""], ids=["loader", "gil", "barrier", "no answer"])
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("first", [True, False])
def test_the_odd_one_is_named(odd: str, world: int, first: bool) -> None:
    culprit = 0 if first else world - 1
    assert odd_ranks({rank: odd if rank == culprit else BACKWARD for rank in range(world)}) == [culprit]


def test_a_stopped_process_is_the_odd_one_whatever_the_stacks_say() -> None:
    assert odd_ranks({0: BACKWARD, 1: BACKWARD, 2: ""}, frozenset({2})) == [2]


def test_where_all_wait_alike_nobody_is_named() -> None:
    assert odd_ranks({0: BACKWARD, 1: BACKWARD}) == []
    assert odd_ranks({0: "", 1: ""}) == []
    assert odd_ranks({0: BACKWARD}) == [0], "alone it can only be itself"


def test_the_main_thread_is_found_among_others() -> None:
    assert main_stack(GIL)[0] == (f"{PACKAGE}drivetrain/core/faults.py", "_hold_gil")
    assert main_stack(BACKWARD + GIL)[0][1] == "_hold_gil", "the last dump"
    assert main_stack("") == []


class Clock:
    """Two ranks that make steps on a simulated clock."""

    def __init__(self, **settings: float) -> None:
        self.watch, self.now, self.step = HangWatch(**settings), 1000.0, 0

    def steps(self, count: int, seconds: float, phase: str = "step") -> None:
        for _ in range(count):
            self.now += seconds
            self.step += 1
            for rank in (0, 1):
                self.watch.observe(rank, self.step, phase, False, self.now)

    def at_rest(self, seconds: float, *phases: str, frozen: bool = False) -> list[tuple[float, bool]]:
        """When something is said in so many seconds of silence, and whether it is the end."""
        found, began = [], self.now
        for _ in range(int(seconds * 10)):
            self.now += 0.1
            for rank, phase in enumerate(phases or ("step", "step")):
                self.watch.observe(rank, self.step, phase, frozen and rank == 1, self.now)
            stall = self.watch.stall(self.now)
            if stall is not None and stall.is_over not in [is_over for _, is_over in found]:
                found.append((round(self.now - began, 1), stall.is_over))
        return found


@pytest.mark.parametrize(
    ("step_seconds", "report", "end"), [(0.01, 10.0, 60.0), (1.0, 10.0, 60.0), (4.0, 20.0, 80.0), (30.0, 150.0, 600.0)]
)
def test_limits_follow_from_the_steps(step_seconds: float, report: float, end: float) -> None:
    clock = Clock()
    clock.steps(50, step_seconds)
    (reported, is_over), (ended, is_end) = clock.at_rest(end + 5)
    assert (reported, is_over) == (pytest.approx(report, abs=0.2), False)
    assert (ended, is_end) == (pytest.approx(end, abs=0.2), True)


def test_steps_that_are_three_times_slower_at_times_are_no_hang() -> None:
    clock = Clock()
    for number in range(1000):
        clock.steps(1, 12.0 if number % 7 == 3 else 4.0)
        assert clock.watch.stall(clock.now + 3.9) is None or number < 3
    assert clock.watch.median == 4.0


def test_planning_compiling_and_long_hooks_are_not_ended() -> None:
    assert not Clock().at_rest(599, "start", "start")
    clock = Clock()
    clock.steps(20, 0.1)
    assert clock.at_rest(3000, "compile", "step") == [(pytest.approx(600, abs=0.3), False)]
    clock.steps(5, 0.1)
    found = clock.at_rest(3000, "hooks", "step")
    assert found == [(pytest.approx(120, abs=0.3), False)], "the first of its kind may take as long as it wants"


def test_what_a_script_does_after_its_training_is_its_own() -> None:
    clock = Clock()
    for _ in range(2):
        clock.steps(20, 0.1)
        assert not clock.at_rest(4000, "end", "end")


def test_a_later_validation_is_judged_by_those_before() -> None:
    clock = Clock()
    clock.steps(20, 0.1)
    clock.at_rest(100, "validation", "validation")
    clock.steps(20, 0.1)
    found = clock.at_rest(2500, "validation", "validation")
    assert found == [(pytest.approx(500, abs=2), False), (pytest.approx(2000, abs=2), True)]


def test_a_stopped_process_is_told_in_any_phase() -> None:
    clock = Clock()
    clock.steps(20, 0.1)
    found = clock.at_rest(70, "validation", "validation", frozen=True)
    assert found == [(pytest.approx(10, abs=0.3), False), (pytest.approx(60, abs=0.3), True)]


def test_shorter_limits_and_none() -> None:
    clock = Clock(least_seconds=3.0)
    clock.steps(20, 0.01)
    assert clock.at_rest(4) == [(pytest.approx(0.5, abs=0.2), False), (pytest.approx(3.0, abs=0.2), True)]
    clock = Clock(least_seconds=0.0)
    clock.steps(20, 0.01)
    assert not clock.at_rest(100)
