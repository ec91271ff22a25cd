"""DeepSpeed's JSON from what a run is, and a user's file merged into it. Needs no DeepSpeed."""

import importlib.util
import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config import configure
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.plan import Choice
from drivetrain.run import model_factory
from drivetrain.run.job_settings import refuse_conflicts
from drivetrain.strategies.deepspeed import SPEC
from drivetrain.strategies.spec import refuse_without_package
from drivetrain.strategies.zero import (
    Zero,
    ZeroFacts,
    boxes_of,
    derive,
    read_flat,
    read_own,
    scaler_state,
    settings_in,
    shards_of,
    stage_of,
    told_of_fp16,
)
from tests import warm_python
from tests.api.jobs import Variant, make_job

FACTS = ZeroFacts(
    precision="fp32", world_size=2, micro_batch=4, accumulation=2, global_batch=16, clip_norm=0.5, num_weights=1000
)
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # of the facts, the file, what comes of it
    "stage": ({"stage": 3}, {}, {"zero_optimization.stage": 3}),
    "the file's stage": ({}, {"zero_optimization": {"stage": 1}}, {"zero_optimization.stage": 1}),
    "both agree": ({"stage": 1}, {"zero_optimization": {"stage": 1}}, {"zero_optimization.stage": 1}),
    "offload": (
        {"offload_optimizer": True},
        {},
        {"zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": True}},
    ),
    "the file's offload": (
        {},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "buffer_count": 8}}},
        {"zero_optimization.offload_optimizer": {"device": "cpu", "buffer_count": 8}},
    ),
    "both offload": (
        {"offload_optimizer": True},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "buffer_count": 8}}},
        {"zero_optimization.offload_optimizer": {"device": "cpu", "buffer_count": 8}},
    ),
    "offloads nothing": ({"offload_optimizer": False}, {}, {"zero_optimization.offload_optimizer": None}),
    "no clipping": ({"clip_norm": None}, {}, {"gradient_clipping": 0.0}),
    "a large model": ({"num_weights": 10**10}, {}, {"zero_optimization.reduce_bucket_size": 500_000_000}),
    "not built yet": ({"num_weights": None}, {}, {"zero_optimization.reduce_bucket_size": 500_000_000}),
    "a bucket of one's own": (
        {},
        {"zero_optimization": {"reduce_bucket_size": 77, "overlap_comm": True}},
        {"zero_optimization.reduce_bucket_size": 77, "zero_optimization.overlap_comm": True},
    ),
    "what drivetrain does not know": (
        {},
        {"wall_clock_breakdown": True, "flops_profiler": {"enabled": True}},
        {"wall_clock_breakdown": True, "flops_profiler": {"enabled": True}},
    ),
    "the same batch": (
        {},
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        {"train_batch_size": None, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
    ),
    "weights in bf16": (
        {"precision": "bf16"},
        {"bf16": {"enabled": True}},
        {
            "bf16": {"enabled": True, "check_grad_overflow": True},
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
        },
    ),
    "scaled in fp16": ({"precision": "fp16"}, {"fp16": {"enabled": True, "loss_scale": 0}}, {"fp16": None}),
    "sections that are off": ({}, {"fp16": {"enabled": False}, "elasticity": {"enabled": False}}, {}),
}
CONTRADICTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "optimizer": ({}, {"optimizer": {"type": "AdamW"}}, "Job.optimizer"),
    "scheduler": ({}, {"scheduler": {"type": "WarmupLR"}}, "Job.schedule"),
    "amp": ({}, {"amp": {"enabled": True}}, "--precision"),
    "elasticity": ({}, {"elasticity": {"enabled": True}}, "global batch"),
    "train_batch_size": ({}, {"train_batch_size": 32}, "32 in the file, but 16"),
    "train_micro_batch_size_per_gpu": ({}, {"train_micro_batch_size_per_gpu": 8}, "--batch-size"),
    "gradient_accumulation_steps": ({}, {"gradient_accumulation_steps": 4}, "--accumulation-steps"),
    "gradient_clipping": ({}, {"gradient_clipping": 1.0}, "Job.clip_norm"),
    "fp16": ({}, {"fp16": {"enabled": True}}, "--precision fp16"),
    "fp16.fp16_master_weights_and_grads": (
        {"precision": "fp16"},
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        "small steps would be lost",
    ),
    "bf16": ({}, {"bf16": {"enabled": True}}, "--precision bf16"),
    "bf16 ": ({"precision": "bf16", "stage": 1}, {"bf16": {"enabled": True}}, "--zero-stage 2"),
    "zero_force_ds_cpu_optimizer": ({}, {"zero_force_ds_cpu_optimizer": True}, "drop it"),
    "zero_optimization.stage": ({"stage": 3}, {"zero_optimization": {"stage": 2}}, "--zero-stage 3"),
    "zero_optimization.stage ": ({}, {"zero_optimization": {"stage": 0}}, "use ddp"),
    "zero_optimization.offload_optimizer.device": (
        {},
        {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
        "swapped to disk",
    ),
    "zero_optimization.offload_optimizer": (
        {"offload_optimizer": False},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "--no-offload-optimizer",
    ),
    "zero_optimization.offload_optimizer.ratio": (
        {},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
        "only the job's own is saved",
    ),
    "zero_optimization.mics_shard_size": ({}, {"zero_optimization": {"mics_shard_size": 2}}, "each part once"),
}
SCRIPT = """
import torch
import drivetrain as dt
data = {"x": torch.zeros(8, 2), "y": torch.zeros(8).long()}
job = dt.Job(name="mine", model=lambda: torch.nn.Linear(2, 2), data=data,
             loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
             optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), global_batch=4, max_steps=2)
dt.train(job)
"""
SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def test_what_follows_from_a_run() -> None:
    assert derive(FACTS) == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    }


