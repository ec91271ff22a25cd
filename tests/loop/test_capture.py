"""Captured runs are those without capture, bit for bit. Here a recorder that computes again stands in for CUDA's."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import drivetrain as dt
from drivetrain import DrivetrainError, LossSum
from drivetrain.core.hook import StepContext, Verdict
from drivetrain.loop import CapturedStepper, capture, read_back, schedule, trainer
from drivetrain.loop.read_back import DeviceResultTable, TableRow, _Sent
from drivetrain.moe import Balance, MixtureOfExperts
from drivetrain.run import assemble
from drivetrain.strategies import SingleStrategy
from tests.api.jobs import Trained, Variant, Vectors, make_model, run, vector_loss
from tests.api.test_resume import CrashingLoss, PlantedError, assert_identical
from tests.loop.rerun import Rerun

# 4 steps per epoch, the last of them ragged; saved every 5 steps.
BASE = Variant("mlp", torch.float32, global_batch=16, steps=26, dropout=0.3, num_samples=60, save_every=5)


class Captures:
    """Lets `train` capture on a CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steppers: list[CapturedStepper] = []
        self.recorder: Callable[..., Any] = Rerun
        self.recorders: list[Any] = []
        monkeypatch.setattr(schedule, "are_rounded", lambda optimizer: True)  # as on a GPU
        monkeypatch.setattr(assemble, "device_reasons", lambda run, *rest: "" if run.way.capture else "not asked for")
        monkeypatch.setattr(assemble, "CapturedStepper", self._make)

    def _make(self, strategy: SingleStrategy, *rest: Any, **options: Any) -> CapturedStepper:
        def make_recorder(device: torch.device) -> Any:
            self.recorders.append(self.recorder(strategy.parts.model, strategy.parts.optimizer))
            return self.recorders[-1]

        self.steppers.append(CapturedStepper(strategy, *rest, make_recorder=make_recorder, **options))
        return self.steppers[-1]

    def run(self, folder: Path, variant: Variant = BASE, capture: str = "on", **changes: Any) -> Trained:
        settings = changes.pop("settings", {})
        found = run(
            str(folder),
            variant,
            settings={"capture": capture, "monitor_gpu": False, "auto_optimize": False} | settings,
            **changes,
        )
        assert found is not None
        return found

    @property
    def num_recorded(self) -> int:
        return sum(recorder.num_recorded for recorder in self.recorders)

    @property
    def last(self) -> CapturedStepper:
        return self.steppers[-1]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "suite" / "events.jsonl").read_text().splitlines()]


def captured_in_words(folder: Path) -> str:
    return str(next(event["capture"] for event in reversed(events(folder)) if "capture" in event))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "suite" / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        (BASE, {"ema": 0.9}),
        (replace(BASE, kind="transformer", dropout=0.0, steps=14), {}),
        (replace(BASE, steps=14), {"settings": {"resident": "on"}}),
        (replace(BASE, steps=14), {"schedule": lambda optimizer: StepLR(optimizer, 3, 0.5)}),
    ],
    ids=["dropout, clipping, average, ragged epochs", "counted items", "resident data", "a torch scheduler"],
)
def test_the_same_as_without(captures: Captures, tmp_path: Path, variant: Variant, changes: dict[str, Any]) -> None:
    plain = captures.run(tmp_path / "plain", variant, "off", **changes)
    assert not captures.steppers
    assert_identical(captures.run(tmp_path / "captured", variant, **changes), plain)
    if "settings" in changes:
        assert "Rows" in repr([*captures.last._recorded]), "the gathering is recorded, too"
    recorder = captures.recorders[0]
    tails = variant.steps // 4
    # Three steps of each shape are the warm-up; a fourth is recorded and replayed, as are those after it.
    expected = variant.steps - 3 - (tails if tails <= 3 else 3)
    assert recorder.num_replayed == expected
    assert recorder.num_recorded == (1 if tails <= 3 else 2)
    assert captures.last.in_words() == (
        f"{recorder.num_recorded} shape{'s' if recorder.num_recorded > 1 else ''}, {expected} of {variant.steps} "
        "steps replayed"
    )
    told = [event for event in events(tmp_path / "captured") if event["event"] == "step captured"]
    assert len(told) == 1
    assert f"{expected} of" in captured_in_words(tmp_path / "captured")
    phases = (tmp_path / "captured" / "suite" / "speed.jsonl").read_text()
    assert '"step": 0.' in phases, "a replay is a phase of its own"


