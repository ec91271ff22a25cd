"""Flags over YAML over defaults; every problem at once."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.commands.config import as_json, as_yaml
from drivetrain.config import SETTINGS, Config, Given, configure, resolve
from drivetrain.core.errors import ConfigError
from tests.hardware_fixtures import load

# One good value per field and source, so that any mix of sources is a valid configuration.
VALUES = {
    "run.name": ("a", "b", "c"),
    "run.output_dir": ("x", "y", "z"),
    "run.seed": (1, 2, 3),
    "batch.size": (4, 5, 6),
    "batch.accumulation": (7, 8, 9),
    "budget.epochs": (10, 11, 12),
    "budget.max_steps": (13, 14, 15),
    "optimizer.learning_rate": (0.1, 0.2, 0.3),
    "data.num_workers": (0, 1, 2),
    "precision.dtype": ("fp32", "bf16", "auto"),
}


def value_of(config: Config, name: str) -> object:
    section, field = name.split(".")
    value = getattr(getattr(config, section), field)
    return str(value) if isinstance(value, Path) else value


@given(
    in_file=st.sets(st.sampled_from(sorted(VALUES))),
    in_python=st.sets(st.sampled_from(sorted(VALUES))),
    in_flags=st.sets(st.sampled_from(sorted(VALUES))),
)
def test_the_later_source_wins(in_file: set[str], in_python: set[str], in_flags: set[str]) -> None:
    sources = [
        [Given(name, VALUES[name][number], name, source) for name in names]
        for number, (names, source) in enumerate([(in_file, "file"), (in_python, "Python"), (in_flags, "flags")])
    ]
    resolved = resolve(sources)
    for name in VALUES:
        expected = next(
            ((VALUES[name][i], source) for i, names, source in
             ((2, in_flags, "flags"), (1, in_python, "Python"), (0, in_file, "file")) if name in names),
            (value_of(Config(), name), None),
        )  # fmt: skip
        assert value_of(resolved.config, name) == expected[0]
        assert resolved.source(name) == (f"{expected[1]} ({name})" if expected[1] else "default")


def test_a_file_under_python_values(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("epochs: 3\nbatch_size: 8\n")
    config = configure(path, epochs=4)
    assert (config.budget.epochs, config.batch.size) == (4, 8)


def test_every_problem_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        configure(epoch=3, batch_size=0, gpu_mode="gpu", learning_rate="fast", compile="maybe", num_workers=1.5)
    assert {problem.key for problem in caught.value.problems} == {
        "epoch",
        "batch_size",
        "gpu_mode",
        "learning_rate",
        "compile",
        "num_workers",
    }
    for problem in caught.value.problems:
        assert problem.remedy, problem
        assert problem.source == "Python"


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"epochs": True}, "epochs", "a whole number, at least 1"),
        ({"epochs": 0}, "epochs", "at least 1"),
        ({"epochs": 2.5}, "epochs", "a whole number"),
        ({"epochs": [1]}, "epochs", "a whole number"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"accumulation_steps": 0}, "accumulation_steps", "at least 1"),
        ({"learning_rate": 0}, "learning_rate", "more than 0"),
        ({"learning_rate": float("nan")}, "learning_rate", "a number"),
        ({"learning_rate": float("inf")}, "learning_rate", "a number"),
        ({"name": "a/b"}, "name", "letters, digits"),
        ({"name": "../up"}, "name", "letters, digits"),
        ({"device": "gpu"}, "device", "auto, cpu, cuda, cuda:n"),
        ({"device_ids": []}, "device_ids", "whole numbers"),
        ({"device_ids": [-1]}, "device_ids", "whole numbers"),
        ({"device_ids": "a,b"}, "device_ids", "whole numbers"),
        ({"precision": "fp8"}, "precision", "auto, fp32, tf32, fp16, bf16"),
        ({"compile": 2}, "compile", "true or false"),
        ({"name": 3}, "name", "letters, digits"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(values: dict[str, object], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(**values)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert words in problem.allowed
    assert repr(next(iter(values.values()))) in problem.message


def test_the_nearest_choice_is_suggested() -> None:
    with pytest.raises(ConfigError) as caught:
        configure(gpu_mode="sinlge_gpu")
    assert "`single_gpu`" in caught.value.problems[0].remedy


def test_two_names_of_one_field_with_different_values() -> None:
    with pytest.raises(ConfigError) as caught:
        configure(precision="bf16", amp_dtype="fp32")
    assert "set twice, to 'bf16' and to 'fp32'" in str(caught.value)
    assert configure(precision="bf16", amp_dtype="bf16").precision.dtype == "bf16"


def test_other_words_for_nothing_set() -> None:
    config = configure(batch_size="auto", amp_dtype="none", epochs=None)
    assert config.batch.size is None
    assert config.precision.dtype == "fp32"


@pytest.mark.parametrize("value", ["true", "yes", "on", "1", True, "TRUE"])
def test_words_for_true(value: object) -> None:
    assert configure(compile=value).compile.enabled is True


CONTRADICTIONS = [
    ("4x-l4", {"gpu_mode": "cpu", "precision": "fp16"}, "precision", "fp16 needs a GPU, but gpu_mode: cpu"),
    ("4x-l4", {"device": "cpu", "precision": "tf32"}, "precision", "tf32 needs a GPU, but device: cpu"),
    ("4x-l4", {"gpu_mode": "cpu", "device": "cuda:0"}, "device", "asks for a GPU, but gpu_mode: cpu"),
    ("4x-l4", {"gpu_mode": "multi_gpu", "device": "cpu"}, "device", "asks for the CPU, but gpu_mode: multi_gpu"),
    ("4x-l4", {"gpu_mode": "multi_gpu", "device": "cuda:1"}, "device", "names one GPU"),
    ("4x-l4", {"gpu_mode": "single_gpu", "device_ids": [0, 1]}, "device_ids", "names 2 GPUs"),
    ("4x-l4", {"gpu_mode": "multi_gpu", "device_ids": [1]}, "device_ids", "names one GPU"),
    ("4x-l4", {"device_ids": [1, 1]}, "device_ids", "names a GPU twice"),
    ("4x-l4", {"gpu_mode": "cpu", "device_ids": [0]}, "device_ids", "asks for the CPU"),
    ("4x-l4", {"device": "cuda:0", "device_ids": [1]}, "device_ids", "both choose the GPU"),
    ("4x-l4", {"device_ids": [2, 7]}, "device_ids", "there is no GPU 7: 4 GPUs are visible, cuda:0 to cuda:3"),
    ("4x-l4", {"device": "cuda:4"}, "device", "there is no such GPU"),
    ("4x-l4", {"gpu_mode": "cpu", "pin_memory": True}, "pin_memory", "asks for the CPU"),
    ("4x-l4", {"compile_mode": "max-autotune"}, "compile_mode", "compiling is not asked for"),
    ("cpu-2core", {"precision": "fp16"}, "precision", "there is none to use"),
    ("cpu-2core", {"gpu_mode": "single_gpu"}, "gpu_mode", "asks for a GPU, and there is none"),
    ("cpu-2core", {"device": "cuda"}, "device", "asks for a GPU, and there is none"),
    ("cpu-2core", {"device_ids": [0]}, "device_ids", "there is none"),
    ("cpu-2core", {"pin_memory": True}, "pin_memory", "there is none"),
    ("mixed-3090-1080", {"precision": "tf32"}, "precision", "GTX 1080"),
    (
        "4x-l4",
        {"parallel_strategy": "fsdp", "static_graph": True},
        "static_graph",
        "is an option of ddp, but parallel_strategy: fsdp asks for another strategy",
    ),
    ("4x-l4", {"parallel_strategy": "ddp", "fsdp_offload": True}, "fsdp_offload", "is an option of fsdp"),
    ("4x-l4", {"parallel_strategy": "expert_parallel", "fsdp_offload": True}, "fsdp_offload", "is an option of fsdp"),
    (
        "4x-l4",
        {"parallel_strategy": "expert_parallel", "expert_rest": "fsdp", "bucket_cap_mb": 10},
        "bucket_cap_mb",
        "is an option of ddp",
    ),
    ("4x-l4", {"parallel_strategy": "fsdp", "expert_rest": "fsdp"}, "expert_rest", "the strategy is fsdp"),
    (
        "4x-l4",
        {"parallel_strategy": "expert_parallel", "expert_rest": "fsdp", "fsdp_offload": True, "precision": "fp16"},
        "fsdp_offload",
        "steps the optimizer in host memory",
    ),
    (
        "4x-l4",
        {"parallel_strategy": "fsdp", "fsdp_offload": True, "precision": "fp16"},
        "fsdp_offload",
        "steps the optimizer in host memory",
    ),
]


@pytest.mark.parametrize(("machine", "values", "key", "words"), CONTRADICTIONS)
def test_contradictions(machine: str, values: dict[str, object], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(hardware=load(machine), **values)
    assert key in {problem.key for problem in caught.value.problems}
    problem = next(problem for problem in caught.value.problems if problem.key == key)
    assert words in problem.message
    assert problem.remedy


@pytest.mark.parametrize(
    ("machine", "values"),
    [
        ("4x-l4", {"gpu_mode": "multi_gpu", "device_ids": [1, 3], "precision": "fp16", "pin_memory": True}),
        ("4x-l4", {"device": "cuda:3", "precision": "tf32"}),
        ("4x-l4", {"gpu_mode": "cpu", "precision": "bf16"}),
        ("cpu-2core", {"gpu_mode": "cpu", "precision": "bf16", "pin_memory": False}),
        ("mixed-3090-1080", {"precision": "tf32", "device_ids": [0]}),
        ("4x-l4", {"compile": True, "compile_mode": "max-autotune"}),
        ("4x-l4", {"fsdp_cast": "blocks", "bucket_cap_mb": 10}),  # whichever strategy is chosen
        ("cpu-2core", {"parallel_strategy": "fsdp", "fsdp_accumulate": "shards", "find_unused_parameters": True}),
        ("4x-l4", {"parallel_strategy": "expert_parallel", "expert_rest": "fsdp", "fsdp_offload": True}),
        ("4x-l4", {"parallel_strategy": "expert_parallel", "bucket_cap_mb": 10}),
    ],
)
def test_combinations_that_are_fine(machine: str, values: dict[str, object]) -> None:
    configure(hardware=load(machine), **values)


def test_contradictions_are_reported_beside_wrong_values() -> None:
    with pytest.raises(ConfigError) as caught:
        configure(hardware=load("4x-l4"), gpu_mode="cpu", precision="fp16", epochs=0, batchsize=3, device_ids=[7])
    assert {problem.key for problem in caught.value.problems} == {"precision", "epochs", "batchsize", "device_ids"}


def test_an_invalid_value_makes_no_second_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        configure(hardware=load("cpu-2core"), device="gpu", precision="fp16")
    assert [problem.key for problem in caught.value.problems] == ["device"]


def test_the_machine_is_asked_only_where_it_matters() -> None:
    def must_not_be_called() -> None:
        raise AssertionError

    resolve([[Given("budget.epochs", 3, "epochs", "flags")]], hardware=must_not_be_called)


def test_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(ConfigError, match="is a file"):
            configure(output_dir=folder)


@settings(max_examples=50)
@given(st.sets(st.sampled_from(sorted(VALUES))))
def test_what_config_prints_is_a_configuration_file(names: set[str]) -> None:
    resolved = resolve([[Given(name, VALUES[name][1], name, "flags") for name in names]])
    text = as_yaml(resolved)
    again = configure(**yaml.safe_load(text))
    assert again == resolved.config
    assert set(yaml.safe_load(as_json(resolved))) == {setting.name for setting in SETTINGS}


def test_a_config_is_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        Config().run.seed = 3  # type: ignore[misc]