@pytest.mark.parametrize("case", CHANGES)
def test_the_table(case: str) -> None:
    changes, own, expected = CHANGES[case]
    before = json.dumps(own)
    derived = derive(replace(FACTS, **changes), own)
    for path, value in expected.items():
        found: Any = derived
        for key in path.split("."):
            found = found.get(key)
        assert found == value, path
    assert json.dumps(own) == before, "the user's own is not changed"


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_named(case: str) -> None:
    changes, own, words = CONTRADICTIONS[case]
    with pytest.raises(ConfigError) as caught:
        derive(replace(FACTS, **changes), own, "mine.json")
    (problem,) = caught.value.problems
    assert problem.key == f"mine.json: {case.strip()}"
    assert words in str(problem)
    assert problem.remedy


def test_all_at_once() -> None:
    own = {"optimizer": {}, "train_batch_size": 1, "zero_optimization": {"stage": 0}}
    with pytest.raises(ConfigError) as caught:
        derive(FACTS, {**own, "optimizer": {"type": "Adam"}})
    assert len(caught.value.problems) == 3


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    own = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}
    path.write_text(json.dumps({**own, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}))
    read = read_own(path)
    assert read == {
        "bf16": {},
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }
    assert settings_in(read) == {"batch.size": 4, "batch.accumulation": 2}
    assert settings_in({"bf16": {"enabled": True}}) == {"precision.dtype": "bf16"}
    assert (stage_of(None, read), stage_of(1, read), stage_of(None, {})) == (3, 1, 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), ("{", "not JSON"), ("[1]", "a list"), ('{"zero_optimization": 2}', "not an object")],
)
def test_a_bad_file(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_own(path)


def test_how_a_file_scales_the_loss() -> None:
    assert scaler_state({"fp16": {"enabled": False}}) == {}
    follows = scaler_state({"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500}})
    assert (follows["scale"], follows["growth_interval"], follows["backoff_factor"]) == (4096.0, 500, 0.5)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(scaler_state({"fp16": {"enabled": True, "loss_scale": 128}}))
    for infinite in (0.0, 1.0, 0.0):
        scaler.scale(torch.ones(1))
        scaler._per_optimizer_states[0]["found_inf_per_device"] = {torch.device("cpu"): torch.full((1,), infinite)}
        scaler.update()
        assert scaler.get_scale() == 128.0, "a fixed scale stays"


def test_what_of_fp16_is_told() -> None:
    fp16 = {"enabled": True, "hysteresis": 2, "min_loss_scale": 1}
    first, second = told_of_fp16({"fp16": fp16}, "ds.json")
    assert "weights stay float32" in first
    assert "hysteresis and min_loss_scale have no effect" in second
    assert told_of_fp16({"bf16": {"enabled": True}}, "ds.json") == []


def written(folder: Path, own: dict[str, Any]) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(own))
    return path


def test_a_file_settles_what_nobody_said(tmp_path: Path) -> None:
    own = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    config = configure(parallel_strategy="deepspeed", deepspeed_config=written(tmp_path, own))
    zero = Zero.of(config)
    obeyed, notes = zero.obeyed(config)
    assert (obeyed.batch.size, obeyed.batch.accumulation, obeyed.precision.dtype) == (4, 2, "bf16")
    assert notes[0] == "batch.size is 4, as ds.json says"
    pinned = configure(parallel_strategy="deepspeed", deepspeed_config=config.deepspeed.config, batch_size=8)
    assert Zero.of(pinned).obeyed(pinned)[0].batch.size == 8, "and then deriving its JSON names the contradiction"
    assert Zero.of(configure()) == Zero(2)


def test_fp16_in_a_file(tmp_path: Path) -> None:
    """On a GPU it is the run's precision; on a CPU it is left out, and both are told."""
    own = {"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}}
    config = configure(parallel_strategy="deepspeed", deepspeed_config=written(tmp_path, own))
    obeyed, notes = Zero.of(config, on_gpu=True).obeyed(config)
    assert obeyed.precision.dtype == "fp16"
    assert "hysteresis has no effect" in notes[1]
    without = Zero.of(config, on_gpu=False)
    obeyed, notes = without.obeyed(config)
    assert obeyed.precision.dtype == "auto"
    assert notes == ["fp16 needs a GPU, and this run uses the CPU: fp16 in ds.json is left out"]
    assert "fp16" not in without.own


def test_options_without_the_strategy() -> None:
    with pytest.raises(ConfigError, match=r"add --deepspeed .that is --parallel-strategy deepspeed"):
        configure(zero_stage=2)
    with pytest.raises(ConfigError, match="is an option of fsdp"):
        configure(parallel_strategy="deepspeed", fsdp_offload=True)
    with pytest.raises(ConfigError, match="every rank has to use the same weights"):
        configure(parallel_strategy="deepspeed", find_unused_parameters=True)
    with pytest.raises(ConfigError, match="cannot be compiled"):
        configure(parallel_strategy="deepspeed", zero_stage=3, compile=True)
    assert configure(parallel_strategy="deepspeed", zero_stage=3, offload_optimizer=True).deepspeed.stage == 3


def test_auto_that_takes_a_strategy_which_settings_contradict(tmp_path: Path) -> None:
    """Nobody asked for DeepSpeed by name, so that its conflicts are known once the model is."""
    import drivetrain as dt

    choice = Choice(value="deepspeed", reason="nothing else fits")
    settled = SPEC.settle_auto(configure(compile=True), 2)
    with pytest.raises(ConfigError, match=r"deepspeed, which auto takes here \(nothing else fits\), gathers") as caught:
        refuse_conflicts(settled, choice)
    assert "leave compile.enabled out" in str(caught.value)
    refuse_conflicts(SPEC.settle_auto(configure(compile=True), 1), choice)  # one rank keeps whole weights
    config = configure(output_dir=tmp_path, gpu_mode="cpu", find_unused_parameters=True)
    with (
        mock.patch.object(model_factory, "strategy_for", return_value=choice),
        pytest.raises(ConfigError, match="every rank has to use the same weights"),
    ):
        dt.train(make_job(Variant()), config, quiet=True)


def test_a_missing_package_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import drivetrain as dt

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else find(name))
    with pytest.raises(DrivetrainError, match="not installed") as caught:
        refuse_without_package("deepspeed", SPEC)
    assert caught.value.remedy == "pip install 'drivetrain[deepspeed]'"
    built: list[bool] = []

    def model() -> Any:
        built.append(True)

    config = configure(output_dir=tmp_path, gpu_mode="cpu", parallel_strategy="deepspeed")
    with pytest.raises(DrivetrainError, match="not installed"):
        dt.train(make_job(Variant(), model=model), config, quiet=True)
    assert not built, "nothing large is made before"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed")
@pytest.mark.parametrize(
    "processes", [[], pytest.param(["--cpu", "--num-processes", "2"], marks=pytest.mark.soak)], ids=["one", "two"]
)
def test_a_missing_package_is_the_last_thing_on_the_screen(tmp_path: Path, processes: list[str]) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    command = ["-m", "drivetrain", "train", str(script), *processes]
    done = warm_python.run([*command, "--parallel-strategy", "deepspeed", "--output-dir", str(tmp_path / "runs")])
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].strip() == "remedy: pip install 'drivetrain[deepspeed]'", done.stderr
    assert "Traceback" not in done.stderr


class Stored:
    """A stored tensor, read box by box."""

    meta: dict[str, Any] = {}  # noqa: RUF012
    keys: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def read(self, key: str, offsets: Any = None, shape: Any = None) -> torch.Tensor:
        assert offsets is not None
        return self.tensor[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))].clone()


