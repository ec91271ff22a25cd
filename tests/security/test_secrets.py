"""Secrets are not recorded, run folders are private, and the text of others does not steer a terminal."""

import json
import stat
import sys
from pathlib import Path

import pytest
import yaml

import drivetrain as dt
from drivetrain.commands.monitor import StatusOptions
from drivetrain.commands.monitor import run_status as status
from drivetrain.config import Resolved
from drivetrain.core.log import HIDDEN, is_secret, printable, redacted, redacted_words
from drivetrain.launch.root_cause import EXCEPTION, Failure, as_json
from drivetrain.report.run_data import RunData, summary
from tests.api.jobs import Variant, make_job
from tests.launch.jobs import launch, script

SMALL = Variant(steps=2, num_samples=16, global_batch=8)
ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202edrawkcab"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", ["api_key", "--api-key", "wandb-token", "TOKEN", "db.password", "aws_secret", "pwd"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["max_tokens", "pad_token", "num_key_value_heads", "key", "tokenizer", "--keyed"])
def test_names_of_others(name: str) -> None:
    assert not is_secret(name)


def test_values_that_look_like_secrets() -> None:
    token = "hf_" + "a1B2" * 8
    found = redacted({"a": [f"use {token} here", "postgres://me:word@db/x"], "lr": 0.1, "password": "", "token": 3})
    assert found == {
        "a": [f"use {HIDDEN} here", f"postgres://me:{HIDDEN}@db/x"], "lr": 0.1, "password": "", "token": 3
    }  # fmt: skip
    assert redacted_words(["-v", "--token", "--lr", "1"]) == ["-v", "--token", "--lr", "1"]  # a flag without a value


def test_a_run_records_no_secret_and_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "correct-horse"
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", secret, f"--password={secret}", "--lr", "0.1"])
    monkeypatch.setattr("drivetrain.run.session.target_of_run", lambda: "train.py")
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", init_method=f"tcp://me:{secret}@127.0.0.1:1")
    result = dt.train(make_job(SMALL), config, quiet=True)
    source = json.loads((result.folder / "source.json").read_text())
    assert source["arguments"] == ["--api-key", HIDDEN, f"--password={HIDDEN}", "--lr", "0.1"]
    stored = yaml.safe_load((result.folder / "config.yaml").read_text())
    assert stored["distributed"]["init_method"] == f"tcp://me:{HIDDEN}@127.0.0.1:1"
    for path in result.folder.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    assert mode(result.folder) == 0o700


def test_a_folder_that_was_opened_to_others_stays_open(tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir(mode=0o750)
    (tmp_path / "suite").chmod(0o750)
    dt.train(make_job(SMALL), dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False), quiet=True)
    assert mode(tmp_path / "suite") == 0o750


def test_a_crash_report_has_no_tokens() -> None:
    token = "ghp_" + "x" * 36
    text = as_json(
        Failure(EXCEPTION, 0, 0, "here", 1, headline=f"denied: {token}", traceback=f"get({token})"), 0, (), ""
    )
    assert token not in text


def test_escape_sequences_become_visible() -> None:
    assert printable(ESCAPE) == r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202edrawkcab"
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("\x1b[31mred\x1b[2J", colors=True) == "\x1b[31mred\\x1b[2J\x1b[0m"


def test_a_rank_cannot_steer_the_terminal_by_its_error(tmp_path: Path) -> None:
    job = script(tmp_path, f"raise ValueError({ESCAPE!r})\n")
    ended = launch(tmp_path, "--max-restarts", "0", "--tail-ranks", "none", str(job), num_processes=1)
    assert ended.code == 1
    assert "\\x1b]0;owned" in ended.err
    assert not set(ended.err) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_a_run_folder_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump({"name": ESCAPE, "num_steps": 3}))
    (folder / "crash.json").write_text(json.dumps({"cause": ESCAPE, "headline": ESCAPE}))
    (folder / "events.jsonl").write_text(json.dumps({"event": "note", "text": ESCAPE}) + "\n")
    resolved = Resolved(dt.configure(output_dir=tmp_path), {})
    assert status(StatusOptions(), resolved) == 0
    shown = capsys.readouterr().out + summary(RunData.read(folder))
    assert "owned" in shown
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_metrics_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def steering(output: object, batch: object) -> float:
        raise ValueError(ESCAPE)

    job = make_job(SMALL, valid=make_job(SMALL).data, metrics={"accuracy": steering})
    with pytest.raises(Exception, match="owned"):
        dt.train(job, dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False))
    captured = capsys.readouterr()
    assert not set(captured.out + captured.err) & {"\x07", "\x9b", "\u202e"}
