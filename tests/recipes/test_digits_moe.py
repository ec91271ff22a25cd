"""The demo: it grows and sleeps, says so, and leaves its pictures. The example: every flag of its guide."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import main
from drivetrain.config import configure
from drivetrain.core.errors import DrivetrainError
from drivetrain.recipes import digits_moe
from drivetrain.recipes.digits_moe import accuracy_of, mixture_job, show_mixture
from drivetrain.recipes.mnist import load_pictures
from tests import warm_python
from tests.recipes.test_mnist import write

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpu_training_example.py"


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


def test_the_demo_grows_sleeps_and_leaves_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a fifth of its steps."""
    flags = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path), "--epochs", "2", "--no-auto-optimize"]
    assert main(["train", "digits-moe", *flags]) == 0
    run, said = tmp_path / "digits-moe", capsys.readouterr().out
    grown = [row for row in events(run, "expert") if row["what"] in ("grown", "split")]
    nights = events(run, "sleep")
    assert grown
    assert nights
    for row in [row for row in grown if row["what"] == "grown"]:
        assert f"step {row['step']:>6}   expert {row['expert']} grown from {row['parent']}" in said
    for night in nights:
        assert f"step {night['step']:>6}   sleep {night['cycle']}: {night['why']}" in said
        assert night["before"].keys() == night["after"].keys() == {"valid_loss", "valid_accuracy"}
        assert 0 < night["seconds"] < 600
    names = ["training_metrics.png", "expert_lifecycle.png", "expert_activations.png", "knowledge_graph.png"]
    names += ["knowledge_graph_epoch_1.png", "knowledge_graph_epoch_2.png"]
    for name in names:
        assert (run / name).read_bytes().startswith(b"\x89PNG"), name
    assert all(str(run / name) in said for name in names[:4])
    assert not (run / "expert_device_distribution.png").exists(), "there is one device"
    page = (run / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert f"sleep {nights[0]['cycle']}" in page
    assert "compilation           not used" in (run / "performance_summary.txt").read_text()
    assert "test pictures are read correctly" in said
    found = float(said.split("% of the 360")[0].split()[-1]) / 100
    assert found > 0.85, "97 % takes all of its steps"


def settings(name: str, **changes: Any) -> Any:
    given = {"gpu_mode": "cpu", "name": name, "auto_optimize": False, "report": False, "quiet": True}
    return configure(**{**given, **changes})


def test_the_same_seed_gives_the_same_experts_and_the_test_pictures_wait_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import drivetrain as dt

    pictures = load_pictures("digits")
    for name in ("one", "other"):
        config = settings(name, output_dir=tmp_path, max_steps=12, num_threads=1, experts=4)
        result = dt.train(mixture_job("digits-moe", pictures, config, epochs=9, global_batch=32), config, quiet=True)
        assert 0 < accuracy_of(result, pictures, 4) < 1

    def what(name: str) -> list[Any]:
        rows = [*events(tmp_path / name, "expert"), *events(tmp_path / name, "sleep")]
        return [{key: value for key, value in row.items() if key not in ("time", "seconds")} for row in rows]

    assert what("one") == what("other") != []
    show_mixture(result, pictures)
    assert "test pictures are read correctly" in capsys.readouterr().out
    monkeypatch.setattr(digits_moe, "accuracy_of", None)
    show_mixture(replace(result, finished=False), pictures)
    said = capsys.readouterr().out
    assert "read once, when the run is at its end" in said, "a run that was stopped leaves them alone"
    assert "read correctly" not in said


def test_a_run_does_not_go_on_with_another_number_of_experts(tmp_path: Path) -> None:
    """Its checkpoint says how many there are: what is asked for would be passed over in silence."""
    import drivetrain as dt

    pictures = load_pictures("digits")

    def go_on(**changes: Any) -> Any:
        config = settings("mine", output_dir=tmp_path, max_steps=3, **changes)
        return dt.train(mixture_job("digits-moe", pictures, config, epochs=9, global_batch=32), config, quiet=True)

    go_on()
    (tmp_path / "mine" / "finished.json").unlink()  # as if it had been stopped
    assert go_on().resumed_from == 3
    (tmp_path / "mine" / "finished.json").unlink()
    with pytest.raises(DrivetrainError, match="experts is 5 now and was None") as caught:
        go_on(experts=5)
    assert "--name" in caught.value.remedy


@pytest.fixture(scope="module")
def example() -> Any:
    import runpy

    return runpy.run_path(str(EXAMPLE))


def test_the_example_takes_every_flag_of_the_guide(example: Any) -> None:
    words = [
        *("--gpu-mode", "cpu", "--parallel-strategy", "expert_parallel", "--mixed-precision"),
        *("--precision-type", "bf16", "--batch-size", "64", "--accumulation-steps", "4", "--epochs", "7"),
        *("--experts", "5", "--compile", "--compile-mode", "reduce-overhead", "--monitor-gpu"),
    ]
    found = example["settings"](example["flags"]().parse_args(words))
    config = configure(**{**found, "parallel_strategy": "auto"})  # which needs a launcher
    assert found["parallel_strategy"] == "expert_parallel"
    assert (config.batch.size, config.batch.accumulation, config.budget.epochs) == (64, 4, 7)
    assert (config.precision.dtype, config.moe.experts) == ("bf16", 5)
    assert (config.compile.enabled, config.compile.mode) == (True, "reduce-overhead")
    assert config.watch.gpu_log_interval == 10
    automatic = example["settings"](example["flags"]().parse_args([*words, "--auto-batch-size"]))
    assert automatic == found | {"auto_batch_size": True}
    spelled = [word.replace("-", "_").replace("__", "--", 1) if word.startswith("--") else word for word in words]
    assert "--gpu_mode" in spelled
    assert example["settings"](example["flags"]().parse_args(example["plain"](spelled))) == found
    assert example["plain"](["--data_dir=a_b", "a_b"]) == ["--data-dir=a_b", "a_b"]


def test_a_precision_type_without_mixed_precision_is_said_to_do_nothing(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = {}
    for words in (["--precision-type", "bf16"], ["--precision-type", "bf16", "--mixed-precision"], []):
        given = ["gpu_training_example.py", "--gpu-mode", "cpu", "--data-dir", str(tmp_path / "none"), *words]
        monkeypatch.setattr(sys, "argv", given)
        assert example["main"]() == 2, "there is no such folder"
        said[len(words)] = capsys.readouterr().err
    assert said[2].startswith("gpu_training: --precision-type bf16 does nothing without --mixed-precision; add that")
    assert "--precision-type" not in said[3] + said[0]


def test_accumulation_multiplies_the_batch_of_the_example_once(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []

    def kept(job: Any, config: Any) -> None:
        jobs.append(job)
        raise DrivetrainError("not trained")

    monkeypatch.setattr("drivetrain.train", kept)
    monkeypatch.setattr(sys, "argv", ["x", "--gpu_mode", "cpu", "--data", "digits", "--accumulation_steps", "2"])
    assert example["main"]() == 1
    assert (jobs[0].global_batch, jobs[0].default_batch) == (None, 128)  # the run makes 128 × 2 × devices of it


def test_the_example_runs_on_a_folder_of_mnist(tmp_path: Path) -> None:
    """As a user starts it; files are made here, so nothing is downloaded."""
    folder = write(tmp_path / "data")
    environ = {**os.environ, "DRIVETRAIN_CACHE": str(tmp_path / "cache")}
    words = ["--gpu-mode", "cpu", "--data-dir", str(folder), "--epochs", "1", "--batch-size", "8"]
    done = warm_python.run([str(EXAMPLE), *words, "--output-dir", str(tmp_path)], env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "of the 10 test pictures" in done.stdout
    assert (tmp_path / "gpu_training" / "performance_summary.txt").exists()
