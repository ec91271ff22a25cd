"""On a GPU: captured runs are those without capture, bit for bit, whatever happens between steps."""

import gc
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import LossSum
from drivetrain.core.metrics import StepOutcome
from drivetrain.core.precision import Precision
from drivetrain.core.world import World
from drivetrain.loop import (
    CapturedStep,
    CapturedStepper,
    CudaRecorder,
    MicroInput,
    capture,
    make_capturable,
    own_stream,
)
from drivetrain.loop.read_back import PinnedSlots, Reading
from drivetrain.strategies import SingleStrategy, StrategyParts, Trial
from drivetrain.strategies.optimizer_state import put_rates_on_device
from tests.api.jobs import Mlp, Trained, Variant, run, vector_loss
from tests.api.test_resume import PlantedError, assert_identical
from tests.loop.test_capture import Often, halve, less_dropout_once, logging_loss, other_dropout
from tests.waits import READINGS, refuse_waits

pytestmark = pytest.mark.gpu

# 20 steps per epoch, the last of them ragged: rare, and recorded in the fourth epoch.
BASE = Variant("mlp", torch.float32, global_batch=32, steps=100, num_samples=32 * 19 + 8, save_every=50)
OFF, ON = {"capture": "off"}, {"capture": "on"}


def trained(folder: Path, settings: dict[str, Any], variant: Variant = BASE, **changes: Any) -> Trained:
    given = {"precision": "fp32", "monitor_gpu": False, "auto_optimize": False, "resident": "off", **settings}
    found = run(str(folder), variant, changes.pop("micro_batch", None), 0, "single_gpu", given, **changes)
    assert found is not None
    return found


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "suite" / "events.jsonl").read_text().splitlines()]


def why_not(folder: Path) -> str:
    return str(next((event["words"] for event in events(folder) if event["event"] == "step not captured"), ""))


def capture_of(folder: Path) -> str:
    return str(next(event["capture"] for event in reversed(events(folder)) if "capture" in event))


def counted_loss(model: nn.Module, batch: Any) -> LossSum:
    """Over the samples that are not of class 0: how many there are, only the device knows."""
    kept = batch[1] != 0
    losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return LossSum((losses * kept).sum(), kept.sum())


def counting_model() -> nn.Module:
    model = Mlp(0.0)
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    return model


def exploding_loss(model: nn.Module, batch: Any) -> Tensor:
    """Finite, but the gradients of steps 40 and 80 overflow once they are scaled up."""
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    model.calls += 1  # type: ignore[operator,assignment]
    return loss * (1.0 + 1e36 * (model.calls % 40 == 0))  # type: ignore[operator]


def normed_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


VALID = TensorDataset(torch.randn(23, 6), torch.randint(0, 4, (23,)))