@pytest.mark.usefixtures("no_kernels")
def test_the_uncompiled_last_step_of_an_epoch_is_not_captured(captures: Captures, tmp_path: Path) -> None:
    variant = replace(BASE, steps=21)  # five ragged ones: compiled, the fourth would be recorded
    compiled = {"settings": {"compile": True}}
    plain = captures.run(tmp_path / "plain", variant, "off", **compiled)
    assert_identical(captures.run(tmp_path / "captured", variant, **compiled), plain)
    assert captures.last.in_words() == "1 shape, 13 of 21 steps replayed"


RESIDENT = {"resident": "on"}


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        (BASE, {"ema": 0.9, "settings": {"resident": "off"}}),
        (replace(BASE, kind="transformer", dropout=0.0), {}),
        (BASE, {"settings": RESIDENT}),
        (replace(BASE, num_samples=64), {"settings": RESIDENT, "clip_norm": None}),
    ],
    ids=["dropout and average", "counted items", "resident data", "one shape"],
)
def test_micro_batches_are_captured_one_by_one(
    captures: Captures, tmp_path: Path, variant: Variant, changes: dict[str, Any]
) -> None:
    """Steps of 16 samples as 6, 6 and 4; of 12 at the end of an epoch as 6 and 6."""
    seen = [Sets(5), Sets(5)]
    is_vectors = variant.kind == "mlp"
    runs = [
        captures.run(tmp_path / capture, variant, capture, micro_batch=6, hooks=[sets] if is_vectors else [], **changes)
        for capture, sets in zip(("off", "on"), seen, strict=True)
    ]
    assert_identical(runs[1], runs[0])
    assert seen[1].seen == seen[0].seen, "hooks get the batch of the last micro-step"
    tails = 0 if variant.num_samples == 64 else variant.steps // 4
    whole = variant.steps - tails
    # Of each shape, three steps are the warm-up; each that follows is a replay of as many graphs as it has parts.
    recorder = captures.recorders[0]
    assert recorder.num_replayed == 3 * (whole - 3) + 2 * max(0, tails - 3)
    assert recorder.num_recorded == 3 + (2 if tails else 0)
    told = next(event for event in events(tmp_path / "on") if event["event"] == "step captured")
    assert "3 CUDA graphs, one for each micro-batch" in told["words"]


def test_parts_with_counts_of_their_own_are_not_captured_in_micro_batches(captures: Captures, tmp_path: Path) -> None:
    """Their counts are copied to the device before each step, to another place each time."""

    def parts(model: nn.Module, batch: Any) -> Any:
        inputs, labels = batch
        losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        kept = labels != 0
        return {"all": losses.mean(), "kept": LossSum((losses * kept).sum(), kept.sum())}

    changes = {"loss": parts, "count": lambda batch: {"kept": (batch[1] != 0).sum()}, "micro_batch": 6}
    variant = replace(BASE, steps=6)
    captures.run(tmp_path, variant, **changes)
    assert "'kept'" in captured_in_words(tmp_path)
    assert not captures.steppers


