"""Fully sharded training: what is its own, and the contract in worlds that test_contract.py does not have."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

import drivetrain as dt
from drivetrain.checkpoint import Checkpoint
from drivetrain.config import configure
from drivetrain.core.optimizers import GivenOptimizer
from drivetrain.core.precision import FP32_ON_CPU
from drivetrain.core.state import local_part
from drivetrain.core.world import World
from drivetrain.run.job_settings import strategy_for
from drivetrain.strategies import Average, ShardOptions
from drivetrain.strategies.sharding import ROOT, layout_of, refuse_hooks, shard
from tests.api.jobs import Variant, make_job, plain_loop
from tests.api.test_equivalence import CASES, but_soak, difference
from tests.api.test_resume import BASE, MICRO_BATCH, assert_identical, call_in
from tests.gloo_pool import GlooPool
from tests.strategies import fsdp_runs
from tests.strategies.fsdp_runs import Block, Odd

SMALL = Variant("transformer", torch.float64, global_batch=12, steps=8, num_samples=60, save_every=2)
WORLDS = [case for case in CASES if case not in ("1 process 32×1", "2 processes 8×2")]


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.parametrize(
    "case", but_soak(WORLDS, "1 process 8×4", "3 processes", "a last batch that leaves ranks empty")
)
def test_float64_equals_the_plain_loop(gloo_pool: GlooPool, tmp_path: Path, kind: str, case: str) -> None:
    world, global_batch, micro_batch, num_samples = CASES[case]
    variant = Variant(kind, torch.float64, global_batch, num_samples=num_samples, steps=6)  # 5 an epoch
    trained = gloo_pool.run(fsdp_runs.run_with, str(tmp_path), "fsdp", variant, micro_batch, world=world)[0]
    of_losses, of_weights = difference(trained, *plain_loop(variant))
    assert of_losses < 1e-10
    assert of_weights < 1e-10


@pytest.mark.parametrize(
    "settings", [{"fsdp_accumulate": "shards"}, {"fsdp_offload": True}, {"activations": "offload"}]
)
def test_where_things_are_kept_changes_nothing(gloo_pool: GlooPool, tmp_path: Path, settings: dict[str, Any]) -> None:
    variant = Variant("transformer", torch.float64, 12, num_samples=60, steps=4)
    trained = gloo_pool.run(fsdp_runs.run_with, str(tmp_path), "fsdp", variant, 2, settings, world=2)[0]
    of_losses, of_weights = difference(trained, *plain_loop(variant))
    assert max(of_losses, of_weights) < 1e-10


DEEP = Variant("transformer", torch.float64, 12, num_samples=60, steps=4, num_layers=5)
GATHERED = {
    "kept after forward": {"fsdp_reshard": "off"},
    "two at once": {"fsdp_unit_blocks": 2},
    "two ahead": {"fsdp_gather_ahead": 2},
    "all, recomputed": {"fsdp_unit_blocks": 2, "fsdp_gather_ahead": 1, "activations": "recompute"},
}


WORLDS_OF = {"kept after forward": 2, "two at once": 3, "two ahead": 2, "all, recomputed": 1}  # others: make soak


@pytest.mark.parametrize(
    ("how", "world"),
    [
        pytest.param(how, world, marks=() if world == WORLDS_OF[how] else pytest.mark.soak)
        for how in GATHERED
        for world in (1, 2, 3)
    ],
)
def test_when_weights_are_gathered_changes_nothing(gloo_pool: GlooPool, tmp_path: Path, how: str, world: int) -> None:
    given = gloo_pool.run(fsdp_runs.run_with, str(tmp_path), "fsdp", DEEP, 2, GATHERED[how], world=world)[0]
    of_losses, of_weights = difference(given, *plain_loop(DEEP))
    assert max(of_losses, of_weights) < 1e-9


def test_weights_are_gathered_as_asked(gloo_pool: GlooPool) -> None:
    plain, kept, joined, ahead = (
        gloo_pool.run(fsdp_runs.units_seen, options, world=2)[0]
        for options in ({}, {"reshard": False}, {"unit_blocks": 2}, {"gather_ahead": 2})
    )
    assert (plain["units"], plain["after"]) == ([0, 1, 2, 3, 4], [])
    assert plain["at"] == [[0], [1], [2], [3], [4]]
    assert kept["after"] == [0, 1, 2, 3, 4]
    assert joined["units"] == [0, 0, 2, 2, 4]
    assert joined["names"] == ("1, 2", "3, 4", "5", "")
    assert "5 blocks (1 to 5, 2 at a time" in joined["words"]
    assert joined["at"][0] == [0, 1]
    assert ahead["at"][0] == [0, 1, 2]
    assert ahead["at"][2][-1] == 4


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)])
def test_choices_are_measured_and_kept(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    """A run whose choices were measured, and that was stopped, goes on with them: to the results of a plain loop."""
    variant, folder = replace(DEEP, steps=6, save_every=2, num_layers=3), str(tmp_path / "broken")
    at_call = 7 if world > 1 else 4  # after a checkpoint
    plan, _ = gloo_pool.run(fsdp_runs.plan_and_train, folder, variant, at_call, world=world)[0]
    again, mended = gloo_pool.run(fsdp_runs.plan_and_train, folder, variant, world=world)[0]
    assert plan["planned"] == "measured on this machine"
    tried = [row["way"] for row in plan["tried"]]
    for words in ("weights kept after forward", "2 blocks gathered at once", "1 units gathered ahead"):
        assert any(words in way for way in tried) == (world > 1), words
    assert not [row for row in plan["tried"] if row.get("problem")]
    chosen = [{name: row["value"] for name, row in each["choices"].items()} for each in (plan, again)]
    assert chosen[0] == chosen[1]
    assert "samples/s" in plan["choices"]["distributed.fsdp_reshard"]["why"] or world == 1
    assert mended.resumed_from > 0
    of_losses, of_weights = difference(mended, *plain_loop(variant))
    assert max(of_losses, of_weights) < 1e-9
    pins = {name.removeprefix("distributed."): value for name, value in chosen[0].items() if "fsdp_" in name}
    whole = gloo_pool.run(fsdp_runs.run_with, str(tmp_path / "whole"), "fsdp", variant, None, pins, world=world)[0]
    assert_identical(mended, whole)


COPIES = {"fsdp_replicas": 2}
COPIED = replace(DEEP, num_layers=2)  # what is gathered when is not the point: fewer blocks


@pytest.mark.parametrize(
    ("world", "more"),
    [(4, {}), pytest.param(2, {}, marks=pytest.mark.soak), (4, {"fsdp_reshard": "off", "fsdp_accumulate": "shards"})],
)
def test_copies_of_a_sharded_model_equal_the_plain_loop(
    gloo_pool: GlooPool, tmp_path: Path, world: int, more: dict[str, Any]
) -> None:
    settings = {**COPIES, **more}
    trained = gloo_pool.run(fsdp_runs.run_with, str(tmp_path), "fsdp", COPIED, 2, settings, world=world)[0]
    of_losses, of_weights = difference(trained, *plain_loop(COPIED))
    assert max(of_losses, of_weights) < 1e-9


def test_copies_are_stopped_moved_and_go_on(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Two copies on 4 ranks; then 3 ranks that share one; then two copies again. Rows of odd numbers, and a norm."""
    variant = replace(COPIED, save_every=1, steps=6)
    folder = str(tmp_path)
    for world, settings, at_call in ((4, COPIES, 5), (3, {}, 5)):
        assert all(gloo_pool.run(fsdp_runs.crash_with, folder, "fsdp", variant, at_call, settings, world=world))
    trained = gloo_pool.run(fsdp_runs.run_with, folder, "fsdp", variant, MICRO_BATCH, COPIES, world=4)[0]
    assert trained.resumed_from > 1
    of_losses, of_weights = difference(trained, *plain_loop(variant))
    assert max(of_losses, of_weights) < 1e-9


