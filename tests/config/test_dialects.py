"""Files that were written for other trainers: each line becomes what it meant there, or is named with the reason."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain.config import FOREIGN, Given, as_launched, configure, from_yaml, resolve
from drivetrain.config.settings import BY_DOTTED, DIALECTS, Meaning
from drivetrain.core.errors import ConfigError
from drivetrain.core.launchers import ProcessPlace
from drivetrain.run.session import share_workers
from tests.hardware_fixtures import load

GPUS = load("8x-a100-80gb")


def read(tmp_path: Path, text: str, hardware: Any = GPUS) -> tuple[dict[str, Any], str]:
    """The fields that a file sets, and what is told of it."""
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    found = resolve([from_yaml(path)[0]], from_yaml(path)[1], lambda: hardware)
    section = {name: getattr(found.config, name.split(".")[0]) for name in found.origins}
    return {name: getattr(section[name], name.split(".")[1]) for name in section}, "\n".join(found.notes)


ACCELERATE = """
mixed_precision: 'fp16'
gradient_accumulation_steps: 2
train_batch_size: 128
test_batch_size: 2048
num_workers: 4
"""
BLOCK = """
training:
  batch_size_per_gpu: 16
  gradient_accumulation_steps: 4
  fp16: true
  gradient_checkpointing: true
  dataloader_num_workers: 12
deepspeed:
  enabled: true
  stage: 2
"""
GPU_CONFIG = """
device: auto
enable_mixed_precision: false
precision_type: auto
gpu_memory_fraction: 0.9
gpu_mode: auto
parallel_strategy: data_parallel
accumulation_steps: 1
num_workers: -1
pin_memory: true
"""
MULTI_GPU = """
training_mode: distributed
enable_data_parallel: false
device_ids: null
enable_distributed: true
backend: nccl
init_method: env://
world_size: -1
rank: -1
local_rank: -1
find_unused_parameters: false
broadcast_buffers: true
bucket_cap_mb: 25
static_graph: false
enable_gradient_as_bucket_view: true
enable_find_unused_parameters: true
enable_gpu_monitoring: true
sync_bn: true
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            ACCELERATE,
            {
                "precision.dtype": "fp16", "batch.accumulation": 2, "batch.size": 128, "validation.batch_size": 2048,
                "data.num_workers": 4,
            },
        ),
        ("mixed_precision: 'no'\n", {"precision.dtype": "fp32"}),
        ("mixed_precision: bf16\ntrain_batch_size: 512\n", {"precision.dtype": "bf16", "batch.size": 512}),
        ("mixed_precision: true\n", {"precision.mixed": True}),
        (
            BLOCK,
            {
                "batch.size": 16, "batch.accumulation": 4, "precision.dtype": "fp16", "memory.activations": "recompute",
                "data.total_workers": 12, "distributed.strategy": "deepspeed", "deepspeed.stage": 2,
            },
        ),
        (
            GPU_CONFIG,
            {
                "device.device": "auto", "precision.mixed": False, "memory.gpu_fraction": 0.9, "device.mode": "auto",
                "batch.accumulation": 1, "data.num_workers": -1,
            },
        ),
        (
            MULTI_GPU,
            {
                "distributed.strategy": "ddp", "distributed.broadcast_buffers": True, "distributed.bucket_cap_mb": 25,
                "distributed.static_graph": False, "distributed.gradient_as_bucket_view": True,
                "distributed.find_unused_parameters": True, "watch.monitor_gpu": True,
                "distributed.sync_batchnorm": True,
            },
        ),
    ],
    ids=["accelerate", "no", "bf16", "our own", "training block", "gpu config", "multi gpu"],
)  # fmt: skip
def test_a_file_sets_what_it_meant(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    if "enable_find_unused_parameters" in text:
        text = text.replace("\nfind_unused_parameters: false", "")
    assert read(tmp_path, text)[0] == expected


def test_every_line_is_told(tmp_path: Path) -> None:
    _, notes = read(tmp_path, ACCELERATE)
    assert "theirs.yaml line 4: train_batch_size: 128 is batch.size: 128 (samples per device and micro-step)" in notes
    _, notes = read(tmp_path, MULTI_GPU.replace("enable_find_unused_parameters: true", ""))
    assert "world_size: -1 is not used: that is the default here" in notes
    _, notes = read(tmp_path, "training_mode: auto\nworld_size: 4\n")
    assert "world_size: 4 is not used: the launcher says it: drivetrain train --num-processes N" in notes
    _, notes = read(tmp_path, BLOCK)
    assert "training.dataloader_num_workers: 12 is data.total_workers: 12 (of all processes on a machine" in notes


def test_what_needs_a_gpu_is_left_out_where_none_is_used(tmp_path: Path) -> None:
    found, notes = read(tmp_path, "gpu_mode: cpu\n" + ACCELERATE)
    assert "precision.dtype" not in found
    assert "mixed_precision: fp16 is left out: no GPU is used here" in notes
    (tmp_path / "ours.yaml").write_text("precision: fp16\ngpu_mode: cpu\n")
    with pytest.raises(ConfigError, match="fp16 needs a GPU"):
        configure(tmp_path / "ours.yaml")


def test_two_dialects_are_never_merged(tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text("train_batch_size: 8\ntraining:\n  fp16: true\n")
    with pytest.raises(ConfigError) as caught:
        configure(tmp_path / "both.yaml")
    assert "train_batch_size belongs to an Accelerate script's file, and training.fp16 (both.yaml line 3)" in str(
        caught.value
    )


def test_a_deepspeed_file_as_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 32, "zero_optimization": {"stage": 2}}')
    config = configure(tmp_path / "ds.json")
    assert config.distributed.strategy == "deepspeed"
    assert config.deepspeed.config == tmp_path / "ds.json"
    assert config.batch.size is None  # DeepSpeed's is the global batch
    assert "ds.json is a DeepSpeed configuration" in config.notes[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "mixed_precision: fp8\n",
            "(theirs.yaml line 1): got 'fp8', which an Accelerate script's file",
        ),
        ("training_mode: fsdp\n", "auto, single_gpu, data_parallel, distributed"),
        ("training:\n  fp16: 1\n", "true, false"),
        ("train_batch_size: 0\n", "at least 1"),
        ("train_batch_size: 8\nepoch: 3\n", "did you mean"),
        ("training:\n  fp16: true\n  warm_up: 3\n", "there is no such key"),
    ],
)
def test_wrong_values(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)