@pytest.mark.parametrize(
    "changes", [{"clip_norm": None}, {"ema": 0.9}, {"valid_every": 9}], ids=["a loss alone", "with a norm", "validated"]
)
def test_steps_that_are_read_together(
    captures: Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Over the ends of windows of numbers, with a shape of its own for an epoch's last step, with saves between."""
    monkeypatch.setattr(read_back, "READ_BACK_SECONDS", 1e9)
    monkeypatch.setattr("drivetrain.data.feed.FIRST_NUMBERS", 40)
    monkeypatch.setattr("drivetrain.data.feed.FOLLOWING_NUMBERS", 100)
    if "valid_every" in changes:
        changes = {**changes, "valid": Vectors(replace(BASE, num_samples=21))}
    variant = replace(BASE, steps=90, save_every=25)
    monkeypatch.setattr(read_back, "MOST_READ_BACK", 1)
    plain = captures.run(tmp_path / "plain", variant, "off", settings=RESIDENT, **changes)
    for together in (1, 3, 32):
        monkeypatch.setattr(read_back, "MOST_READ_BACK", together)
        captured = captures.run(tmp_path / str(together), variant, settings=RESIDENT, **changes)
        assert_identical(captured, plain)
        assert captures.recorders[-1].num_recorded == 2
        assert captures.recorders[-1].num_replayed == 90 - 6
        seconds = [row["seconds"] for row in rows(tmp_path / str(together))]
        assert all(value > 0 for value in seconds)
    assert len(set(seconds)) < 45, "many were read together"


class Sets:
    """A hook that looks at the batch and takes down where it was called."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.seen: list[tuple[int, float, float]] = []

    def __call__(self, context: StepContext) -> Verdict | None:
        inputs, _ = context.batch()
        self.seen.append((context.step, context.loss, float(inputs.sum())))
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@settings(max_examples=10, deadline=None)
@given(
    num_samples=st.sampled_from([160, 320, 320, 163, 499, 31]),
    save_every=st.sampled_from([None, 7, 40]),
    hook_every=st.sampled_from([3, 19, 1000]),
    together=st.sampled_from([2, 10, 128]),
    under_way=st.sampled_from([1, 10, 300]),
    piece=st.sampled_from([64, 500, 65536]),
    draws=st.booleans(),
    average=st.booleans(),
)
def test_stretches_are_the_same_steps(
    num_samples: int,
    save_every: int | None,
    hook_every: int,
    together: int,
    under_way: int,
    piece: int,
    draws: bool,
    average: bool,
) -> None:
    """Wherever epochs, windows, hooks and checkpoints cut them; with rates that change, masks, an average."""
    variant = replace(
        BASE, num_samples=num_samples, save_every=save_every, dropout=0.3 if draws else 0.0, steps=70, global_batch=8
    )
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as name:
        patched.setattr(read_back, "MOST_READ_BACK", together)
        patched.setattr(read_back, "READ_BACK_SECONDS", 1e9)
        patched.setattr(read_back, "MOST_IN_FLIGHT", under_way)
        patched.setattr(read_back, "IN_FLIGHT_SECONDS", 1e9)
        patched.setattr("drivetrain.data.feed.FIRST_NUMBERS", piece)
        patched.setattr("drivetrain.data.feed.FOLLOWING_NUMBERS", piece)
        captures, folder = Captures(patched), Path(name)
        found = {}
        for capture in ("off", "on"):
            hook = Sets(hook_every)
            changes: dict[str, Any] = {"settings": RESIDENT, "hooks": (hook,), "ema": 0.9 if average else None}
            found[capture] = captures.run(folder / capture, variant, capture, **changes), hook.seen
        assert_identical(found["on"][0], found["off"][0])
        assert found["on"][0].rows == found["off"][0].rows
        assert found["on"][1] == found["off"][1]
        saved = {
            capture: [event["step"] for event in events(folder / capture) if event["event"] == "checkpoint"]
            for capture in found
        }
        assert saved["on"] == saved["off"]


def steps_alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that are not part of a stretch, once they are begun."""
    begun: list[int] = []
    begin = trainer.Trainer.begin

    def counted(self: trainer.Trainer, place: Any) -> Any:
        begun.append(place.step)
        return begin(self, place)

    monkeypatch.setattr(trainer.Trainer, "begin", counted)
    return begun


def test_the_host_does_little_for_most_steps(
    captures: Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_back, "READ_BACK_SECONDS", 1e9)
    monkeypatch.setattr(read_back, "MOST_READ_BACK", 20)
    monkeypatch.setattr(read_back, "IN_FLIGHT_SECONDS", 1e9)
    monkeypatch.setattr(read_back, "MOST_IN_FLIGHT", 50)
    begun = steps_alone(monkeypatch)
    num_at_once: list[int] = []
    go_on, records = trainer.Trainer._go_on, trainer.Trainer._records

    def going_on(self: trainer.Trainer) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(trainer.Trainer, "_records", reading)
            yield from go_on(self)

    def reading(self: trainer.Trainer, count: int) -> Any:
        entries = [*self._in_flight._entries]
        read, left = entries[:count], entries[count:]
        notes = [enqueued.reading.rows for enqueued in read]  # none of the first, which were not replayed
        assert all(note is None or note.sent is not left[-1].reading.rows.sent for note in notes)
        assert sum(enqueued.num_steps for enqueued in left) >= 50 - 20
        assert not any(enqueued.travels_with(read[-1]) for enqueued in left), "what travels together is read together"
        num_at_once.extend(enqueued.num_steps for enqueued in read)
        return records(self, count)

    monkeypatch.setattr(trainer.Trainer, "_go_on", going_on)
    variant = replace(BASE, steps=200, num_samples=100 * 16, save_every=1000)  # two epochs
    captures.run(tmp_path, variant, settings=RESIDENT)
    assert len(rows(tmp_path)) == 200
    assert captures.last.in_words() == "1 shape, 197 of 200 steps replayed"
    # Three to warm up and those after which nothing is known of how long a step takes; the ends; one in 21.
    assert len(begun) < 60
    assert max(num_at_once) == 20
    begun.clear()
    captures.run(tmp_path / "profiled", variant, settings={**RESIDENT, "profile": "3:5"})
    assert begun == [*range(200)], "a profiler is told of every step"


def test_a_mixture_is_balanced_after_each_step_of_a_stretch(
    captures: Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bias on each expert's choice moves by the load of every step, and the next step is routed by it."""
    monkeypatch.setattr(read_back, "READ_BACK_SECONDS", 1e9)

    def mixture() -> nn.Module:
        torch.manual_seed(4)
        balance = Balance(bias_rate=0.05, auxiliary=0.01)
        return nn.Sequential(
            nn.Linear(6, 8), MixtureOfExperts(8, 4, 16, k=2, balance=balance, way="dense"), nn.Linear(8, 4)
        )

    variant = replace(BASE, steps=90, save_every=40, num_samples=500)
    changes: dict[str, Any] = {"settings": RESIDENT, "model": mixture}
    plain = captures.run(tmp_path / "plain", variant, "off", **changes)
    found = captures.run(tmp_path / "captured", variant, **changes)
    assert captures.last.why_not == ""
    assert found.rows == plain.rows
    assert_identical(found, plain)
    assert any(bool(value.any()) for name, value in found.weights.items() if name.endswith("router.bias"))


class Simulated:
    """A device that takes its time for each step, and begins to send notes when it is past all that it was given.

    The clock is simulated as well, so that a busy machine changes nothing: looking at it takes the host 5 µs, and
    waiting for the device sets it forward.
    """

    def __init__(self, captures: Captures, monkeypatch: pytest.MonkeyPatch, step_seconds: float) -> None:
        self.now = time.perf_counter()
        self.done = 0.0  # when it is done with all that it was given
        send, take = DeviceResultTable.send, _Sent.take
        arrives: dict[_Sent, float] = {}
        device = self

        class Given(Rerun):
            def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
                super().__call__(body)
                return device.give

        def sending(noted: DeviceResultTable) -> None:
            notes = [*noted._unsent]
            send(noted)
            for note in notes:
                assert note.sent is not None
                arrives[note.sent] = self.done

        def taking(sent: _Sent, note: TableRow) -> Any:
            self.now = max(self.now, arrives[sent])
            return take(sent, note)

        self._step_seconds = step_seconds
        warm_up = CapturedStepper._warm_up

        def warming_up(stepper: CapturedStepper, *arguments: Any) -> Any:
            self.now += step_seconds  # a step that is not replayed takes as long
            return warm_up(stepper, *arguments)

        monkeypatch.setattr(CapturedStepper, "_warm_up", warming_up)
        monkeypatch.setattr(time, "perf_counter", self.look)
        captures.recorder = Given
        monkeypatch.setattr(DeviceResultTable, "send", sending)
        monkeypatch.setattr(_Sent, "take", taking)

    def look(self) -> float:
        self.now += 5e-6
        return self.now

    def give(self) -> None:
        self.done = max(self.done, time.perf_counter()) + self._step_seconds


@pytest.mark.parametrize("hook_every", [10_000, 50])
@pytest.mark.parametrize("step_seconds", [2e-3, 5e-3])
def test_seconds_are_those_of_the_device(
    captures: Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_seconds: float, hook_every: int
) -> None:
    """However far the host is ahead of it, which is not farther than was meant."""
    Simulated(captures, monkeypatch, step_seconds)
    most_ahead: list[int] = []
    enqueue = read_back.InFlight._enqueue

    def enqueued(self: read_back.InFlight, which: Any) -> None:
        enqueue(self, which)
        most_ahead.append(self._num_steps)

    monkeypatch.setattr(read_back.InFlight, "_enqueue", enqueued)
    variant = replace(BASE, steps=240, num_samples=8000, save_every=1000, dropout=0.0)
    began = time.perf_counter()
    captures.run(tmp_path, variant, settings=RESIDENT, hooks=(Sets(hook_every),))
    took = time.perf_counter() - began
    seconds = [row["seconds"] for row in rows(tmp_path)]
    assert sum(seconds) < took
    assert sum(seconds[40:]) == pytest.approx(200 * step_seconds, rel=0.2)
    lower, _, upper = statistics.quantiles(seconds[40:], n=4)
    assert lower > 0.5 * step_seconds
    assert upper < 2 * step_seconds
    meant = (read_back.IN_FLIGHT_SECONDS + 2 * read_back.READ_BACK_SECONDS) / step_seconds
    assert max(most_ahead[len(most_ahead) // 3 :]) < 2 * meant
    assert max(most_ahead) > 1.5 * read_back.READ_BACK_SECONDS / step_seconds


@pytest.mark.parametrize("bad", [52, 61])
def test_a_bad_step_among_those_read_together(
    captures: Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """It ends the run; those before it are written and saved, also right before it, and nothing after it is."""
    monkeypatch.setattr(read_back, "READ_BACK_SECONDS", 1e9)
    variant = replace(BASE, steps=90, save_every=25, num_samples=320)

    def spoilt(model: nn.Module, batch: Any) -> Tensor:
        model.calls += 1  # type: ignore[operator,assignment]
        return vector_loss(model, batch) / (model.calls != bad)  # type: ignore[operator]

    def counting() -> nn.Module:
        model = make_model(variant)
        model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        return model

    settings = {**RESIDENT, "bad_steps": "stop"}
    with pytest.raises(DrivetrainError, match=f"step {bad} "):
        captures.run(tmp_path, variant, settings=settings, loss=spoilt, model=counting, clip_norm=None)
    assert [row["step"] for row in rows(tmp_path)] == [*range(1, bad)]
    saved = [event["step"] for event in events(tmp_path) if event["event"] == "checkpoint"]
    assert saved == [25, 50]


def test_a_scheduler_that_changes_betas_is_not_captured(captures: Captures, tmp_path: Path) -> None:
    captures.run(tmp_path, schedule=lambda optimizer: OneCycleLR(optimizer, 0.01, total_steps=BASE.steps))
    assert not captures.steppers
    (told,) = [event for event in events(tmp_path) if event["event"] == "step not captured"]
    assert told["words"] == "OneCycleLR changes betas, which a replay would not"


def test_a_wish_to_stop_is_heard_at_once(captures: Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_back, "READ_BACK_SECONDS", 1e9)
    asked = []
    set_lr = trainer.Trainer._set_lr

    def asking(self: trainer.Trainer, step: int, num_steps: int | None) -> float:
        if step == 40 and not asked:
            asked.append(step)
            self.stop()
        return set_lr(self, step, num_steps)

    monkeypatch.setattr(trainer.Trainer, "_set_lr", asking)
    variant = replace(BASE, steps=90, save_every=80, num_samples=1000)
    whole = captures.run(tmp_path / "plain", variant, "off", settings=RESIDENT)
    asked.clear()
    stopped = captures.run(tmp_path / "captured", variant, settings=RESIDENT)
    # It comes in a stretch, with the 41st step. The 42nd carries it, and is judged behind the 43rd.
    assert [row["step"] for row in rows(tmp_path / "captured")][-1] == 43
    assert stopped.rows[:42] == whole.rows


@pytest.mark.parametrize(("most", "num_recorded"), [(0, 1), (1, 2)])
def test_of_rare_shapes_only_a_few_are_recorded(
    captures: Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, num_recorded: int
) -> None:
    monkeypatch.setattr(capture, "RARE", 3)  # every fourth step is an epoch's last
    monkeypatch.setattr(capture, "MOST_RARE", most)
    captures.run(tmp_path)
    assert captures.num_recorded == num_recorded


@pytest.mark.parametrize("trouble", ["fails", "changes Python"])
def test_a_rare_shape_that_cannot_be_recorded_leaves_the_others_alone(
    captures: Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """For want of memory, for example; or since Python does something that a replay would not."""
    monkeypatch.setattr(capture, "RARE", 3)
    plain = captures.run(tmp_path / "plain", replace(BASE, steps=40), "off")

    class Troubled(Rerun):
        def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
            replay = super().__call__(body)
            if len(captures.recorders) > 1 and trouble == "fails":
                raise torch.OutOfMemoryError
            if len(captures.recorders) > 1:
                self._model.seen = True  # type: ignore[assignment]
            return replay

    captures.recorder = Troubled
    found = captures.run(tmp_path / "captured", replace(BASE, steps=40))
    assert found.rows == plain.rows
    assert_identical(found, plain)
    assert captures.last.why_not == ""
    assert [recorder.num_replayed for recorder in captures.recorders] == [27, 0 if trouble == "fails" else 1]


def test_a_rare_shape_on_resident_data_makes_nobody_wait(
    captures: Captures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an epoch's last step came to is fetched right behind it, and the records are those of ordinary steps."""
    monkeypatch.setattr(capture, "RARE", 3)
    monkeypatch.setattr(read_back, "READ_BACK_SECONDS", 1e9)
    monkeypatch.setattr(read_back, "MOST_READ_BACK", 16)
    too_late: list[TableRow] = []
    on_its_way = TableRow._on_its_way

    def asked(note: TableRow) -> Any:
        if note.sent is None:
            too_late.append(note)
        return on_its_way(note)

    monkeypatch.setattr(TableRow, "_on_its_way", asked)
    variant = replace(BASE, steps=90, save_every=1000)
    plain = captures.run(tmp_path / "plain", variant, "off", settings=RESIDENT)
    found = captures.run(tmp_path / "captured", variant, settings=RESIDENT)
    assert captures.num_recorded == 2
    assert found.rows == plain.rows
    assert_identical(found, plain)
    assert len(too_late) <= 2, "only at the run's end is something fetched that is needed at once"


@pytest.mark.parametrize(("first", "second"), [("on", "on"), ("on", "off"), ("off", "on")])
def test_going_on_after_a_crash(captures: Captures, tmp_path: Path, first: str, second: str) -> None:
    """With the same capturing or another: a checkpoint does not know how steps were done."""
    whole = captures.run(tmp_path / "whole", capture="off")

    class Crash(Rerun):
        """Fails in its fourth replay, of step 9."""

        def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
            replay = super().__call__(body)

            def crashing() -> None:
                if self.num_replayed == 3:
                    raise PlantedError
                replay()

            return crashing

    folder = tmp_path / "broken"
    loss = CrashingLoss(vector_loss, 11) if first == "off" else vector_loss
    captures.recorder = Crash
    with pytest.raises(PlantedError):
        captures.run(folder, capture=first, loss=loss)
    captures.recorder = Rerun
    mended = captures.run(folder, capture=second)
    assert mended.resumed_from == 5
    assert_identical(mended, whole)
    if second == "on":
        assert captures.recorders[-1].num_replayed > 0


class Fails:
    """A recorder whose recording breaks off, after everything or in the middle."""

    def __init__(self, where: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._rerun, self._where, self._optimizer = Rerun(model, optimizer), where, optimizer

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        def failing() -> None:
            if self._where == "backward":
                with mock.patch("torch.autograd.backward", side_effect=RuntimeError("planted\nin the middle")):
                    body()
            elif self._where == "optimizer":
                with mock.patch.object(self._optimizer, "step", side_effect=RuntimeError("planted")):
                    body()
            body()
            raise RuntimeError("planted")

        return self._rerun(failing)


@pytest.mark.parametrize("where", ["backward", "optimizer", "end"])
def test_a_recording_that_fails_costs_nothing_but_itself(captures: Captures, tmp_path: Path, where: str) -> None:
    plain = captures.run(tmp_path / "plain", capture="off", ema=0.9)
    captures.recorder = partial(Fails, where)
    assert_identical(captures.run(tmp_path / "failed", ema=0.9), plain)
    told = [event for event in events(tmp_path / "failed") if event["event"] == "step not captured"]
    assert [event["words"] for event in told] == ["recording the step failed: RuntimeError: planted"]
    assert captured_in_words(tmp_path / "failed").startswith("not captured: recording the step failed")
    assert len(captures.recorders) == 1, "it was tried once"


def logging_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = vector_loss(model, batch)
    dt.log("double", 2 * loss)
    dt.log("first inputs", LossSum(batch[0][:, 0].sum(), (batch[0][:, 0] != 0).sum()))
    dt.log("constant", 3.0)
    return loss


@pytest.mark.parametrize("resident", ["off", "on"])
def test_replays_log_their_own_values(captures: Captures, tmp_path: Path, resident: str) -> None:
    settings = {"resident": resident}
    captures.run(tmp_path / "plain", capture="off", loss=logging_loss, settings=settings)
    captures.run(tmp_path / "captured", loss=logging_loss, settings=settings)
    assert captures.recorders[0].num_replayed > 0
    expected = [{**row, "seconds": 0} for row in rows(tmp_path / "plain")]
    assert [{**row, "seconds": 0} for row in rows(tmp_path / "captured")] == expected
    assert len({row["double"] for row in expected}) == len(expected)


def test_a_number_that_is_logged_and_changes_is_not_captured(captures: Captures, tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        dt.log("clock", time.perf_counter())
        return vector_loss(model, batch)

    captures.run(tmp_path, loss=loss)
    assert captures.last.why_not == "the step changes what it logs as 'clock' in Python, which a replay would not"


def test_a_step_with_a_memory_is_not_captured(captures: Captures, tmp_path: Path) -> None:
    def make_loss() -> Callable[..., Tensor]:
        seen: list[int] = []

        def loss(model: nn.Module, batch: Any) -> Tensor:
            seen.append(1)
            return vector_loss(model, batch) / len(seen)

        return loss

    plain = captures.run(tmp_path / "plain", capture="off", loss=make_loss())
    assert_identical(captures.run(tmp_path / "captured", loss=make_loss()), plain)
    assert captures.last.why_not == "the step changes loss's seen in Python, which a replay would not"
    assert not captures.recorders


class Often:
    """Every three steps."""

    every = 3

    def __init__(self, change: Callable[[nn.Module, int], None]) -> None:
        self._change = change

    def __call__(self, context: StepContext) -> Verdict | None:
        self._change(context.model, context.step)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def halve(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def less_dropout_once(model: nn.Module, step: int) -> None:
    model.layers[2].p = 0.3 if step < 12 else 0.1  # type: ignore[index,union-attr]


def other_dropout(model: nn.Module, step: int) -> None:
    model.layers[2].p = 0.3 / step  # type: ignore[index,union-attr]


@pytest.mark.parametrize("resident", ["off", "on"])
@pytest.mark.parametrize(
    ("change", "steps", "num_starts"), [(halve, 20, 1), (less_dropout_once, 20, 2), (other_dropout, 60, None)]
)
def test_hooks_between_steps(
    captures: Captures,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[nn.Module, int], None],
    steps: int,
    num_starts: int | None,
    resident: str,
) -> None:
    monkeypatch.setattr(read_back, "READ_BACK_SECONDS", 1e9)
    variant = replace(BASE, steps=steps, num_samples=160, save_every=60)  # one shape
    settings = {"resident": resident}
    plain = captures.run(tmp_path / "plain", variant, "off", hooks=[Often(change)], settings=settings)
    begun = steps_alone(monkeypatch)
    trained = captures.run(tmp_path / "captured", variant, hooks=[Often(change)], settings=settings)
    assert_identical(trained, plain)
    assert {*range(0, steps, 3)} <= {*begun}, "what a hook may have changed is looked at before anything is replayed"
    if num_starts is None:
        assert "again and again" in captures.last.why_not
        assert "model.layers.2.p" in captures.last.why_not
    else:
        assert captures.last.why_not == ""
        assert len(captures.recorders) == num_starts