@given(SHAPES, st.integers(0, 700), st.integers(0, 700))
def test_any_range_of_any_shape(shape: tuple[int, ...], first: int, second: int) -> None:
    whole = torch.arange(prod(shape)).reshape(shape)
    start, stop = sorted((first % (prod(shape) + 1), second % (prod(shape) + 1)))
    expected = whole.reshape(-1)[start:stop]
    boxes = list(boxes_of(shape, start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert torch.equal(read_flat(Stored(whole), "key", shape, start, stop).long(), expected)
    rebuilt = torch.full(shape, -1)
    for shard in shards_of("key", expected.clone(), shape, start):
        assert shard.global_shape == shape
        assert shard.is_part
        rebuilt[tuple(slice(o, o + s) for o, s in zip(shard.offsets, shard.tensor.shape, strict=True))] = shard.tensor
    inside = (whole >= start) & (whole < stop)
    assert torch.equal(rebuilt, torch.where(inside, whole, -1))


def test_whole_rows_are_one_box() -> None:
    assert list(boxes_of((4, 3), 3, 9)) == [((1, 0), (2, 3))]
    assert list(boxes_of((4, 3), 2, 10)) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    assert list(boxes_of((), 0, 1)) == [((), ())]
    assert list(boxes_of((7,), 2, 2)) == []


def test_shards_share_memory() -> None:
    flat = torch.zeros(5)
    for shard in shards_of("key", flat, (3, 3), 2):
        shard.tensor.fill_(1.0)
    assert flat.sum() == 5