@pytest.mark.parametrize("others", [{"use_ddp": True}, {}])
def test_deepspeeds_options_are_left_out_with_another_strategy(others: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(BLOCK if others else BLOCK.replace("enabled: true", "enabled: false"))
    config = configure(path, hardware=GPUS, **others)
    assert config.deepspeed.stage is None
    assert config.distributed.strategy == ("ddp" if others else "auto")
    assert any("deepspeed.stage: 2 is left out: the strategy is" in note for note in config.notes), config.notes
    assert "memory.activations" in config.foreign


def test_workers_know_which_flags_stem_from_the_file() -> None:
    flags = [Given("memory.activations", "recompute", "--memory.activations", "command line"),
             Given("batch.size", "4", "--batch.size", "command line")]  # fmt: skip
    for environ, foreign in (({FOREIGN: "memory.activations,precision.dtype"}, {"memory.activations"}), ({}, set())):
        assert resolve([as_launched(flags, environ)]).config.foreign == foreign


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(ACCELERATE)
    assert configure(tmp_path / "theirs.yaml", gpu_mode="cpu", batch_size=4).batch.size == 4


def test_workers_of_a_machine_are_shared_out() -> None:
    places = [ProcessPlace("torchrun", rank, 5, rank, 5) for rank in range(5)]
    config = configure(dataloader_num_workers=12)
    assert [share_workers(config, place).data.num_workers for place in places] == [3, 3, 2, 2, 2]
    assert share_workers(configure(dataloader_num_workers=12, num_workers=1), places[0]).data.num_workers == 1
    assert share_workers(configure(), places[0]).data.num_workers == -1


def test_every_rule_names_a_field() -> None:
    for dialect in DIALECTS:
        for rule in dialect.rules.values():
            for value in (True, False, "fp16", "auto", 1, "distributed"):
                try:
                    meaning: Meaning = rule(value)
                except ValueError:
                    continue
                assert meaning.settings.keys() <= BY_DOTTED.keys()
                assert meaning.settings or meaning.why
