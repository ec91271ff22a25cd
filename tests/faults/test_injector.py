"""`--inject`: faults by name, each once."""

import json
from pathlib import Path

import pytest

from drivetrain import ConfigError, DrivetrainError
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core.faults import KINDS, Fault, Faults, parse_faults
from tests.api.jobs import Variant, make_job, run
from tests.launch.jobs import launch

VARIANT = Variant(steps=6, save_every=2)
SCRIPT = Path(__file__).parent.parent / "launch" / "training_script.py"


def test_words_are_faults() -> None:
    assert parse_faults("kill@120:rank1, nan@7") == (Fault("kill", 120, 1), Fault("nan", 7))
    assert parse_faults("") == ()
    assert [str(fault) for fault in parse_faults("disk-full@3:rank0,slow@1")] == ["disk-full@3:rank0", "slow@1"]


@pytest.mark.parametrize("word", ["explode@3", "kill", "kill@0", "kill@3:1", "kill@3:rankx"])
def test_a_wrong_word_names_the_kinds(word: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(inject=word)
    assert word in str(raised.value)
    assert all(kind in str(raised.value) for kind in KINDS)


def test_each_happens_once_in_a_folder_on_its_rank(tmp_path: Path) -> None:
    named = parse_faults("exception@2:rank1,exception@2")
    ours = Faults(named, 0, tmp_path)
    ours.step = 2
    assert ours.take("exception") == Fault("exception", 2)
    assert ours.take("exception") is None
    again = Faults(named, 0, tmp_path)  # as after a restart
    again.step = 2
    assert again.take("exception") is None
    other = Faults(named, 1, tmp_path)
    other.step = 2
    assert [other.take("exception"), other.take("exception"), other.take("exception")] == [*named, None]


def test_an_exception_comes_once_and_the_run_goes_on(tmp_path: Path) -> None:
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False, inject="exception@4")
    with pytest.raises(RuntimeError, match=r"injected by --inject exception@4"):
        train(make_job(VARIANT), config, quiet=True)
    assert train(make_job(VARIANT), config, quiet=True).resumed_from == 2
    plain = run(str(tmp_path / "plain"), VARIANT)
    assert plain is not None
    rows = [json.loads(line) for line in (tmp_path / "suite" / "steps.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == plain.losses


def test_a_full_disk_costs_one_checkpoint(tmp_path: Path) -> None:
    config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False, inject="disk-full@1")
    assert train(make_job(VARIANT), config, quiet=True).finished
    rows = [json.loads(line) for line in (tmp_path / "suite" / "events.jsonl").read_text().splitlines()]
    kept = [(row["event"], row["step"]) for row in rows if row["event"] in ("checkpoint", "save failed")]
    assert kept == [("save failed", 2), ("checkpoint", 4), ("checkpoint", 6)]


def test_a_variable_with_wrong_words_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_INJECT", "explode@3")
    with pytest.raises(DrivetrainError, match="explode@3"):
        run(str(tmp_path), VARIANT)


def test_a_rank_of_a_launched_script_is_killed_once(tmp_path: Path) -> None:
    done = launch(tmp_path, "--inject", "kill@5:rank1", str(SCRIPT), str(tmp_path), "8", forks=True)
    assert done.code == 0, done.err
    assert "rank 1" in done.err
    assert "ended by SIGKILL" in done.err
    assert "restart 1 of" in done.err
    assert [path.name for path in (tmp_path / "runs" / "launched" / "injected").iterdir()] == ["kill@5-rank1-on-rank1"]
