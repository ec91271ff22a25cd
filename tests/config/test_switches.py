"""Flags without a value that stand for one value of a field, in every spelling and from every source."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import COMMANDS, flag_parser
from drivetrain.config import configure, from_yaml, resolve
from drivetrain.core.errors import ConfigError


def strategy(*words: str) -> str:
    parsed = flag_parser("train", COMMANDS["train"].load()).parse(["digits", *words])
    return resolve([parsed.given], parsed.problems).config.distributed.strategy


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--deepspeed"], "deepspeed"),
        (["--use_deepspeed"], "deepspeed"),
        (["--use-deepspeed", "true"], "deepspeed"),
        (["--use_ddp"], "ddp"),
        (["--use-ddp=yes"], "ddp"),
        (["--use_ddp", "false"], "auto"),
        (["--use_ddp", "false", "--parallel_strategy", "fsdp"], "fsdp"),
        (["--deepspeed", "--parallel-strategy", "deepspeed"], "deepspeed"),
    ],
)
def test_on_the_command_line(words: list[str], expected: str) -> None:
    assert strategy(*words) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--use_ddp", "--deepspeed"], "--use-ddp and --deepspeed (command line): set twice"),
        (["--use_ddp", "--parallel-strategy", "fsdp"], "set twice, to 'ddp' and to 'fsdp'"),
        (["--deepspeed", "ds.json"], "--deepspeed-config names a file"),
        (["--deepspeed=ds.json"], "--deepspeed-config names a file"),
        (["--use-ddp=maybe"], "it is a switch for --parallel-strategy ddp"),
    ],
)
def test_what_cannot_be_meant(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy(*words)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("use_ddp: true", "ddp"), ("use_deepspeed: false", "auto"), ("deepspeed: true", "deepspeed")],
)
def test_in_a_file(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert resolve([from_yaml(tmp_path / "a.yaml")[0]]).config.distributed.strategy == expected


@pytest.mark.parametrize(("given", "expected"), [({"use_ddp": True}, "ddp"), ({"use_deepspeed": False}, "auto")])
def test_in_python(given: dict[str, Any], expected: str) -> None:
    assert configure(**given).distributed.strategy == expected


def test_a_switch_takes_no_other_value() -> None:
    with pytest.raises(ConfigError, match=r"stands for distributed\.strategy: ddp"):
        configure(use_ddp="maybe")
