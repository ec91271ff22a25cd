"""A command is one file: the example of CONTRIBUTING.md, brought by another package."""

from pathlib import Path

import pytest

from drivetrain.cli import main, overview
from drivetrain.core import plugins

DOCUMENTED = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def _brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = DOCUMENTED.partition("**A command.**")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "seed_command.py").write_text(code)
    both = code.replace("COMMAND =", "COMMAND_FIRST =").replace("EXAMPLES =", "EXAMPLES_FIRST =")
    both = both.replace("def run(", "def run_first(") + (
        '\n\nCOMMAND_SECOND = Command(summary="Says two.", obeys=())\nEXAMPLES_SECOND = ()\n'
        "\n\ndef run_second(options: SeedOptions, resolved: Resolved) -> int:\n"
        "    print(options.target, 2)\n    return 0\n"
    )
    (tmp_path / "two_commands.py").write_text(both)
    (tmp_path / "no_command.py").write_text("COMMAND = 3\n")
    (tmp_path / "untyped_command.py").write_text(code.replace("options: SeedOptions", "options"))
    monkeypatch.syspath_prepend(tmp_path)
    theirs = {"seed": "seed_command:COMMAND", "empty": "no_command:COMMAND", "untyped": "untyped_command:COMMAND"}
    theirs |= {"first": "two_commands:COMMAND_FIRST", "second": "two_commands:COMMAND_SECOND"}
    monkeypatch.setattr(plugins, "_entry_points", lambda group: theirs if group == "drivetrain.commands" else {})


@pytest.mark.usefixtures("_brought")
def test_the_documented_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seed", "digits", "--seed", "3", "--shout"]) == 0
    assert capsys.readouterr().out == "DIGITS STARTS FROM SEED 3\n"
    assert main(["seed", "digits", "--precision", "bf16"]) == 2, "it does not obey this"
    assert "Prints the seed of a run." in overview()


@pytest.mark.usefixtures("_brought")
def test_two_in_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["first", "digits", "--seed", "3"]) == 0
    assert main(["second", "digits"]) == 0
    assert main(["second", "digits", "--seed", "3"]) == 2, "each obeys what it says itself"
    assert capsys.readouterr().out == "digits starts from seed 3\ndigits 2\n"


@pytest.mark.usefixtures("_brought")
def test_one_without_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["empty"]) == 1
    assert "COMMAND = Command(" in capsys.readouterr().err


@pytest.mark.usefixtures("_brought")
def test_one_that_does_not_say_what_its_options_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["untyped", "digits"]) == 1
    assert "def run(options: MyOptions, resolved)" in capsys.readouterr().err
