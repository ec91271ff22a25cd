"""DeepSpeed's JSON from what a run is, and a user's file merged into it. Needs no DeepSpeed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.core.errors import ConfigError
from drivetrain.strategies.deepspeed_config import (
    ZeroFacts,
    derive,
    read_own,
    scaler_state,
    settings_in,
    stage_of,
    told_of_fp16,
)

FACTS = ZeroFacts(
    precision="fp32", world_size=2, micro_batch=4, accumulation=2, global_batch=16, clip_norm=0.5, num_weights=1000
)


def test_what_follows_from_a_run() -> None:
    assert derive(FACTS) == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    }


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