def test_a_resumed_run_of_copies_is_bit_identical(gloo_pool: GlooPool, tmp_path: Path) -> None:
    variant = replace(COPIED, dtype=torch.float32, save_every=2, dropout=0.2)
    whole = gloo_pool.run(fsdp_runs.run_with, str(tmp_path / "whole"), "fsdp", variant, MICRO_BATCH, COPIES, world=4)[0]
    folder = str(tmp_path / "broken")
    assert all(gloo_pool.run(fsdp_runs.crash_with, folder, "fsdp", variant, 8, COPIES, world=4))
    mended = gloo_pool.run(fsdp_runs.run_with, folder, "fsdp", variant, MICRO_BATCH, COPIES, world=4)[0]
    assert mended.resumed_from > 0
    assert_identical(mended, whole)


def test_copies_hold_what_is_forecast(gloo_pool: GlooPool) -> None:
    """A rank holds its part of a copy, and every copy has the same."""
    ranks = gloo_pool.run(fsdp_runs.held_and_forecast, "adamw", 2, world=4)
    assert [held == forecast for held, forecast, _ in ranks] == [True] * 4
    assert ranks[:2] == ranks[2:]


def test_copies_that_ranks_cannot_share_are_refused(gloo_pool: GlooPool, tmp_path: Path) -> None:
    with pytest.raises(dt.DrivetrainError, match="3 ranks cannot share 2 copies"):
        gloo_pool.run(fsdp_runs.run_with, str(tmp_path), "fsdp", DEEP, 2, COPIES, world=3)


