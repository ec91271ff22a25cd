"""Flags over YAML over defaults; every problem at once."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.commands.check import as_json, as_yaml
from drivetrain.config import SETTINGS, Config, Given, configure, resolve
from drivetrain.config.resolve import from_plan, from_values, from_yaml
from drivetrain.core.errors import ConfigError
from drivetrain.plan import Choice
from drivetrain.plan.plan import Forecast, MemoryForecast, Plan
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
        ({"name": "a/b"}, "name", "without slashes"),
        ({"name": "../up"}, "name", "without slashes"),
        ({"name": ""}, "name", "text of up to 200 bytes"),
        ({"name": ".."}, "name", "other than . and .."),
        ({"name": "--resume"}, "name", "no - in front"),
        ({"name": "of two\nlines"}, "name", "control characters"),
        ({"name": "\u202eturned round"}, "name", "control characters"),
        ({"name": "\udcc3\udcbc"}, "name", "200 bytes"),  # bytes that Python could not decode
        ({"name": "ä" * 101}, "name", "200 bytes"),
        ({"device": "gpu"}, "device", "auto, cpu, cuda, cuda:n"),
        ({"device_ids": []}, "device_ids", "whole numbers"),
        ({"device_ids": [-1]}, "device_ids", "whole numbers"),
        ({"device_ids": "a,b"}, "device_ids", "whole numbers"),
        ({"precision": "fp4"}, "precision", "auto, fp32, tf32, fp16, bf16, fp8, fp8-tensor"),
        ({"compile": 2}, "compile", "true or false"),
        ({"name": 3}, "name", "text of up to 200 bytes"),
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


def test_an_output_folder_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a file and in Python no shell fills these in: a folder called `~` was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert configure(output_dir="~/runs").run.output_dir == tmp_path / "runs"
    for folder in ("$HOME/runs", "below/${SCRATCH}"):
        with pytest.raises(ConfigError, match="is not filled in: only a shell does so"):
            configure(output_dir=folder)
    with pytest.raises(ConfigError, match="the home folder for ~nobody-at-all is not known"):
        configure(output_dir="~nobody-at-all/runs")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("optimizer:\n  lr: 0.1\n", "did you mean `learning_rate`?"),
        ("eval_strategy: steps\n", "did you mean `valid_every`?"),
        ("trainer: {}\n", "`drivetrain config` lists every key"),
        ("model: {}\n", "`drivetrain config` lists every key"),
    ],
)
def test_keys_of_other_trainers_are_not_guessed_wrong(text: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        configure(str(tmp_path / "theirs.yaml"))
    assert remedy in str(caught.value)


@settings(max_examples=50)
@given(st.sets(st.sampled_from(sorted(VALUES))))
def test_what_config_prints_is_a_configuration_file(names: set[str]) -> None:
    resolved = resolve([[Given(name, VALUES[name][1], name, "flags") for name in names]])
    text = as_yaml(resolved)
    again = configure(**yaml.safe_load(text))
    assert again == resolved.config
    assert set(json.loads(as_json(resolved))) == {setting.name for setting in SETTINGS}


def test_a_config_is_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        Config().run.seed = 3  # type: ignore[misc]


def write(folder: Path, text: str | bytes, name: str = "train.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "batch_size: 8\n",
        "batch-size: 8\n",
        "batch.size: 8\n",
        "batch:\n  size: 8\n",
        "Batch:\n  Size: 8\n",
        "{batch: {size: 8}}",
    ],
)
def test_one_field_by_each_of_its_names(tmp_path: Path, text: str) -> None:
    given, problems = from_yaml(write(tmp_path, text))
    assert problems == []
    assert [(entry.name, entry.value) for entry in given] == [("batch.size", 8)]


def test_a_section_and_a_field_of_the_same_name(tmp_path: Path) -> None:
    given, problems = from_yaml(write(tmp_path, "device: cuda:0\ncompile: true\nprecision: {dtype: bf16}\n"))
    assert problems == []
    assert {entry.name: entry.value for entry in given} == {
        "device.device": "cuda:0",
        "compile.enabled": True,
        "precision.dtype": "bf16",
    }


def test_the_line_of_each_key_is_known(tmp_path: Path) -> None:
    given, _ = from_yaml(write(tmp_path, "# a comment\nepochs: 3\nbatch:\n  size: 8\n"))
    assert [entry.source for entry in given] == ["train.yaml line 2", "train.yaml line 4"]


def test_anchors_and_merges(tmp_path: Path) -> None:
    text = "batch: &small\n  size: 8\n  accumulation: 2\n"
    given, problems = from_yaml(write(tmp_path, text))
    assert problems == []
    assert {entry.name: entry.value for entry in given} == {"batch.size": 8, "batch.accumulation": 2}
    given, problems = from_yaml(write(tmp_path, "run: {seed: &n 7}\nbudget: {epochs: *n}\n"))
    assert problems == []
    assert {entry.name: entry.value for entry in given} == {"run.seed": 7, "budget.epochs": 7}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs: [1\n", "does not parse as YAML: line 2"),
        ("epochs: 3\n  seed: 1\n", "does not parse as YAML: line 2"),
        ("- 1\n- 2\n", "it holds no keys"),
        ("just words", "it holds no keys"),
        ("a: 1\n---\nb: 2\n", "does not parse as YAML"),
        ("seed: !!python/object/apply:os.system ['true']\n", "does not parse as YAML"),
        ("seed: &a [*a]\n", "does not parse as YAML"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"seed: \x00", "does not parse as YAML"),
        ("seed: 2024-13-45\n", "does not parse as YAML"),
    ],
)
def test_files_that_are_wrong_as_a_whole(tmp_path: Path, text: str | bytes, words: str) -> None:
    given, problems = from_yaml(write(tmp_path, text))
    assert given == []
    assert len(problems) == 1
    assert words in problems[0].message
    assert "train.yaml" in problems[0].message
    assert problems[0].remedy


def test_missing_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path, "", "training.yaml")
    _, problems = from_yaml(tmp_path / "trainin.yaml")
    assert "no such file" in problems[0].message
    assert "training.yaml" in problems[0].remedy
    _, problems = from_yaml(tmp_path / "nowhere" / "x.yaml")
    assert "no such file" in problems[0].message
    _, problems = from_yaml(tmp_path)
    assert "this is a folder" in problems[0].message


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert from_yaml(write(tmp_path, "# nothing yet\n")) == ([], [])


def test_all_wrong_keys_at_once_with_the_right_names(tmp_path: Path) -> None:
    _, problems = from_yaml(write(tmp_path, "epoch: 3\nbatch:\n  sise: 8\ndevice:\n  idz: [0]\nzzz: 1\nrun: 3\n"))
    by_key = {problem.key: problem for problem in problems}
    assert list(by_key) == ["epoch", "batch.sise", "device.idz", "zzz", "run"]
    assert "`epochs`" in by_key["epoch"].remedy
    assert "`batch.size`" in by_key["batch.sise"].remedy
    assert "`device.ids`" in by_key["device.idz"].remedy
    assert "drivetrain config" in by_key["zzz"].remedy
    assert "section" in by_key["run"].message
    assert by_key["batch.sise"].source == "train.yaml line 3"


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    _, problems = from_yaml(write(tmp_path, "epochs: 3\nseed: 1\nepochs: 4\n"))
    assert len(problems) == 1
    assert "lines 1 and 3" in problems[0].message


def test_python_values_nested_or_not() -> None:
    given, problems = from_values({"batch": {"size": 8}, "epochs": 3, "device.mode": "cpu"})
    assert problems == []
    assert {entry.name: entry.value for entry in given} == {"batch.size": 8, "budget.epochs": 3, "device.mode": "cpu"}


def written_plan() -> str:
    choices = {
        "precision.dtype": Choice(value="fp32", reason="on a CPU: it is the rule"),
        "batch.size": Choice(value=8, reason="asked for", alternatives=("4: 10 samples/s",)),
        "data.num_workers": Choice(value=None, reason="by rule"),
    }
    memory = MemoryForecast(parameters=1, gradients=1)
    return Plan(job="x", global_batch=8, num_steps=4, choices=choices, forecast=Forecast(memory=memory)).to_yaml()


def test_a_plan_is_refused_wherever_it_was_cut(tmp_path: Path) -> None:
    text = written_plan()
    given, problems, global_batch = from_plan(write(tmp_path, text, "plan.yaml"))
    assert problems == []
    assert global_batch == 8
    assert {entry.name: entry.value for entry in given} == {"precision.dtype": "fp32", "batch.size": 8}
    assert {entry.source for entry in given} == {"plan.yaml line 9", "plan.yaml line 12"}
    for length in range(len(text.rstrip())):
        given, problems, _ = from_plan(write(tmp_path, text[:length], "plan.yaml"))
        assert given == []
        assert len(problems) == 1, text[:length]
        whole_enough = length > text.index("planned:") + len("planned")
        assert ("it is cut off" if whole_enough else "it holds no plan") in problems[0].message


def test_a_plan_by_hand_needs_no_more_than_choices(tmp_path: Path) -> None:
    given, problems, _ = from_plan(write(tmp_path, "choices:\n  batch.size: {value: 8}\n", "mine.yaml"))
    assert problems == []
    assert [(entry.name, entry.value) for entry in given] == [("batch.size", 8)]


def test_a_plan_by_hand_may_merge_what_stands_elsewhere(tmp_path: Path) -> None:
    text = "base: &base {batch.size: {value: 8}}\nchoices:\n  <<: *base\n  compile: {value: true}\n"
    given, problems, _ = from_plan(write(tmp_path, text, "mine.yaml"))
    assert {entry.name: entry.value for entry in given} == {"batch.size": 8, "compile.enabled": True}
    assert not problems


@pytest.mark.parametrize("value", ['!!int ""', '!!timestamp "x"', "!!float x", "!odd x", "!!binary é"])
def test_values_that_no_tag_makes_sense_of_are_taken_as_they_stand(tmp_path: Path, value: str) -> None:
    text = f"choices:\n  batch.size:\n    value: {value}\n"
    with pytest.raises(ConfigError, match=r"batch\.size"):
        configure(plan=write(tmp_path, text, "mine.yaml"))


def test_what_is_wrong_in_a_plan_is_told_by_file_line_and_key(tmp_path: Path) -> None:
    text = (
        "choices:\n  batch.size:\n    value: lots\n  precision.dtype:\n    why: so\n  bach.accumulation: {value: 1}\n"
    )
    text += "  kernels.capture: {value: 2024-13-45}\n  compile.enabled: {value: maybe}\n"
    with pytest.raises(ConfigError) as caught:
        configure(plan=write(tmp_path, text, "mine.yaml"))
    found = {problem.key: problem for problem in caught.value.problems}
    assert {problem.source for problem in found.values()} == {f"mine.yaml line {line}" for line in (2, 4, 6, 7, 8)}
    assert found["precision.dtype"].message == "it has no value"
    assert "batch.accumulation" in found["bach.accumulation"].remedy
    assert found["batch.size"].remedy == "write one of the allowed, or leave batch.size out"
    assert "--" not in "".join(problem.remedy for problem in found.values())
    with pytest.raises(ConfigError) as caught:
        configure(write(tmp_path, "gpu_memory_fraction: lots\n"), seed="x")
    assert [problem.remedy for problem in caught.value.problems] == [
        "for example gpu_memory_fraction: 0.9",
        "for example seed=0",
    ]


def test_a_plan_holds_nothing_but_choices_of_a_plan(tmp_path: Path) -> None:
    text = "global_batch: many\nchoices:\n  epochs: {value: 3}\n  batch.size: {value: 8}\n  run.seed: {value: 1}\n"
    with pytest.raises(ConfigError) as caught:
        configure(plan=write(tmp_path, text, "mine.yaml"))
    problems = caught.value.problems
    assert [(problem.key, problem.source) for problem in problems] == [
        ("global_batch", "mine.yaml line 1"), ("epochs", "mine.yaml line 3"), ("run.seed", "mine.yaml line 5")
    ]  # fmt: skip
    assert problems[1].message == "this is not a choice of a plan"
    assert "--epochs" in problems[1].remedy


@pytest.mark.parametrize(("asked", "expected"), [("ready", 727), (3, 3)])
def test_a_plan_knows_when_compiled_code_was_ready(asked: str | int, expected: int, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("choices:\n  compile.from_step:\n    value: 727\n")
    assert configure(plan=plan, compile=True, compile_from=asked).compile.from_step == expected


def test_a_flag_for_the_batch_leaves_nothing_of_what_a_plan_says_of_it(tmp_path: Path) -> None:
    file = write(tmp_path, "choices:\n  batch.size: {value: 8}\n  batch.accumulation: {value: 4}\n", "mine.yaml")
    pinned = configure(plan=file)
    assert (pinned.batch.size, pinned.batch.accumulation, pinned.batch_asked.is_set) == (8, 4, False)
    asked = configure(plan=file, batch_size=16)
    assert (asked.batch.size, asked.batch.accumulation) == (16, None)
    assert asked.batch_asked.is_set
