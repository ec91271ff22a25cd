"""YAML and Python values: every name of a field, every way a file can be wrong."""

from pathlib import Path

import pytest

from drivetrain.config import configure
from drivetrain.config.sources import from_plan, from_values, from_yaml
from drivetrain.core.errors import ConfigError
from drivetrain.plan import Choice
from drivetrain.plan.plan import Forecast, MemoryForecast, Plan


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


def test_a_flag_for_the_batch_leaves_nothing_of_what_a_plan_says_of_it(tmp_path: Path) -> None:
    file = write(tmp_path, "choices:\n  batch.size: {value: 8}\n  batch.accumulation: {value: 4}\n", "mine.yaml")
    pinned = configure(plan=file)
    assert (pinned.batch.size, pinned.batch.accumulation, pinned.batch_asked.is_set) == (8, 4, False)
    asked = configure(plan=file, batch_size=16)
    assert (asked.batch.size, asked.batch.accumulation) == (16, None)
    assert asked.batch_asked.is_set
