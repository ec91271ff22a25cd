"""The logger `drivetrain`: the user's logging gets what is printed, and nothing is printed twice."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import drivetrain as dt
from drivetrain.core.log import LOGGER, log, notice
from tests.api.jobs import Variant, make_job

SMALL = Variant(steps=6, num_samples=60, global_batch=20)
LINE = "step      6   loss"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    before = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    LOGGER.propagate = False  # pytest's own handlers are at the root
    yield LOGGER
    LOGGER.handlers[:], LOGGER.level, LOGGER.propagate = before


def train(folder: Path, **settings: object) -> None:
    dt.train(make_job(SMALL), dt.configure(output_dir=folder, gpu_mode="cpu", report=False, **settings))


def test_without_a_configuration_lines_are_printed_once(tmp_path: Path, logger, capsys) -> None:
    train(tmp_path)
    out, err = capsys.readouterr()
    assert out.count(LINE) == 1
    assert LINE not in err


def test_a_handler_for_a_file_gets_what_is_printed(tmp_path: Path, logger, capsys) -> None:
    logger.addHandler(logging.FileHandler(tmp_path / "log.txt"))
    logger.setLevel(logging.DEBUG)
    train(tmp_path)
    text = (tmp_path / "log.txt").read_text()
    assert text.count(LINE) == 1
    assert "event finish" in text
    assert "[bold]" not in text
    assert capsys.readouterr().out.count(LINE) == 1


def test_a_handler_for_the_terminal_is_the_only_one_to_write_there(tmp_path: Path, logger, capsys) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("mine: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    train(tmp_path)
    out, err = capsys.readouterr()
    assert err.count(LINE) == 1
    assert LINE not in out
    assert "mine: epoch   2" in err


def test_the_levels_of_the_user_are_honoured(logger, capsys) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    assert not log("a line"), "the console prints it"
    notice("careful")
    assert capsys.readouterr().err == "drivetrain: careful\n"
    handler.setLevel(logging.WARNING)
    notice("careful")
    assert capsys.readouterr().err == "careful\n"


def test_quiet_is_quiet(tmp_path: Path, logger, capsys) -> None:
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.setLevel(logging.INFO)
    train(tmp_path, quiet=True)
    assert LINE not in capsys.readouterr().err