@pytest.mark.parametrize(
    ("variant", "settings", "changes"),
    [
        (BASE, {}, {}),
        (replace(BASE, dropout=0.3), {}, {}),
        (BASE, {}, {"clip_norm": None, "weight_decay": None}),
        (replace(BASE, dropout=0.1), {"precision": "bf16"}, {}),
        (BASE, {"precision": "fp16"}, {"model": counting_model, "loss": exploding_loss}),
        (BASE, {}, {"ema": 0.9}),
        (BASE, {}, {"loss": counted_loss}),
        (BASE, {}, {"model": normed_model}),
        (BASE, {}, {"optimizer": momentum}),
        (replace(BASE, num_samples=32 * 3 + 8), {}, {}),
        (replace(BASE, dropout=0.3, save_every=7), {}, {"valid": VALID, "valid_every": 9, "ema": 0.9}),
        (replace(BASE, dropout=0.3), {"resident": "on"}, {"ema": 0.9}),
        (replace(BASE, dropout=0.3), {}, {"hooks": [Often(halve)]}),
        (replace(BASE, dropout=0.3), {}, {"hooks": [Often(less_dropout_once)]}),
        (replace(BASE, dropout=0.3), {}, {"micro_batch": 10, "ema": 0.9}),
        (replace(BASE, dropout=0.3), {"resident": "on"}, {"micro_batch": 10}),
        (replace(BASE, dropout=0.1), {"precision": "bf16"}, {"micro_batch": 8, "loss": counted_loss}),
        (BASE, {"precision": "fp16"}, {"micro_batch": 16, "model": counting_model, "loss": exploding_loss}),
        (BASE, {}, {"micro_batch": 8, "model": normed_model, "clip_norm": None}),
        (replace(BASE, dropout=0.3), {"resident": "on"}, {"global_batch": {0: 16, 50: 64}, "ema": 0.9}),
        (replace(BASE, dropout=0.3), {}, {"global_batch": {0: 16, 40: 32}, "micro_batch": 16}),
    ],
    ids=[
        "clipped, decayed", "dropout", "bare", "bf16", "fp16 with skipped steps", "average", "counted items",
        "batch norm", "momentum", "two shapes", "saves and validation between", "resident data",
        "weights changed between", "dropout changed between", "micro-batches", "resident micro-batches",
        "counted micro-batches in bf16", "micro-batches in fp16", "batch norm of micro-batches",
        "a batch that grows", "micro-batches of a batch that grows",
    ],
)  # fmt: skip
def test_the_same_as_without(
    tmp_path: Path, variant: Variant, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    plain = trained(tmp_path / "plain", OFF | settings, variant, **changes)
    captured = trained(tmp_path / "captured", ON | settings, variant, **changes)
    assert why_not(tmp_path / "captured") == ""
    assert "of 100 steps replayed" in capture_of(tmp_path / "captured")
    assert int(capture_of(tmp_path / "captured").split(", ")[1].split()[0]) >= 80
    assert_identical(captured, plain)
    if settings.get("precision") == "fp16":
        assert sum(row["skipped"] for row in plain.rows) >= 2
        assert sum(row["skipped"] for row in plain.rows) < 50
    if variant.num_samples < 200:
        assert capture_of(tmp_path / "captured").startswith("2 shapes")


def test_an_optimizer_that_is_not_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its form for capturing rounds differently: compared with the same form, never recorded."""
    changes = {"optimizer": lambda groups: torch.optim.NAdam(groups, lr=1e-2), "clip_norm": 0.5}
    captured = trained(tmp_path / "captured", ON, **changes)
    assert why_not(tmp_path / "captured") == ""
    monkeypatch.setattr(capture, "WARM_STEPS", 10**9)
    assert_identical(captured, trained(tmp_path / "plain", ON, **changes))
    assert capture_of(tmp_path / "plain").startswith("not captured")


class Crash:
    """At one step, once."""

    every = 1
    at = 0

    def __call__(self, context: Any) -> None:
        if context.step == Crash.at:
            raise PlantedError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(("first", "second"), [(ON, ON), (ON, OFF), (OFF, ON)])
def test_going_on_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: dict[str, Any], second: dict[str, Any]
) -> None:
    variant = replace(BASE, dropout=0.3, save_every=10)
    whole = trained(tmp_path / "whole", ON, variant, hooks=[Crash()])
    monkeypatch.setattr(Crash, "at", 57)
    with pytest.raises(PlantedError):
        trained(tmp_path / "broken", first, variant, hooks=[Crash()])
    monkeypatch.setattr(Crash, "at", 0)
    mended = trained(tmp_path / "broken", second, variant, hooks=[Crash()])
    assert mended.resumed_from == 50
    assert_identical(mended, whole)


def waiting_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = vector_loss(model, batch)
    return loss * 2 if loss.item() > 1.3 else loss


def masking_loss(model: nn.Module, batch: Any) -> Tensor:
    kept = batch[1] != 0
    return functional.cross_entropy(model(batch[0])[kept], batch[1][kept])


def coin_loss(model: nn.Module, batch: Any) -> Tensor:
    return vector_loss(model, batch) * (2.0 if torch.rand(()) < 0.5 else 1.0)


def python_coin_loss(model: nn.Module, batch: Any) -> Tensor:
    return vector_loss(model, batch) * (1 + random.random())


def make_counting_loss() -> Callable[..., Tensor]:
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(1)
        return vector_loss(model, batch) / len(seen)

    return loss


@pytest.mark.parametrize(
    ("make_loss", "words"),
    [
        (lambda: waiting_loss, "waits for the device"),
        (lambda: masking_loss, "waits for the device"),
        (lambda: coin_loss, "torch's random generator of the CPU"),
        (lambda: python_coin_loss, "draws from Python's or numpy's generators"),
        (make_counting_loss, "loss's seen"),
    ],
)
def test_what_cannot_be_replayed_is_run_as_ever(
    tmp_path: Path, make_loss: Callable[[], Callable[..., Tensor]], words: str
) -> None:
    variant = replace(BASE, steps=20)
    plain = trained(tmp_path / "plain", OFF, variant, loss=make_loss())
    captured = trained(tmp_path / "captured", ON, variant, loss=make_loss())
    assert words in why_not(tmp_path / "captured")
    assert capture_of(tmp_path / "captured").startswith("not captured")
    assert_identical(captured, plain)
    if words.startswith("waits"):
        assert f"{Path(__file__).name}:" in why_not(tmp_path / "captured"), "it says where"


def waits_when_recorded(model: nn.Module, batch: Any) -> Tensor:
    """What the warm-up cannot notice: the recording itself fails, in the middle of a step, and is invalid then."""
    loss = vector_loss(model, batch)
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    return loss


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_recording_that_fails_costs_nothing_but_itself(tmp_path: Path, precision: str) -> None:
    variant = replace(BASE, dropout=0.3, save_every=10)
    settings = {"precision": precision}
    plain = trained(tmp_path / "plain", OFF | settings, variant, loss=waits_when_recorded)
    failed = trained(tmp_path / "failed", ON | settings, variant, loss=waits_when_recorded)
    assert "recording the step failed" in why_not(tmp_path / "failed")
    assert_identical(failed, plain)
    # Nothing of it is left: the next run captures, and draws as it should.
    after = trained(tmp_path / "after", ON, variant)
    assert why_not(tmp_path / "after") == ""
    assert_identical(after, trained(tmp_path / "again", OFF, variant))


class Waiting:
    """Garbage that waits for the device when it goes, which cannot be recorded, as the end of a communicator."""

    def __init__(self) -> None:
        self.itself = self  # a cycle: only the garbage collector finds it

    def __del__(self) -> None:
        torch.cuda.synchronize()


def littering_loss(model: nn.Module, batch: Any) -> Tensor:
    Waiting()
    return vector_loss(model, batch)


def test_garbage_is_left_where_it_is_while_a_step_is_recorded(tmp_path: Path) -> None:
    before = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    try:
        eager = trained(tmp_path / "eager", OFF, loss=littering_loss)
        captured = trained(tmp_path / "captured", ON, loss=littering_loss)
    finally:
        gc.set_threshold(*before)
    assert "steps replayed" in capture_of(tmp_path / "captured"), capture_of(tmp_path / "captured")
    assert_identical(captured, eager)


def test_hooks_that_change_the_model_again_and_again(tmp_path: Path) -> None:
    variant = replace(BASE, dropout=0.3)
    plain = trained(tmp_path / "plain", OFF, variant, hooks=[Often(other_dropout)])
    captured = trained(tmp_path / "captured", ON, variant, hooks=[Often(other_dropout)])
    assert_identical(captured, plain)


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        ({}, {"micro_batch": 1}, "32 micro-batches"),
        ({"activations": "offload"}, {}, "offload"),
        ({"device_assertions": True}, {}, "device assertions"),
        ({}, {"optimizer": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, foreach=True)}, "Adagrad"),
    ],
)
def test_reasons_known_beforehand(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    trained(tmp_path, ON | settings, replace(BASE, steps=6), **changes)
    assert words in why_not(tmp_path)


def test_a_replay_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = refuse_waits(monkeypatch, (CapturedStepper, "_replay"), READINGS, num_spared=6)
    trained(tmp_path, ON | {"precision": "fp16"}, replace(BASE, dropout=0.3), ema=0.9)
    assert len(calls) > 150


def test_readings_under_way_share_nothing() -> None:
    device, slots = torch.device("cuda", torch.cuda.current_device()), PinnedSlots()

    def reading(value: float) -> Reading:
        outcome = StepOutcome([(torch.tensor(value, device=device), 2.0)], 4.0, 0.0, torch.tensor(value, device=device))
        return Reading(outcome, device, slots)

    first, second = reading(1.0), reading(2.0)
    assert first.values()[:5] == (2.0, 4.0, 0.0, 1.0, 0.0)
    third = reading(3.0)  # where the first was
    assert second.values()[0] == 4.0
    assert third.values()[0] == 6.0
    assert first.values()[0] == 2.0


def test_a_probe_of_a_captured_step() -> None:
    """What the planner times: replays of a step on one batch, against the same steps one by one."""
    device = torch.device("cuda", torch.cuda.current_device())
    inputs, labels = torch.randn(32, 6, device=device), torch.randint(0, 4, (32,), device=device)

    def learned(captures: bool) -> tuple[list[Tensor], float]:
        torch.manual_seed(0)
        model = Mlp(0.0).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        strategy = SingleStrategy(World(device=device))
        with own_stream(device):
            make_capturable(optimizer)
            put_rates_on_device(optimizer)
            parts = StrategyParts(model, vector_loss, optimizer, 1.0, Precision("fp32", "cuda"))
            objective = strategy.prepare(parts, Trial([inputs, labels], 32))

            def step() -> Any:
                strategy.backward(objective([inputs, labels], 32, 32, 1))
                return strategy.step(False)

            for _ in range(3):
                step()
            again: Callable[[], Any] = step
            if captures:
                again = CapturedStep(
                    CudaRecorder(device), strategy, objective, [MicroInput([inputs, labels], 32)]
                ).replay
            for _ in range(20):
                outcome = again()
            loss = Reading(outcome, device).values()[0]
        torch.cuda.synchronize()
        return [parameter.detach().clone() for parameter in model.parameters()], loss

    (plain, plain_loss), (captured, captured_loss) = learned(False), learned(True)
    assert plain_loss == captured_loss
    assert all(torch.equal(one, other) for one, other in zip(plain, captured, strict=True))


def logged_rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "suite" / "steps.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]


@pytest.mark.parametrize("resident", ["off", "on"])
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_replays_log_their_own_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: str, compiles: bool
) -> None:
    settings = {"resident": resident, "compile": compiles}
    if not compiles:
        calls = refuse_waits(monkeypatch)
    trained(tmp_path / "plain", {**settings, **OFF}, loss=logging_loss)
    trained(tmp_path / "captured", {**settings, **ON}, loss=logging_loss)
    assert compiles or len(calls) > 200
    assert "steps replayed" in capture_of(tmp_path / "captured")
    expected, found = logged_rows(tmp_path / "plain"), logged_rows(tmp_path / "captured")
    for one, other in zip(expected, found, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert len({row["double"] for row in found}) == len(found)