def test_all_ranks_choose_by_the_slowest_ones_figures(gloo_pool: GlooPool) -> None:
    plain = "fp32, micro-batch 6, eager"
    kept, joined = f"{plain}, weights kept after forward", f"{plain}, 2 blocks gathered at once"
    ways = gloo_pool.run(fsdp_runs.plan_by_figures, {plain: [2, 2], kept: [1, 4], joined: [1.5, 1]}, world=2)
    assert ways[0] == ways[1]
    assert (ways[0]["reshard"], ways[0]["unit_blocks"]) == (True, 2), "rank 1 is slower with weights kept"


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch cannot")
def test_ranks_that_use_other_weights(gloo_pool: GlooPool, tmp_path: Path) -> None:
    ddp = gloo_pool.run(fsdp_runs.run_branched, str(tmp_path / "ddp"), "ddp", world=2)[0]
    fsdp = gloo_pool.run(fsdp_runs.run_branched, str(tmp_path / "fsdp"), "fsdp", world=2)[0]
    of_losses, of_weights = difference(fsdp, ddp.losses, ddp.weights)
    assert max(of_losses, of_weights) < 1e-10


def test_recomputing_changes_no_bit(gloo_pool: GlooPool, tmp_path: Path) -> None:
    variant = Variant("transformer", torch.float32, 12, num_samples=60, steps=4, dropout=0.3)
    kept, again = (
        gloo_pool.run(fsdp_runs.run_with, str(tmp_path / how), "fsdp", variant, 2, {"activations": how}, world=2)[0]
        for how in ("keep", "recompute")
    )
    assert_identical(kept, again)


