"""The search over ways to run a step, with made-up machines: what it finds, what it tries, and when it stops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.plan.forecast import FRAGMENTATION, MemoryModel, Peak
from drivetrain.plan.knobs import Others, StepWay
from drivetrain.plan.tune import DoesNotFitError, Measurement, Scope, Tried, Tuned, UnusableError, tune


class Machine:
    """Takes a fixed time per micro-step and a time per sample; memory is a line. Time passes as things are measured."""

    def __init__(
        self,
        overhead: float = 1e-3,
        per_sample: float = 1e-4,
        fixed: int = 1000,
        sample: int = 100,
        memory: int = 10**9,
        compile_gain: float = 0.5,
        compile_seconds: float = 20.0,
        block_gain: float = 0.0,
        launch_share: float = 0.0,
        channels_last_gain: float = 0.0,
        slower_above: int | None = None,
        problems: dict[str, str] | None = None,
        gains: dict[object, float] | None = None,
        is_cpu: bool = False,
        held: int = 0,
        floor: int = 0,
    ) -> None:
        self.__dict__.update(locals())
        self.gains = gains or {}
        self.now = 0.0
        self.ways: list[StepWay] = []

    def measure(self, way: StepWay, seconds: float) -> Measurement:
        self.ways.append(way)
        self.now += 1.0 if seconds else 0.1
        if way.compile_mode and (self.problems or {}).get("compile"):
            return Measurement(problem=self.problems["compile"])
        peak = max(self.floor, self.fixed + self.sample * way.micro_batch)
        if peak > self.memory:
            return Measurement(problem="out of memory", out_of_memory=True)
        taken = (self.overhead * (not way.capture) + self.per_sample * way.micro_batch) / way.micro_batch
        if self.slower_above and way.micro_batch > self.slower_above:
            taken *= 2
        setup = 0.0
        if way.compile_mode:
            setup = self.compile_seconds * (1.0 if way.compile_scope == "loss" else 0.1)
            self.now += setup
            taken *= 1 - (self.block_gain if way.compile_scope == "blocks" else self.compile_gain)
        if way.channels_last:
            taken /= 1 + self.channels_last_gain
        taken /= 1 + self.gains.get(way.precision, 0.0)
        taken /= 1 + self.gains.get(way.num_threads, 0.0)
        return Measurement(
            sample_seconds=taken,
            peak_bytes=0 if self.is_cpu else peak,
            setup_seconds=setup,
            launch_share=self.launch_share,
            is_brief=not seconds,
            parameter_bytes=self.held,
        )

    def tune(
        self, micro_batch: int = 64, others: dict[str, tuple[object, ...]] | None = None, **scope: object
    ) -> Tuned:
        values = {
            "rank_samples": 64,
            "remaining_samples": 10**7,
            "memory_limit_bytes": self.memory,
            "counts_memory": not self.is_cpu,
            "others": {field: Others(values=values) for field, values in (others or {}).items()},
            **scope,
        }
        return tune(StepWay(micro_batch=micro_batch), Scope(**values), self.measure, lambda: self.now)


def test_the_largest_that_fits_where_larger_is_faster() -> None:
    machine = Machine(memory=5000)
    tuned = machine.tune()
    assert tuned.way.micro_batch == 32  # 64 would take 7400; the next of equal parts is 32, with 4200
    assert not any(tried.measurement.out_of_memory for tried in tuned.tried)
    assert "samples/s measured" in tuned.reasons["micro_batch"]


def test_a_job_of_few_steps_takes_the_largest_that_is_bound_to_fit_after_one_step_of_it() -> None:
    few = {"remaining_samples": 64 * 81, "budget_share": 0.05, "others": {"compile_mode": ("default",)}}
    machine = Machine(held=900)
    found = machine.tune(**few)
    assert found.way == StepWay(micro_batch=64)
    assert found.forecast_bytes == 0, "a bound is no forecast"
    assert [(way.micro_batch, way.compile_mode) for way in machine.ways] == [(1, None), (64, None)]
    assert machine.now == pytest.approx(0.2)  # both were brief
    # By the bound, 900 + 64 × (1100 - 900), it may not fit: one more size shows that it does.
    machine = Machine(held=900, memory=9000)
    assert machine.tune(**few).way == StepWay(micro_batch=64)
    assert [way.micro_batch for way in machine.ways] == [1, 32, 64]
    # What does not fit after all is not taken.
    machine = Machine(held=900, memory=5000)
    assert machine.tune(**few).way == StepWay(micro_batch=32)
    assert sum(tried.measurement.out_of_memory for tried in machine.tune(**few).tried) == 0


@pytest.mark.parametrize(("overhead", "is_captured"), [(1e-3, True), (5e-3, False)])
def test_launches_are_recorded_where_a_short_job_has_time_for_little_else(overhead: float, is_captured: bool) -> None:
    """Some 10 s of work: a twentieth is spent on the first look. Steps of 1 ms are all launches; of 5 ms, maybe not."""
    steps = round(10 / (overhead + 64e-6))
    machine = Machine(overhead=overhead, per_sample=1e-6, held=1)
    found = machine.tune(
        remaining_samples=64 * steps,
        budget_share=0.05,
        least_job_seconds=5.0,
        others={"capture": (True,), "precision": ("tf32",)},
    )
    assert found.way.capture is is_captured
    assert found.way.precision == "fp32"
    assert "was not tried" in found.reasons["precision"]
    assert machine.now < 2.5


@given(fixed=st.integers(1, 1000), sample=st.integers(1, 200), floor=st.integers(0, 10_000), share=st.integers(1, 100))
def test_what_a_job_of_few_steps_takes_fits(fixed: int, sample: int, floor: int, share: int) -> None:
    """Also where small steps all peak in the optimizer's step, and say nothing of larger ones."""
    machine = Machine(fixed=fixed, sample=sample, floor=floor, held=fixed, memory=10_000)
    few = {"rank_samples": share, "remaining_samples": share * 81, "budget_share": 0.05}
    try:
        found = machine.tune(micro_batch=share, **few)
    except DoesNotFitError:
        assert max(floor, fixed + sample) > 10_000 * (1 - FRAGMENTATION)
        return
    assert max(floor, fixed + sample * found.way.micro_batch) <= 10_000
    room = 10_000 * (1 - FRAGMENTATION) - fixed
    assert found.way.micro_batch >= min(share, room // sample) // 4 or floor > room + fixed
    # A floor beyond half of the memory hides how soon it ends above: there one step may be too large.
    num_too_large = sum(tried.measurement.out_of_memory for tried in found.tried)
    assert num_too_large <= (floor - fixed > room / 2)


def test_the_fastest_and_not_the_largest() -> None:
    assert Machine(slower_above=16).tune().way.micro_batch == 16


@pytest.mark.parametrize(("per_sample", "chosen"), [(1e-3, 32), (1e-5, 64)])
def test_a_few_percent_decide_only_where_a_step_is_long_enough_to_measure_them(per_sample: float, chosen: int) -> None:
    class Uneven(Machine):
        def measure(self, way: StepWay, seconds: float) -> Measurement:
            found = super().measure(way, seconds)
            factor = 0.95 if way.micro_batch == 32 else 1.0
            return found.model_copy(update={"sample_seconds": found.sample_seconds * factor})

    assert Uneven(overhead=0.0, per_sample=per_sample).tune().way.micro_batch == chosen


@given(
    fixed=st.integers(0, 10**6), sample=st.integers(1, 10**5), memory=st.integers(10, 10**7), share=st.integers(1, 300)
)
def test_what_is_chosen_fits_and_memory_rarely_runs_out(fixed: int, sample: int, memory: int, share: int) -> None:
    machine = Machine(fixed=fixed, sample=sample, memory=memory)
    try:
        tuned = machine.tune(rank_samples=share)
    except DoesNotFitError:
        assert fixed + sample > memory
        return
    chosen = tuned.way.micro_batch
    assert fixed + sample * chosen <= memory
    assert 1 <= chosen <= share
    assert sum(tried.measurement.out_of_memory for tried in tuned.tried) <= 2


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        Machine(fixed=2000, memory=1500).tune()
    assert len(caught.value.tried) == 1
    with pytest.raises(DoesNotFitError):
        Machine(fixed=2000, memory=1500).tune(fixed_micro_batch="asked for")


def test_a_pinned_micro_batch_is_left_alone() -> None:
    machine = Machine(compile_gain=0.4)
    tuned = machine.tune(micro_batch=7, fixed_micro_batch="asked for", others={"compile_mode": ("default",)})
    assert {tried.way.micro_batch for tried in tuned.tried if not tried.measurement.is_brief} == {7}
    assert tuned.forecast_bytes == 1000 + 700  # from smaller ones, for their memory alone
    assert tuned.way == StepWay(micro_batch=7, compile_mode="default")


def test_the_largest_micro_batch_is_taken_where_it_is_part_of_what_is_learnt() -> None:
    faster_when_small = {"overhead": 1e-6, "per_sample": 1e-6, "slower_above": 16}
    assert Machine(**faster_when_small).tune().way.micro_batch == 16
    tuned = Machine(**faster_when_small).tune(largest_micro_batch="the loss couples samples")
    assert tuned.way.micro_batch == 64
    assert tuned.reasons["micro_batch"] == "the largest that fits, and kept: the loss couples samples"
    tight = Machine(fixed=1000, memory=1000 + 100 * 40, **faster_when_small)
    assert tight.tune(largest_micro_batch="coupled").way.micro_batch == 32


def test_compiling_pays_or_is_not_used() -> None:
    modes = {"others": {"compile_mode": ("default",)}}
    long, short, shorter = (
        Machine(compile_gain=gain).tune(remaining_samples=n, **modes)
        for gain, n in ((0.5, 10**7), (0.05, 1_200_000), (0.5, 500_000))
    )
    assert long.way.compile_mode == "default"
    assert "saves" in long.reasons["compile_mode"]
    assert "costs 20 s" in long.reasons["compile_mode"]
    assert short.way.compile_mode is None  # measured: it saves 7 s of 139 and costs 20
    assert short.reasons["compile_mode"].startswith("not used")
    assert any(tried.way.compile_mode for tried in short.tried)
    assert shorter.way.compile_mode is None  # 58 s: trying could cost more than may be risked
    assert shorter.reasons["compile_mode"].startswith("not tried")
    assert not any(tried.way.compile_mode for tried in shorter.tried)


def test_blocks_are_compiled_where_the_whole_loss_takes_too_long() -> None:
    """Blocks cost 2 s, the whole loss 20 s: a short job takes the first, a long one whichever is faster."""
    both = {"others": {"compile_mode": ("default",)}, "compile_costs": {"blocks": 3.0, "loss": 20.0}}
    machine = Machine(block_gain=0.5, compile_gain=0.6)
    short, long = (machine.tune(remaining_samples=n, **both) for n in (400_000, 10**7))
    assert (short.way.compile_mode, short.way.compile_scope) == ("default", "blocks")
    assert "costs 2 s" in short.reasons["compile_mode"]
    assert short.reasons["compile_scope"].startswith("the whole loss at once: not tried")
    assert (long.way.compile_mode, long.way.compile_scope) == ("default", "loss")
    assert "costs 20 s" in long.reasons["compile_scope"]
    slower = Machine(block_gain=0.6, compile_gain=0.5).tune(**both)
    assert slower.way.compile_scope == "blocks"
    neither = Machine(block_gain=-0.1, compile_gain=-0.1).tune(**both)
    assert neither.way == neither.way.but(compile_mode=None)


def test_the_whole_loss_is_not_compiled_at_once_where_its_parts_are_as_fast() -> None:
    """Blocks and the loss around them cost 2 s each, everything at once 20 s, for nothing but fewer launches."""
    scopes = {"others": {"compile_mode": ("default",)}, "compile_costs": {"blocks": 3.0, "both": 3.0, "loss": 20.0}}

    def tried(machine: Machine) -> tuple[str, list[str]]:
        found = machine.tune(**scopes)
        compiled = dict.fromkeys(way.compile_scope for way in machine.ways if way.compile_mode)
        return found.way.compile_scope, list(compiled)

    busy, host_bound, unknown = (Machine(block_gain=0.5, compile_gain=0.6, launch_share=s) for s in (0.3, 0.9, 0.0))
    assert tried(busy) == ("both", ["blocks", "both"])
    assert tried(host_bound)[1] == ["blocks", "both", "loss"]
    assert tried(unknown)[1] == ["blocks", "both", "loss"]
    slower = Machine(block_gain=0.6, compile_gain=0.5, launch_share=0.3)
    assert tried(slower) == ("blocks", ["blocks", "both"])
    assert "was not tried: launching is quick enough" in busy.tune(**scopes).reasons["compile_scope"]
    long = Machine(block_gain=0.5, compile_gain=0.6, launch_share=0.3)
    long.tune(**scopes, remaining_samples=10**8)
    assert any(way.compile_scope == "loss" for way in long.ways), "half a percent of an hour pays for trying"


@pytest.mark.parametrize("is_slow_for_good", [True, False])
def test_a_trial_that_something_else_slowed_is_measured_once_more(is_slow_for_good: bool) -> None:
    class Shared(Machine):
        def measure(self, way: StepWay, seconds: float) -> Measurement:
            is_first = way not in self.ways
            found = super().measure(way, seconds)
            if way.compile_scope != "both" or not (is_first or is_slow_for_good):
                return found
            return found.model_copy(update={"sample_seconds": 2 * found.sample_seconds})

    machine = Shared(block_gain=0.5, compile_gain=0.6, launch_share=0.3)
    scopes = {"others": {"compile_mode": ("default",)}, "compile_costs": {"blocks": 3.0, "both": 3.0}}
    found = machine.tune(**scopes)
    assert found.way.compile_scope == ("blocks" if is_slow_for_good else "both")
    assert sum(way.compile_scope == "both" for way in machine.ways) == 2
    assert [tried.way.compile_scope for tried in found.tried].count("both") == 1
    assert found.measurement_of(machine.ways[-1]).setup_seconds > 0


def test_what_was_compiled_for_earlier_trials_is_part_of_setting_a_way_up() -> None:
    """A captured way took 0.1 s, since its code was there: FP8 beside it, or a fresh process, has none of it."""
    eager = StepWay(micro_batch=4)
    whole = eager.but(compile_mode="default")
    blocks, both = whole.but(compile_scope="blocks"), whole.but(compile_scope="both")
    took = {eager: 0.0, whole: 30.0, blocks: 8.0, both: 5.0, blocks.but(capture=True): 0.1, both.but(capture=True): 0.2}
    tried = tuple(Tried(way=way, measurement=Measurement(setup_seconds=taken)) for way, taken in took.items())
    found = Tuned(way=blocks, tried=tried, reasons={})
    assert found.setup_seconds_of(eager) == 0.0
    assert found.setup_seconds_of(whole.but(capture=True)) == 30.0
    assert found.setup_seconds_of(blocks.but(capture=True)) == pytest.approx(8.1)
    assert found.setup_seconds_of(both.but(capture=True)) == pytest.approx(13.3)


@given(
    gain=st.floats(-0.5, 0.9), cost=st.floats(0.0, 100.0), seconds=st.floats(1.0, 10_000.0), expected=st.floats(1, 60)
)
def test_compiling_never_costs_more_than_may_be_risked(
    gain: float, cost: float, seconds: float, expected: float
) -> None:
    """Whatever it gains: the job with it takes no longer than without, but for the trying of what does not pay."""
    machine = Machine(compile_gain=gain, compile_seconds=cost, overhead=0.0, per_sample=1e-3)
    scope = {
        "others": {"compile_mode": ("default",)},
        "compile_costs": {"loss": expected},
        "remaining_samples": int(seconds * 1000),
    }
    tuned = machine.tune(**scope)
    was_tried = any(tried.way.compile_mode for tried in tuned.tried)
    assert was_tried == (expected <= 0.12 * int(seconds * 1000) * 1e-3)
    if tuned.way.compile_mode:
        assert cost < gain * seconds


def test_a_job_pays_only_so_much_for_measuring() -> None:
    limits = {
        "budget_share": 0.05,
        "least_job_seconds": 5.0,
        "others": {"compile_mode": ("default",), "num_threads": (1,)},
    }
    tiny = Machine(is_cpu=True)
    tuned = tiny.tune(remaining_samples=10_000, fixed_micro_batch="asked for", **limits)
    assert len(tiny.ways) == 1, "one step tells that a job of one second is not worth measuring for"
    assert "too little to measure for" in tuned.reasons["num_threads"]
    small = Machine(is_cpu=True, gains={1: 0.5})
    tuned = small.tune(remaining_samples=200_000, fixed_micro_batch="asked for", **limits)
    assert tuned.way.num_threads == 1
    assert small.now <= 23 * 0.05 + 2.0, "a measurement that was begun is finished"
    assert "1 thread is +50%" in tuned.reasons["num_threads"]


def test_a_step_is_captured_where_it_is_short_or_launching_takes_most_of_it() -> None:
    scope = {"others": {"capture": (True,), "precision": ("fp32",)}}
    short = Machine(overhead=1e-3, per_sample=1e-6).tune(**scope)
    assert short.way.capture
    long = Machine(overhead=1e-3, per_sample=1e-3).tune(**scope)
    assert not long.way.capture
    assert "keep the device busy" in long.reasons["capture"]
    launched = Machine(overhead=1e-1, per_sample=1e-3, launch_share=0.9).tune(**scope)
    assert launched.way.capture, "a long step, most of which the host takes to launch"
    busy = Machine(overhead=1e-1, per_sample=1e-3, launch_share=0.4).tune(**scope)
    assert not busy.way.capture
    assert busy.reasons["capture"].endswith("the host launches them in 40% of their time")
    parts = Machine(overhead=1e-6, per_sample=1e-6, slower_above=16).tune(**scope)
    assert parts.way.micro_batch == 16
    assert parts.way.capture, "each micro-batch is a graph"
    scope["others"]["compile_mode"] = ("default",)
    assert Machine(overhead=1e-2, per_sample=1e-3, launch_share=0.4, compile_gain=0.5).tune(**scope).way.capture
    hardly = Machine(overhead=1e-4, per_sample=1e-3, launch_share=0.4, compile_gain=0.5).tune(**scope)
    assert hardly.way.compile_mode
    assert hardly.way.capture, "equally fast in a trial, but not held up by what else the host does in a run"
    assert "captured is +0%" in hardly.reasons["capture"]
    assert hardly.reasons["capture"].endswith("do not wait for a busy host")
    worse = Machine(overhead=-1e-3, per_sample=1e-3, launch_share=0.4, compile_gain=0.5)
    slower = worse.tune(**scope, fixed_micro_batch="asked for")
    assert not slower.way.capture
    assert "captured would be -2%" in slower.reasons["capture"]
    busy = Machine(overhead=1e-2, per_sample=1e-3, launch_share=0.2, compile_gain=0.5)
    assert not busy.tune(**scope).way.capture
    brief = Machine(overhead=1e-2, per_sample=1e-3, launch_share=0.4, compile_gain=0.5, compile_seconds=1.0)
    found = brief.tune(**scope, remaining_samples=200_000)
    assert not found.way.capture, "three seconds are too much for it"
    assert "not tried: the job takes 1" in found.reasons["capture"]
    brief.launch_share = 0.7
    assert brief.tune(**scope, remaining_samples=200_000).way.capture, "and worth it where it gains more"
    why_none = "a CPU has nothing to record"
    scope = Scope(
        rank_samples=64,
        remaining_samples=10**7,
        memory_limit_bytes=10**9,
        others={"capture": Others(why_none=why_none)},
    )
    assert tune(StepWay(micro_batch=64), scope, Machine().measure, lambda: 0.0).reasons["capture"] == why_none


def test_a_compiled_step_that_is_launch_bound_is_captured_in_a_job_of_minutes() -> None:
    class HostBound(Machine):
        """Compiled, its kernels take 30 ms (blocks) or 20 ms (all of it in parts); the host needs 40 to launch them."""

        def measure(self, way: StepWay, seconds: float) -> Measurement:
            found = super().measure(way, seconds)
            if way.compile_mode is None:
                return found.model_copy(update={"launch_share": 0.5})
            host, kernels = (0.040, 0.030) if way.compile_scope == "blocks" else (0.041, 0.020)
            taken = kernels if way.capture else host
            return found.model_copy(update={"sample_seconds": taken / 64, "launch_share": 0.98})

    costs = {"blocks": 10.0, "both": 10.0}
    scope = {"others": {"capture": (True,), "compile_mode": ("default",)}, "compile_costs": costs}
    slow = HostBound(overhead=0.0, per_sample=1e-3, compile_seconds=200.0)  # 20 s for each of the two
    minutes = slow.tune(remaining_samples=64 * 4000, compile_share=1.0, **scope)
    assert minutes.way.capture
    assert minutes.way.compile_scope == "blocks", "too short to load the other once more"
    hour = HostBound(overhead=0.0, per_sample=1e-3).tune(remaining_samples=64 * 10**5, **scope)
    assert (hour.way.capture, hour.way.compile_scope) == (True, "both")
    assert "+50%" in hour.reasons["compile_scope"]
    brief = HostBound(overhead=0.0, per_sample=1e-3, compile_seconds=1.0).tune(remaining_samples=64 * 1000, **scope)
    assert not brief.way.capture
    # On a slow host a trial takes longer, and so it is worth less.
    slow = HostBound(overhead=0.0, per_sample=1e-3)
    slow.measure = lambda way, seconds: HostBound.measure(slow, way, seconds).model_copy(update={"trial_seconds": 20.0})  # type: ignore[method-assign]
    assert not slow.tune(remaining_samples=64 * 4000, **scope).way.capture


@pytest.mark.parametrize(("gain", "taken"), [(0.5, True), (0.1, False)])
def test_another_precision_where_it_is_faster(gain: float, taken: bool) -> None:
    machine = Machine(gains={"bf16": gain})
    scope = Scope(
        rank_samples=64,
        remaining_samples=10**7,
        memory_limit_bytes=10**9,
        others={"precision": Others(values=("bf16",), least_gain=0.2)},
    )
    tuned = tune(StepWay(micro_batch=64), scope, machine.measure, lambda: machine.now)
    assert (tuned.way.precision == "bf16") is taken


def test_what_does_not_fit_is_recomputed() -> None:
    class Recomputing(Machine):
        def measure(self, way: StepWay, seconds: float) -> Measurement:
            self.sample = 10 if way.recompute else 2000
            return super().measure(way, seconds)

    tuned = Recomputing(fixed=500, memory=1500).tune(others={"recompute": (True,)})
    assert tuned.way.recompute
    assert tuned.way.micro_batch == 64
    assert "does not fit" in tuned.reasons["recompute"]


def test_what_cannot_be_compiled_is_said() -> None:
    tuned = Machine(problems={"compile": "nothing was compiled"}).tune(others={"compile_mode": ("default",)})
    assert tuned.way.compile_mode is None
    assert tuned.reasons["compile_mode"] == "not used: nothing was compiled"


@pytest.mark.parametrize(("gain", "taken"), [(0.5, True), (0.01, False), (-0.2, False)])
def test_channels_last_where_it_is_faster(gain: float, taken: bool) -> None:
    assert Machine(channels_last_gain=gain).tune(others={"channels_last": (True,)}).way.channels_last is taken


@pytest.mark.parametrize(("more_bytes", "kept"), [(0, True), (10**9, False)])
def test_what_is_faster_and_takes_more_than_may_be_used_is_left(more_bytes: int, kept: bool) -> None:
    """A sharded model's weights that are kept after forward: they fit the device, but not its part that is free."""
    machine = Machine(fixed=10**9, sample=1, memory=16 * 10**8)

    def measure(way: StepWay, seconds: float) -> Measurement:
        found = machine.measure(way, seconds)
        if way.reshard:
            return found
        peak, faster = found.peak_bytes + more_bytes, found.sample_seconds / 2
        return found.model_copy(update={"peak_bytes": peak, "sample_seconds": faster})

    scope = Scope(
        rank_samples=64,
        remaining_samples=10**7,
        memory_limit_bytes=machine.memory,
        others={"reshard": Others(values=(False,)), "compile_mode": Others()},
    )
    tuned = tune(StepWay(micro_batch=64), scope, measure, lambda: machine.now)
    assert tuned.way.reshard is not kept
    assert ("takes 2 GB, more than may be used" in tuned.reasons["reshard"]) is not kept


def test_measuring_ends_with_its_time() -> None:
    machine = Machine()
    tuned = machine.tune(budget_seconds=0.2, others={"channels_last": (True,)}, rank_samples=4096)
    assert machine.now < 3
    assert "time for measuring was over" in tuned.reasons["channels_last"]


def test_a_start_that_cannot_be_measured() -> None:
    def broken(way: StepWay, seconds: float) -> Measurement:
        return Measurement(problem="ValueError: no such column")

    with pytest.raises(UnusableError, match="no such column"):
        tune(
            StepWay(micro_batch=4),
            Scope(rank_samples=4, remaining_samples=10, memory_limit_bytes=1),
            broken,
            lambda: 0.0,
        )


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 10**9)), min_size=2, max_size=6))
def test_no_measured_peak_is_above_the_line(points: list[tuple[int, int]]) -> None:
    peaks = [Peak(*point) for point in points]
    if len({peak.micro_batch for peak in peaks}) < 2:
        with pytest.raises(ValueError):
            MemoryModel.fitted(peaks)
        return
    model = MemoryModel.fitted(peaks)
    assert model.sample_bytes >= 0
    for peak in peaks:
        assert model.peak_bytes(peak.micro_batch) >= peak.num_bytes - 1


@given(st.integers(0, 10**9), st.integers(1, 10**7), st.integers(1, 10**12))
def test_a_line_is_found_again(fixed: int, sample: int, limit: int) -> None:
    model = MemoryModel.fitted([Peak(size, fixed + sample * size) for size in (1, 2, 4)])
    assert model.peak_bytes(64) == pytest.approx(fixed + 64 * sample, rel=1e-6, abs=4)
    largest = model.largest(limit, 10**6)
    assert fixed + sample * largest <= limit * (1 - FRAGMENTATION) * (1 + 1e-6) + 1 or largest == 0
