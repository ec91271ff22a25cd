"""DeepSpeed's ZeRO: the contract that single, DDP and FSDP hold, as far as it allows, and what is its own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import drivetrain as dt
from drivetrain.config import configure
from drivetrain.strategies.zero import scaler_state
from tests.api.jobs import Variant, make_job, plain_loop
from tests.api.test_equivalence import CASES, difference
from tests.api.test_resume import BASE, MICRO_BATCH, assert_identical, call_in
from tests.gloo_pool import GlooPool
from tests.strategies import deepspeed_runs
from tests.strategies.deepspeed_runs import TINY_PIECES, zero

pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed: make test-deepspeed")
pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(600)]

LIMIT = 300.0  # seconds: the first of them may have to wait for others on the machine


@pytest.fixture
def tiny_pieces(tmp_path: Path) -> str:
    path = tmp_path / "pieces.json"
    path.write_text(json.dumps(TINY_PIECES))
    return str(path)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "case", ["1 process 8×4", "2 processes 8×2", "3 processes", "a last batch that leaves ranks empty"]
)
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_equals_the_plain_loop(
    gloo_pool: GlooPool, tmp_path: Path, tiny_pieces: str, kind: str, case: str, stage: int
) -> None:
    """In float32, which is all it has. The weights of the transformer drift in any strategy (a key's bias)."""
    world, global_batch, micro_batch, num_samples = CASES[case]
    variant = Variant(kind, torch.float32, global_batch, num_samples=num_samples, steps=12)
    settings = {**zero(stage), "deepspeed_config": tiny_pieces}
    arguments = (str(tmp_path), variant, micro_batch, settings)
    trained = gloo_pool.run(deepspeed_runs.zero_run, *arguments, world=world, time_limit_seconds=LIMIT)[0]
    losses, weights = plain_loop(variant)
    assert trained.losses == pytest.approx(losses, rel=1e-6, abs=1e-6)
    if kind == "mlp":
        assert difference(trained, losses, weights)[1] < 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_and_clipped_as_ddp(gloo_pool: GlooPool, tmp_path: Path, stage: int) -> None:
    variant = Variant("transformer", torch.float32, 12, num_samples=60, steps=7)
    ddp = gloo_pool.run(
        deepspeed_runs.zero_run, str(tmp_path / "ddp"), variant, 2, {"parallel_strategy": "ddp"}, world=2
    )[0]
    for offload in (False, True):
        folder = str(tmp_path / str(offload))
        arguments = (folder, variant, 2, zero(stage, offload))
        trained = gloo_pool.run(deepspeed_runs.zero_run, *arguments, world=2, time_limit_seconds=LIMIT)[0]
        assert trained.losses == pytest.approx(ddp.losses, rel=1e-6, abs=1e-6)
        norms, expected = ([row["grad_norm"] for row in one.rows] for one in (trained, ddp))
        assert max(expected) > 0.5, "some steps are clipped"
        assert norms == pytest.approx(expected, rel=1e-4)
        assert trained.state.keys() == ddp.state.keys()


@pytest.mark.parametrize(
    ("stage", "offload", "world"), [(1, False, 2), (2, True, 2), (2, False, 3), (3, False, 2), (3, True, 3)]
)
def test_bit_identical_after_stops(
    gloo_pool: GlooPool, tmp_path: Path, tiny_pieces: str, stage: int, offload: bool, world: int
) -> None:
    settings = {**zero(stage, offload), "deepspeed_config": tiny_pieces}
    arguments = (str(tmp_path / "whole"), BASE, MICRO_BATCH, settings)
    whole = gloo_pool.run(deepspeed_runs.zero_run, *arguments, world=world, time_limit_seconds=LIMIT)[0]
    folder = str(tmp_path / "broken")
    second = call_in(8, 0, world) - call_in(3, 0, world) + 2
    for at_call in (call_in(5, 1, world), second):
        assert all(gloo_pool.run(deepspeed_runs.crash, folder, BASE, at_call, settings, world=world))
    mended = gloo_pool.run(deepspeed_runs.zero_run, folder, BASE, MICRO_BATCH, settings, world=world)[0]
    assert mended.resumed_from == 6
    assert_identical(mended, whole)


ROADS = [
    (("zero-3", 2), ("ddp", 2), ("zero-3", 2)),
    (("zero-3-offload", 2), ("single", 1), ("zero-2", 3)),
    (("ddp", 2), ("zero-1", 3), ("single", 1), ("zero-3", 3)),
    (("zero-2-offload", 3), ("zero-3", 2), ("single", 1)),
]


@pytest.mark.parametrize("road", ROADS, ids=lambda road: " ".join(f"{kind}×{world}" for kind, world in road))
def test_checkpoints_are_passed_on_exactly(gloo_pool: GlooPool, tmp_path: Path, road: Any) -> None:
    """Three steps with the first; each of the others loads it and saves it again: every bit, under the same names."""
    saved = []
    for number, (kind, world) in enumerate(road):
        steps = 3 if number == 0 else 0
        arguments = (str(tmp_path), kind, steps)
        saved.append(gloo_pool.run(deepspeed_runs.pass_on, *arguments, world=world, time_limit_seconds=LIMIT)[0])
    first = saved[0]
    assert any(key.endswith("/exp_avg_sq") for key in first["tensors"])
    assert {"model/again.weight", "model/frozen.weight", "model/scale", "model/norm.running_mean"} <= set(
        first["tensors"]
    )
    for other in saved[1:]:
        assert other["groups"] == first["groups"]
        assert other["tensors"].keys() == first["tensors"].keys()
        for key, value in first["tensors"].items():
            assert other["tensors"][key].dtype == value.dtype
            assert other["tensors"][key].shape == value.shape
            assert np.array_equal(other["tensors"][key], value), key


def test_an_average_is_passed_on(gloo_pool: GlooPool, tmp_path: Path) -> None:
    one = gloo_pool.run(deepspeed_runs.pass_on, str(tmp_path), "zero-2", 3, True, world=2)[0]
    other = gloo_pool.run(deepspeed_runs.pass_on, str(tmp_path), "ddp", 0, True, world=3)[0]
    again = gloo_pool.run(deepspeed_runs.pass_on, str(tmp_path), "zero-1", 0, True, world=2)[0]
    assert any(key.startswith("ema/") for key in one["tensors"])
    for key, value in one["tensors"].items():
        assert np.array_equal(other["tensors"][key], value), key
        assert np.array_equal(again["tensors"][key], value), key


def test_from_strategy_to_strategy_in_training(gloo_pool: GlooPool, tmp_path: Path) -> None:
    small = Variant("mlp", torch.float32, global_batch=12, steps=8, num_samples=60, save_every=2)
    whole, _ = plain_loop(small)
    folder = str(tmp_path)
    for settings, world, micro_steps in (
        (zero(3), 3, 2),
        ({"parallel_strategy": "ddp"}, 2, 3),
        (zero(1, offload=True), 1, 6),
    ):
        at_call = 1 + 3 * micro_steps + 1
        assert all(gloo_pool.run(deepspeed_runs.crash, folder, small, at_call, settings, world=world))
    moved = gloo_pool.run(deepspeed_runs.zero_run, folder, small, MICRO_BATCH, zero(2), world=3)[0]
    assert moved.resumed_from == 6
    assert moved.losses == pytest.approx(whole, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("stage", "ema"), [(1, 0.9), (2, 0.9), (3, None)])
def test_an_awkward_model_equals_ddp(gloo_pool: GlooPool, tmp_path: Path, stage: int, ema: float | None) -> None:
    ddp, ddp_valid = gloo_pool.run(
        deepspeed_runs.odd_run, str(tmp_path / "ddp"), {"parallel_strategy": "ddp"}, ema, world=2
    )[0]
    ours, our_valid = gloo_pool.run(deepspeed_runs.odd_run, str(tmp_path / "ds"), zero(stage), ema, world=2)[0]
    assert ours.losses == pytest.approx(ddp.losses, rel=1e-5)
    assert our_valid == pytest.approx(ddp_valid, rel=1e-5)
    assert ours.weights.keys() == ddp.weights.keys()
    assert ours.state.keys() == ddp.state.keys()
    for mine, theirs in ((ours.weights, ddp.weights), (ours.state, ddp.state)):
        for key, value in theirs.items():
            assert mine[key].shape == value.shape
            assert np.allclose(mine[key], value, rtol=1e-3, atol=1e-5), key


@pytest.mark.parametrize("stage", [2, 3])
def test_in_bf16(gloo_pool: GlooPool, tmp_path: Path, stage: int) -> None:
    """Cast for each operation, as elsewhere; or weights kept in bf16, where DeepSpeed's own file asks for it."""
    variant = Variant("transformer", torch.float32, 12, num_samples=60, steps=4)
    bf16 = {"precision": "bf16"}
    ddp = gloo_pool.run(
        deepspeed_runs.zero_run, str(tmp_path / "ddp"), variant, 3, {"parallel_strategy": "ddp", **bf16}, world=2
    )[0]
    ours = gloo_pool.run(deepspeed_runs.zero_run, str(tmp_path / "ds"), variant, 3, {**zero(stage), **bf16}, world=2)[0]
    # The third stage has a linear layer of its own, which rounds elsewhere.
    assert ours.losses == pytest.approx(ddp.losses, rel=1e-4 if stage == 2 else 1e-3)
    file = tmp_path / "bf16.json"
    file.write_text('{"bf16": {"enabled": true}}')
    settings = {**zero(stage), "deepspeed_config": str(file)}
    low = gloo_pool.run(deepspeed_runs.zero_run, str(tmp_path / "low"), variant, 3, settings, world=2)[0]
    assert low.losses != ours.losses, "weights are rounded"
    assert low.losses == pytest.approx(ddp.losses, rel=2e-2)
    assert {value.dtype.name for value in low.weights.values()} == {"float32"}, "what is saved is what is trained"


@pytest.mark.parametrize("kind", ["zero-1", "zero-2", "zero-2-offload", "zero-3"])
def test_in_fp16_as_ddp(gloo_pool: GlooPool, tmp_path: Path, kind: str) -> None:
    """The loss is scaled, a step that overflows on one rank is skipped on all of them, and the scale halves."""
    scaling = scaler_state({"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}})
    ddp = gloo_pool.run(deepspeed_runs.scaled, str(tmp_path), "ddp", scaling, world=2)
    ours = gloo_pool.run(deepspeed_runs.scaled, str(tmp_path), kind, scaling, world=2, time_limit_seconds=LIMIT)
    assert [row[2] for row in ours[0]["rows"]] == [0, 0, 1, 0, 0, 0]
    assert [row[3] for row in ours[0]["rows"]] == [256, 512, 256, 256, 512, 512]
    for mine, theirs in zip(ours, ddp, strict=True):
        assert mine["scaler"] == theirs["scaler"]
        for row, expected in zip(mine["rows"], theirs["rows"], strict=True):
            assert row[2:] == expected[2:]
            if not expected[2]:
                assert row[:2] == pytest.approx(expected[:2], rel=2e-3)
        if kind != "zero-3":  # there, weights are in parts
            for name, value in theirs["weights"].items():
                assert np.allclose(mine["weights"][name], value, rtol=1e-3, atol=1e-4), name


def test_a_forward_between_steps(gloo_pool: GlooPool, tmp_path: Path) -> None:
    expected = gloo_pool.run(deepspeed_runs.seen_by_a_hook, str(tmp_path / "d"), {"parallel_strategy": "ddp"}, world=2)
    for stage in (2, 3):
        seen = gloo_pool.run(deepspeed_runs.seen_by_a_hook, str(tmp_path / str(stage)), zero(stage), world=2)
        for ours, theirs in zip(seen, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_all_stop_together(gloo_pool: GlooPool, tmp_path: Path, stage: int) -> None:
    with pytest.raises(dt.DrivetrainError, match=r"the loss of step 3 .* is nan"):
        gloo_pool.run(deepspeed_runs.poisoned, str(tmp_path / "poison"), zero(stage), world=2)
    ranks = gloo_pool.run(deepspeed_runs.stopped, str(tmp_path / "stop"), zero(stage), world=2)
    assert ranks[0] == ranks[1]
    assert 2 <= ranks[0][0] <= 5
    assert ranks[0][1] is False


def test_each_rank_writes_a_part(gloo_pool: GlooPool) -> None:
    for kind in ("zero-2", "zero-3"):
        for own, whole in gloo_pool.run(deepspeed_runs.held_bytes, kind, world=3):
            assert own < 0.5 * whole


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("float64", "keeps weights as float32"),
        ("scalar", "weights without dimensions, and scale is one"),
        ("adagrad", "makes another Adagrad"),
        ("adafactor", "treat every element of a weight alike"),
        ("ema", "needs whole float32 weights"),
    ],
)
def test_what_it_cannot_do_is_said(gloo_pool: GlooPool, tmp_path: Path, what: str, words: str) -> None:
    for said in gloo_pool.run(deepspeed_runs.refused, str(tmp_path), what, world=2):
        assert words in said
        assert "remedy" in said


def test_ranks_that_use_other_weights_are_refused(gloo_pool: GlooPool, tmp_path: Path) -> None:
    with pytest.raises(dt.DrivetrainError, match="use different weights"):
        gloo_pool.run(deepspeed_runs.branched, str(tmp_path), zero(1), world=2)


def test_a_loop_of_ones_own_is_refused(tmp_path: Path) -> None:
    job = make_job(Variant(dtype=torch.float32))
    model = torch.nn.Linear(6, 4)
    config = configure(output_dir=tmp_path, gpu_mode="cpu", parallel_strategy="deepspeed")
    with pytest.raises(dt.DrivetrainError, match="has to run the forward itself"):
        dt.drive(
            model, torch.optim.SGD(model.parameters(), lr=0.1), job.data, global_batch=4, max_steps=1, config=config
        )


def test_what_it_was_told_is_written_down(gloo_pool: GlooPool, tmp_path: Path) -> None:
    variant = Variant("mlp", torch.float32, 12, steps=2)
    gloo_pool.run(deepspeed_runs.zero_run, str(tmp_path), variant, 3, zero(2, offload=True), world=2)
    events = [json.loads(line) for line in (tmp_path / "suite" / "events.jsonl").read_text().splitlines()]
    told = next(event for event in events if event["event"] == "deepspeed")["config"]
    assert told["zero_optimization"]["stage"] == 2
    assert told["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_are_not_used(gloo_pool: GlooPool, tmp_path: Path, stage: int) -> None:
    """DeepSpeed steps flat tensors: what a plain loop would leave alone stays as it is, or the run is refused."""

    def trained(until_call: int, decay: float) -> Any:
        folder = str(tmp_path / f"{until_call}-{decay}")
        arguments = (folder, until_call, decay, zero(stage))
        return gloo_pool.run(deepspeed_runs.run_unused, *arguments, world=2, time_limit_seconds=LIMIT)[0]

    found = trained(0, 0.0)
    for name, value in found["first"].items():
        assert np.array_equal(found["weights"][f"model/side.{name}"], value)
    with pytest.raises(dt.DrivetrainError, match=r"side\.\w+ is not used by the loss, .* weight decay of 0.1"):
        trained(0, 0.1)
    with pytest.raises(dt.DrivetrainError, match=r"side\.\w+ is not used in this step and was used in the first one"):
        trained(2, 0.0)


@pytest.mark.parametrize(("stage", "offload"), [(1, True), (2, False), (2, True), (3, False), (3, True)])
def test_a_skipped_step_leaves_nothing_behind(gloo_pool: GlooPool, tmp_path: Path, stage: int, offload: bool) -> None:
    """The trial, which is skipped on purpose, and one in the middle: with weights in bf16 and an offloaded optimizer
    DeepSpeed keeps the gradients of such a step."""
    file = tmp_path / "bf16.json"
    file.write_text('{"bf16": {"enabled": true}}')
    settings = {**zero(stage, offload), "deepspeed_config": str(file)}
    arguments = (str(tmp_path / "some"), [4], settings)  # the trial is the first call, so this is step 3
    found = gloo_pool.run(deepspeed_runs.run_with_bad_gradients, *arguments, world=2, time_limit_seconds=LIMIT)[0]
    assert found == [False, False, True, False, False]


def test_a_run_of_skipped_steps_is_an_error(gloo_pool: GlooPool, tmp_path: Path) -> None:
    arguments = (str(tmp_path), [], zero(2))
    with pytest.raises(dt.DrivetrainError, match="all 5 steps were skipped"):
        gloo_pool.run(deepspeed_runs.run_with_bad_gradients, *arguments, world=2, time_limit_seconds=LIMIT)