@pytest.mark.parametrize("cast", ["operations", "blocks"])
def test_bf16_against_ddp(gloo_pool: GlooPool, tmp_path: Path, cast: str) -> None:
    """By operations it is what DDP computes, but for the order of sums; by blocks it is rounded elsewhere."""
    variant = Variant("transformer", torch.float32, 12, num_samples=60, steps=4)
    bf16 = {"precision": "bf16"}
    ddp = gloo_pool.run(fsdp_runs.run_with, str(tmp_path / "ddp"), "ddp", variant, 3, bf16, world=2)[0]
    settings = {**bf16, "fsdp_cast": cast}
    fsdp = gloo_pool.run(fsdp_runs.run_with, str(tmp_path / "fsdp"), "fsdp", variant, 3, settings, world=2)[0]
    fp32, _ = plain_loop(variant)
    assert fsdp.losses != pytest.approx(fp32, rel=1e-6), "it computes in bf16"
    assert fsdp.losses == pytest.approx(ddp.losses, rel=1e-4 if cast == "operations" else 2e-2)
    assert {value.dtype.name for value in fsdp.weights.values()} == {"float32"}


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_an_awkward_model_equals_ddp(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    ddp = gloo_pool.run(fsdp_runs.odd_job, str(tmp_path / "ddp"), "ddp", world=world)[0]
    fsdp = gloo_pool.run(fsdp_runs.odd_job, str(tmp_path / "fsdp"), "fsdp", world=world)[0]
    assert fsdp.losses == pytest.approx(ddp.losses, rel=1e-7)
    assert [row["valid"] for row in fsdp.rows] == pytest.approx([row["valid"] for row in ddp.rows], rel=1e-7)
    assert fsdp.weights.keys() == ddp.weights.keys()
    assert fsdp.state.keys() == ddp.state.keys()
    for mine, theirs in ((fsdp.weights, ddp.weights), (fsdp.state, ddp.state)):
        for key, value in theirs.items():
            assert mine[key].shape == value.shape
            assert np.allclose(mine[key], value, rtol=1e-6, atol=1e-7), key


@pytest.mark.parametrize("world", [1, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_bit_identical_after_stops(gloo_pool: GlooPool, tmp_path: Path, world: int) -> None:
    whole = gloo_pool.run(fsdp_runs.run_with, str(tmp_path / "whole"), "fsdp", BASE, MICRO_BATCH, world=world)[0]
    folder = str(tmp_path / "broken")
    second = call_in(8, 0, world) - call_in(3, 0, world) + 2  # at an epoch's end, counted from the checkpoint at 3
    for at_call in (call_in(5, 1, world), second):
        assert all(gloo_pool.run(fsdp_runs.crash_with, folder, "fsdp", BASE, at_call, world=world))
    mended = gloo_pool.run(fsdp_runs.run_with, folder, "fsdp", BASE, MICRO_BATCH, world=world)[0]
    assert mended.resumed_from == 6
    assert_identical(mended, whole)


def test_from_strategy_to_strategy_and_world_to_world(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """FSDP on 4, DDP on 2, single, FSDP on 3: one format, optimizer and average included."""
    whole = gloo_pool.run(fsdp_runs.run_with, str(tmp_path / "1"), "single", SMALL, MICRO_BATCH, None, 0.9, world=1)[0]
    folder = str(tmp_path / "moved")
    for strategy, world, micro_steps in (("fsdp", 4, 2), ("ddp", 2, 3), ("single", 1, 6)):
        at_call = 1 + 3 * micro_steps + 1  # the trial, three steps; each run comes two steps further
        assert all(gloo_pool.run(fsdp_runs.crash_averaging, folder, strategy, SMALL, at_call, world=world))
    moved = gloo_pool.run(fsdp_runs.run_with, folder, "fsdp", SMALL, MICRO_BATCH, None, 0.9, world=3)[0]
    assert moved.resumed_from == 6
    assert moved.losses == pytest.approx(whole.losses, abs=1e-10)
    assert {key.split("/")[0] for key in moved.state} == {"optimizer", "ema"}
    for ours, theirs in ((moved.weights, whole.weights), (moved.state, whole.state)):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert np.allclose(ours[key], value, rtol=0, atol=1e-8), key


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bytes_are_as_forecast(gloo_pool: GlooPool, world: int) -> None:
    for kind in ("adamw", "sgd"):
        for rank, (held, forecast, whole) in enumerate(gloo_pool.run(fsdp_runs.held_and_forecast, kind, world=world)):
            assert held == forecast, (kind, rank)
            if world == 4:
                assert held["parameters"] < 0.4 * whole


@pytest.mark.parametrize("world", [1, 3])
def test_infinite_gradients_on_one_rank_are_skipped_by_all(gloo_pool: GlooPool, world: int) -> None:
    good = gloo_pool.run(fsdp_runs.scaled_steps, None, world=world)
    assert all(rank[0] == [0.0, 0.0, 0.0] for rank in good)
    generator = torch.Generator().manual_seed(7)
    batch = [torch.randn(4, 6, generator=generator), torch.randint(0, 4, (4,), generator=generator)]
    alone = fsdp_runs.alone_steps(batch, 3)
    for rank in good:  # every rank has the same batch: the mean gradient is that of one
        assert rank[1] == pytest.approx(alone, rel=2e-3)
    bad = gloo_pool.run(fsdp_runs.scaled_steps, world - 1, world=world)
    assert all(rank[0] == [0.0, 1.0, 0.0] for rank in bad)
    assert {rank[2] for rank in bad} == {good[0][2] / 2}, "the scale fell once, on all ranks alike"
    for spoiled, rank in zip(bad, good, strict=True):
        assert np.isfinite(spoiled[3]).all()
        assert spoiled[3] != rank[3] or not rank[3]  # the third rank has no rows


def test_drive_equals_ddp(gloo_pool: GlooPool, tmp_path: Path) -> None:
    ddp = gloo_pool.run(fsdp_runs.drive_with, str(tmp_path / "ddp"), "ddp", 6, world=2)[0]
    fsdp = gloo_pool.run(fsdp_runs.drive_with, str(tmp_path / "fsdp"), "fsdp", 6, world=2)[0]
    assert fsdp[0] == pytest.approx(ddp[0], abs=1e-12)
    for key, value in ddp[1].items():
        assert np.allclose(fsdp[1][key], value, rtol=0, atol=1e-10), key


def test_what_hooks_see_and_what_is_said(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Shards with whole shapes; `full_tensor` and forwards work, on all ranks together."""
    seen = gloo_pool.run(fsdp_runs.what_a_hook_sees, str(tmp_path), world=2)
    for rank in seen:
        assert rank["kinds"] == ["DTensor"]
        assert rank["shapes"]["layers.0.weight"] == (24, 6)
        assert np.array_equal(rank["whole"], seen[0]["saved"])
        assert np.array_equal(rank["output"], seen[0]["output"])
    told = next(event for event in seen[0]["events"] if event["event"] == "sharded")
    assert told["units"] == ["(the rest)"]
    assert told["reason"] == "asked for"


@pytest.mark.parametrize(
    ("kind", "without_memory"), [("odd", True), ("failing", False), ("loose", False), ("numbers", True)]
)
def test_rank_0_builds_and_the_others_get_its_weights(gloo_pool: GlooPool, kind: str, without_memory: bool) -> None:
    ranks = gloo_pool.run(fsdp_runs.built, kind, world=3)
    assert [rank[0] for rank in ranks] == [False, without_memory, without_memory]
    assert ranks[1][1] == ranks[0][1]
    assert ranks[2][1] == ranks[0][1]


def test_unlike_models_are_refused_on_all_ranks(gloo_pool: GlooPool) -> None:
    with pytest.raises(dt.DrivetrainError, match="rank 1 made another model than rank 0"):
        gloo_pool.run(fsdp_runs.make_other_models, world=2)


def test_a_loss_that_is_not_finite_stops_all(gloo_pool: GlooPool, tmp_path: Path) -> None:
    with pytest.raises(dt.DrivetrainError, match=r"the loss of step 3 .* is nan"):
        gloo_pool.run(fsdp_runs.run_with_poison, str(tmp_path), world=2)


def test_one_rank_asks_to_stop(gloo_pool: GlooPool, tmp_path: Path) -> None:
    stopped = gloo_pool.run(fsdp_runs.stop_on_last_rank, str(tmp_path), world=2)
    assert stopped[0] == stopped[1]
    assert 2 <= stopped[0][0] <= 5
    assert stopped[0][1] is False


# One process


def fsdp_alone(folder: Path, job: dt.Job, **settings: Any) -> dt.Result:
    given = {"report": False, "num_workers": 0, **settings}
    config = configure(output_dir=folder, gpu_mode="cpu", parallel_strategy="fsdp", **given)
    return dt.train(job, config, quiet=True)


def test_the_world_of_one_leaves_nothing_behind(tmp_path: Path) -> None:
    assert not torch.distributed.is_initialized()
    assert fsdp_alone(tmp_path, make_job(Variant(steps=2))).finished
    assert not torch.distributed.is_initialized()


def test_export_weights_to_start_from_and_evaluation(tmp_path: Path) -> None:
    variant = Variant("transformer", torch.float32, steps=3)
    job = make_job(variant, valid=make_job(variant).data)
    result = fsdp_alone(tmp_path, job)
    path = dt.export(result, tmp_path / "weights.safetensors")
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, parallel_strategy="fsdp")
    assert dt.evaluate(job, result, config) == pytest.approx(result.metrics, rel=1e-6)
    for source in (path, result.folder):
        again = fsdp_alone(
            tmp_path, make_job(variant, name=f"from-{source.suffix or 'run'}", init_from=source, max_steps=1)
        )
        first, taken = (Checkpoint.latest_in(folder / "checkpoints") for folder in (result.folder, again.folder))
        assert first is not None
        assert taken is not None
        key = "model/encoder.layers.1.linear2.weight"
        # After one step at the lowest rate of the warm-up it is still near where it came from.
        assert torch.allclose(first.read(key), taken.read(key), atol=1e-2)


@pytest.mark.parametrize("drives", [False, True])
@pytest.mark.parametrize(("free_gb", "expected"), [(0.19, "fsdp"), (0.21, "ddp")])
def test_auto_shards_what_does_not_fit_whole(
    monkeypatch: pytest.MonkeyPatch, free_gb: float, expected: str, drives: bool
) -> None:
    """10 million weights with Adam take 160 MB, and may take 80 % of what is free on the fullest GPU."""
    model = nn.Sequential(nn.Linear(10_000, 999, bias=False), nn.Linear(10, 1000))
    others = torch.optim.AdamW(model.parameters(), fused=False)
    job = make_job(Variant(), **({"optimizer": GivenOptimizer(others)} if drives else {}))
    free = [10**12, int(free_gb * 1e9)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], free[0]))
    world: Any = SimpleNamespace(size=2, device=torch.device("cuda:0"), gather=lambda value: free)
    choice = strategy_for("auto", model, job, world)
    assert choice.value == expected
    assert "take 160 MB" in choice.reason
    assert not others.state
    assert strategy_for("ddp", model, job, world).reason == "asked for"


class Chained(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(4) for _ in range(3)))
        self.out = nn.Linear(4, 8)
        if tied:
            self.out.weight = self.blocks[1].up.weight


def test_units_are_blocks_that_share_nothing() -> None:
    layout = layout_of(Chained(tied=False))
    assert [unit.name for unit in layout.units] == ["blocks.0", "blocks.1", "blocks.2", ROOT]
    assert list(layout.units[-1].parameters) == ["out.weight", "out.bias"]
    tied = layout_of(Chained(tied=True))
    assert [unit.name for unit in tied.units] == ["blocks.0", "blocks.2", ROOT]
    assert "blocks.1.up.weight" in tied.units[-1].parameters
    odd = layout_of(Odd())
    assert sorted(odd.replicated) == ["rough", "scale"]
    containers = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2))
    assert [unit.name for unit in layout_of(containers).units] == [ROOT]


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.out = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        result: Tensor = self.out(inputs)
        return result


def test_averaged_weights_are_not_used_after_their_time() -> None:
    """What a forward without gradients has gathered is forgotten whenever the weights are exchanged."""
    world = World()
    try:
        model = Penalised()
        shard(model, world, ShardOptions(), FP32_ON_CPU)
        average = Average(model, 0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                local_part(parameter).add_(0.1)
            inputs = torch.ones(2, 6)
            before = model(inputs)
            with average.in_place():
                inside = model(inputs)
            assert not torch.allclose(inside, before)
            assert torch.equal(model(inputs), before)
    finally:
        world.close()


def sparse_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))


def test_what_cannot_be_cut_is_refused_in_words(gloo_pool: GlooPool, tmp_path: Path) -> None:
    with pytest.raises(dt.DrivetrainError, match="sparse gradients"):
        shard(sparse_model(), World(), ShardOptions(), FP32_ON_CPU)
    with pytest.raises(dt.DrivetrainError, match="not known before the first forward"):
        shard(nn.LazyLinear(3), World(), ShardOptions(), FP32_ON_CPU)
    with pytest.raises(dt.DrivetrainError, match="ModuleDict has none"):  # as dt.drive makes of several models
        shard(nn.ModuleDict({"gen": nn.Linear(2, 2), "disc": nn.Linear(2, 2)}), World(), ShardOptions(), FP32_ON_CPU)
    adafactor = make_job(Variant(), optimizer=lambda groups: torch.optim.Adafactor(groups, lr=1e-2))
    with pytest.raises(dt.DrivetrainError, match="Adafactor is not known to treat every element"):
        fsdp_alone(tmp_path / "a", adafactor)
    with pytest.raises(dt.DrivetrainError, match="outside the forward of the module"):
        gloo_pool.run(penalised, str(tmp_path / "b"), world=2)


def penalised(folder: str) -> None:
    """A penalty over all weights, in the loss function: with shards it would be another one on every rank."""

    def loss(model: Any, batch: Any) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in model.blocks.parameters())
        value: Tensor = functional.cross_entropy(model(batch[0]), batch[1]) + penalty
        return value

    fsdp_alone(Path(folder), make_job(Variant("mlp", torch.float32), model=Penalised, loss=loss))


def changed_in_place(model: Any, batch: Any) -> Tensor:
    logits = model(batch[0].unsqueeze(1))
    logits += 1.0
    return functional.cross_entropy(logits.squeeze(1), batch[1])


def test_an_output_changed_in_place_is_no_silent_stop(tmp_path: Path) -> None:
    """Torch loses its hook on it, and no gradient would ever arrive."""
    job = make_job(Variant(steps=2), model=lambda: nn.Linear(6, 4).double(), loss=changed_in_place)
    with pytest.raises(dt.DrivetrainError, match="backward reached no weight"):
        fsdp_alone(tmp_path, job)


def with_hook(groups: Any, is_elementwise: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(groups, lr=0.1)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_([it for group in optimizer.param_groups for it in group["params"]], 0.1)

    optimizer.register_step_pre_hook(clip)
    if is_elementwise:
        optimizer.elementwise = True  # type: ignore[attr-defined]
    return optimizer


def test_a_step_hook_that_sees_shards_is_refused(tmp_path: Path) -> None:
    """Clipping in it took the norm of this rank's rows, another one on every rank, in silence."""
    with pytest.raises(dt.DrivetrainError, match="a step hook of SGD sees only this rank's part") as raised:
        fsdp_alone(tmp_path, make_job(Variant(steps=2), optimizer=with_hook))
    assert "Job(clip_norm=…)" in str(raised.value)
    with pytest.raises(dt.DrivetrainError, match="with expert_parallel"):
        refuse_hooks(with_hook([{"params": [nn.Parameter(torch.ones(2))]}]), "expert_parallel")
    job = make_job(Variant(steps=2), optimizer=lambda groups: with_hook(groups, is_elementwise=True))
    assert fsdp_alone(tmp_path / "declared", job).finished


def test_an_optimizer_of_ones_own_that_says_it_is_elementwise(tmp_path: Path) -> None:
    class Mine(torch.optim.SGD):
        elementwise = True

    job = make_job(Variant(steps=2), optimizer=lambda groups: Mine(groups, lr=0.1))
    assert fsdp_alone(tmp_path, job).finished


def test_a_model_that_was_cut_is_not_cut_again(tmp_path: Path) -> None:
    model = nn.Linear(6, 4).double()
    fsdp_alone(tmp_path, make_job(Variant(steps=1), model=model))
    with pytest.raises(dt.DrivetrainError, match="cut into shards already"):
        fsdp_alone(tmp_path, make_job(Variant(steps=1), name="again", model=model))


@pytest.mark.soak
def test_compiled_blocks(tmp_path: Path) -> None:
    variant = Variant("mlp", torch.float32, steps=3)
    plain = fsdp_alone(tmp_path / "plain", make_job(variant, model=Penalised))
    result = fsdp_alone(tmp_path / "compiled", make_job(variant, model=Penalised), compile=True)
    assert "graphs" in result.compilation
    assert result.last is not None
    assert plain.last is not None
    assert result.last.loss == pytest.approx(plain.last.loss, rel=1e-5)
