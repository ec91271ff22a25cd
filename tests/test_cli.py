"""The command line as a user meets it: `main(argv)`, exit code, what is printed."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.cli import COMMANDS, FirstLine, flag_parser, main
from drivetrain.commands.command import options_of
from drivetrain.commands.training import LaunchCommandOptions
from drivetrain.config import Resolved, settings
from drivetrain.config.flags import unread_flags

TRAIN_FLAGS = flag_parser("train", COMMANDS["train"].load()).flags


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def effective(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, object]]:
    code, out, err = run(capsys, "config", "--json", *argv)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--compile"], True),
        (["--compile", "true"], True),
        (["--compile=true"], True),
        (["--compile", "on"], True),
        (["--compile", "false"], False),
        (["--compile=no"], False),
        (["--no-compile"], False),
        (["--no_compile"], False),
        (["--compile.enabled"], True),
        (["--no-compile.enabled"], False),
        (["--COMPILE", "TRUE"], True),
    ],
)
def test_every_way_to_write_a_boolean(capsys, argv: list[str], expected: bool) -> None:
    assert effective(capsys, *argv)["compile.enabled"]["value"] is expected


@pytest.mark.parametrize(
    "argv",
    [
        ["--batch-size", "8"],
        ["--batch_size", "8"],
        ["--batch-size=8"],
        ["--batch_size=8"],
        ["--batch.size", "8"],
    ],
)
def test_every_way_to_write_a_number(capsys, argv: list[str]) -> None:
    table = effective(capsys, *argv)
    assert table["batch.size"]["value"] == 8
    assert str(table["batch.size"]["source"]).startswith("command line")


def test_negative_numbers_and_lists(capsys) -> None:
    table = effective(capsys, "--num-workers", "-1", "--seed", "3")
    assert table["data.num_workers"]["value"] == -1
    assert table["run.seed"] == {"value": 3, "source": "command line (--seed)"}


def test_a_boolean_leaves_the_next_word_alone() -> None:
    parser = flag_parser("train", COMMANDS["train"].load())
    parsed = parser.parse(["--compile", "digits"])
    assert parsed.problems == []
    assert parsed.options == {"target": "digits"}
    assert [(entry.name, entry.value) for entry in parsed.given] == [("compile.enabled", "true")]


def test_flags_over_yaml_over_defaults(capsys, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("epochs: 3\nbatch:\n  size: 8\n")
    table = effective(capsys, "--config", str(path), "--epochs", "4")
    assert table["budget.epochs"] == {"value": 4, "source": "command line (--epochs)"}
    assert table["batch.size"] == {"value": 8, "source": "train.yaml line 3 (batch.size)"}
    assert table["run.seed"] == {"value": 0, "source": "default"}


def test_all_problems_at_once(capsys, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("epoch: 3\nbatch:\n  accumulation: 0\n")
    code, out, err = run(
        capsys, "config", "--config", str(path), "--gpu-mode", "cpu", "--precision", "fp16",
        "--bacth-size", "8", "--seed", "x", "--epochs",
    )  # fmt: skip
    assert code == 2
    assert out == ""
    assert err.startswith("drivetrain: 6 problems with the configuration:")
    for words in (
        "epoch (train.yaml line 1): there is no such key",
        "did you mean `epochs`?",
        "batch.accumulation (train.yaml line 3): got 0",
        "allowed: a whole number, at least 1",
        "--precision (command line): fp16 needs a GPU, but --gpu-mode cpu asks for the CPU",
        "--bacth-size (command line): there is no such flag",
        "did you mean `--batch-size`?",
        "--seed (command line): got 'x'",
        "--epochs (command line): it needs a value",
    ):
        assert words in err, words


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--batchsize", "did you mean `--batch-size`?"),
        ("--batch", "did you mean `--batch-size`?"),
        ("--bs", "did you mean `--batch-size`?"),
        ("--epoch", "did you mean `--epochs`?"),
        ("--gpu", "did you mean `--gpu-ids`?"),
        ("--gpus", "did you mean `--num-gpus`?"),
        ("--workers", "did you mean `--num-workers`?"),
        ("--fp16", "did you mean `--precision fp16`?"),
        ("--wandb", "did you mean `--trackers wandb`?"),
        ("--checkpoint.evry", "did you mean `--checkpoint.every`?"),
        ("--micro-batch", "did you mean `--batch-size`?"),
        ("--max-grad-norm", "did you mean `--clip-norm`?"),
        ("--save-total-limit", "did you mean `--keep-last`?"),
        ("--eval-interval", "did you mean `--valid-every`?"),
        ("--global-batch-size", "Job(global_batch=…)"),
        ("--resume", "leave it out: an interrupted run of the same name continues"),
    ],
)
def test_a_flag_of_another_trainer_suggests_ours(capsys, flag: str, meant: str) -> None:
    code, _, err = run(capsys, "train", "digits", flag, "3")
    assert code == 2
    assert meant in err


@pytest.mark.parametrize("other", settings._OTHER_NAMES)
def test_other_names_lead_to_flags_of_train(capsys, other: str) -> None:
    _, _, err = run(capsys, "train", "digits", f"--{other}", "3")
    flag, _, value = err.partition("did you mean `")[2].partition("`")[0].partition(" ")
    assert flag in TRAIN_FLAGS
    if value:
        assert value in settings.BY_NAME[flag.removeprefix("--")].choices


def test_help_names_trackers_of_your_own() -> None:
    out = flag_parser("train", COMMANDS["train"].load()).format_help_all()
    assert "--trackers, --watch.trackers {csv,mlflow,tensorboard,wandb,MODULE:NAME}" in out
    assert "package.module:prepare" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["chekc"], "did you mean `drivetrain check`?"),
        (["config", "--config", "missing.yaml"], "there is no such file"),
        (["config", "--config"], "it needs a value"),
        (["config", "stray"], "nothing takes this word"),
        (["check", "train.py"], "takes no job; drivetrain plan train.py shows how it would be run"),
        (["config", "-x"], "there is no such flag"),
        (["config", "--compile=banana"], "true or false"),
        (["check", "--epochs", "3"], "`drivetrain check` does not use it"),
        (["check", "--no-compile"], "`drivetrain check` does not use it"),
        (["train"], "TARGET (command line): it is missing"),
        (["train", "digit"], "did you mean `digits`?"),
        (["config", "--seed", "1", "--seed", "2"], "set twice"),
        (["config", "--no-compile=true"], "ignored explicit argument"),
    ],
)
def test_wrong_input_exits_with_2(capsys, argv: list[str], words: str) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert words in err


@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["--compile", "--no-compile", "--seed", "--epochs=3", "--device-ids", "--config", "--", "-1", "digits"]
            ),
            st.sampled_from(["--batch_size", "true", "0", "=", "--=", "--no-", "-h1", "--seed=", "cpu", "--gpu-mode"]),
            st.text(max_size=8),
        ),
        max_size=6,
    )
)
def test_no_words_bring_a_traceback(argv: list[str]) -> None:
    assert main(["config", "--json", *argv]) in (0, 2)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(capsys, command: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert COMMANDS[command].summary.split()[0] in text
    assert "examples:" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("command", ["train", "launch"])
def test_help_begins_with_ten_flags_and_names_the_way_to_the_others(capsys, command: str) -> None:
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([command, flag])
        texts.append(capsys.readouterr().out)
    flags = [set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)) for text in texts]
    assert len(flags[0]) == 10
    assert flags[0] < flags[1]
    others = re.search(r"--help-all` shows the other (\d+) flags", texts[0])
    assert others is not None
    assert int(others[1]) == len(COMMANDS[command].settings) + len(settings_of_options(command)) + 1 - 10


def test_help_and_refusals_name_the_number_beside_a_word(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    told = capsys.readouterr().out
    assert "--compile-from, --compile.from-step {ready,N}" in told
    assert "--checkpoint-every, --checkpoint.every {epoch,N}" in told
    assert main(["train", "digits", "--compile-from=-1", "--checkpoint-every", "0"]) == 2
    told = capsys.readouterr().err
    assert "allowed: ready, or a whole number, at least 0, or auto" in told
    assert "allowed: epoch, or a whole number, at least 1, or auto" in told


def settings_of_options(command: str) -> list[str]:
    own = settings.settings_of(options_of(COMMANDS[command].load()))
    return [each.name for each in own if not (each.is_positional or each.is_rest or each.is_after_dashes)]


def test_a_command_line_reads_each_command_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To say which command uses a flag, the parser looks at all of them; doing so for each setting took 0.25 s."""
    looked_up: list[str] = []
    original = type(COMMANDS).__getitem__

    def watched(commands: object, name: str) -> object:
        looked_up.append(name)
        return original(commands, name)  # type: ignore[arg-type]

    command = COMMANDS["train"].load()
    monkeypatch.setattr(type(COMMANDS), "__getitem__", watched)
    flag_parser("train", command)
    assert sorted(looked_up) == sorted(COMMANDS)


def test_the_overview_names_every_command(capsys) -> None:
    for argv in ([], ["--help"], ["help"]):
        code, out, _ = run(capsys, *argv)
        assert code == 0
        assert all(f"drivetrain {name}" in out for name in COMMANDS)


def test_config_prints_yaml_that_works_as_a_file(capsys, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "config", "--epochs", "3", "--output-dir", "elsewhere")
    assert code == 0
    assert "# command line (--epochs)" in out
    path = tmp_path / "again.yaml"
    path.write_text(out)
    assert yaml.safe_load(out)["budget"]["epochs"] == 3
    assert effective(capsys, "--config", str(path))["budget.epochs"]["value"] == 3


def test_flags_of_ours_after_the_script_are_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        '"""drivetrain launch --cpu train.py"""\nparser.add_argument("--seed", "--batch-size", type=int)\n'
    )
    parser = flag_parser("launch", COMMANDS["launch"].load())

    def notice(*words: str) -> str:
        return parser.passed_on(parser.parse(["--num-processes", "2", str(script), *words]))

    assert notice("--momentum", "0.1", "--seed", "1", "--batch-size=4", "--no-seed", "--help", "seed") == ""
    assert notice("--", "--cpu") == ""
    assert notice("--momentum", "1", "--cpu", "--max_restarts=3", "--cpu") == (
        f"given to {script}, as all that follows it: --cpu and --max_restarts; "
        f"before {script}, --cpu and --max_restarts would be drivetrain's"
    )
    assert notice("--parallel-strategy", "ddp") == (
        f"given to {script}, as all that follows it: --parallel-strategy; "
        f"drivetrain takes --parallel-strategy in `drivetrain train {script} …`"
    )
    assert "--no-compile" in notice("--no-compile")
    assert notice("--nproc_per_node", "2").endswith(
        f"drivetrain takes --num-processes (for --nproc_per_node) before {script}"
    )


def test_flags_of_ours_that_a_plain_script_does_not_read_are_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("dt.train(job)\n")
    words = ["--batch-size", "16", "--momentum=0.9", "--epochs=3"]
    assert unread_flags(script, words) == (
        "train.py does not read --batch-size and --epochs, and so nothing obeys it; "
        "`drivetrain train train.py --batch-size …` does"
    )
    assert unread_flags(script, ["--momentum", "1", "epochs"]) == ""
    script.write_text("import sys\nprint(sys.argv)\n")
    assert unread_flags(script, words) == ""


def test_the_notice_of_such_flags_is_one_line_and_no_error(capsys, tmp_path: Path, monkeypatch) -> None:
    def run_nothing(options: LaunchCommandOptions, resolved: Resolved) -> int:
        return 0

    monkeypatch.setattr("drivetrain.commands.training.run_launch", run_nothing)
    (tmp_path / "train.py").write_text("pass\n")
    code, out, err = run(capsys, "launch", str(tmp_path / "train.py"), "--cpu")
    assert (code, out, err.count("\n")) == (0, "", 1)
    assert err.startswith("drivetrain: given to ")


ARGUED = """
import argparse, sys
import drivetrain as dt
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--seed", type=int)
print(sys.argv, parser.parse_args())
dt.train(None)
"""


@pytest.fixture
def argued(tmp_path: Path) -> str:
    """A script with flags of its own, whose job is never made."""
    (tmp_path / "train.py").write_text(ARGUED)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--width", "3"], "it is a flag of {script}, not of drivetrain"),
        (["--width", "3"], "give it after --: drivetrain train {script} … -- --width 3"),
        (["--hidden", "3"], "a flag of the script stands after --: drivetrain train {script} … -- --hidden 3"),
        (["stray"], "words for the script stand after --: drivetrain train {script} -- stray"),
        (["--experts", "1"], "a flag of the script stands after --: drivetrain train {script} -- --experts …"),
    ],
)
def test_a_flag_of_a_script_is_sent_behind_the_dashes(capsys, argued: str, words: list[str], told: str) -> None:
    code, out, err = run(capsys, "train", argued, *words)
    assert (code, out) == (2, "")
    assert told.format(script=argued) in err


def test_words_after_the_dashes_need_a_script(capsys) -> None:
    code, _, err = run(capsys, "train", "digits", "--", "--width", "3")
    assert code == 2
    assert "what follows is given to a script, and there is none" in err


@pytest.mark.parametrize("command", ["train", "benchmark"])
def test_a_script_finds_its_own_words(capsys, argued: str, command: str) -> None:
    before = sys.argv[:]
    code, out, err = run(capsys, command, argued, "--gpu-mode", "cpu", "--", "--width", "3", "--seed=4")
    assert out == f"{[argued, '--width', '3', '--seed=4']} Namespace(width=3, seed=4)\n"
    assert (code, "expected a dt.Job, got NoneType" in err) == (2, True), "met after its flags were parsed"
    assert sys.argv == before


def test_workers_get_the_words_of_the_script(monkeypatch: pytest.MonkeyPatch, argued: str) -> None:
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr("drivetrain.commands.training.start", lambda words, *_, **__: seen.append(words) or 0)
    assert main(["train", argued, "--cpu", "--num-processes", "2", "--epochs", "3", "--", "--width", "3"]) == 0
    assert seen == [("command", "train", argued, "--budget.epochs=3", "--", "--width", "3")]


def test_the_command_in_a_process_of_its_own() -> None:
    call = [sys.executable, "-m", "drivetrain", "config", "--epochs", "nine"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "--epochs (command line): got 'nine'" in done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    call = f"{sys.executable} -m drivetrain config | head -n 1"
    done = subprocess.run(["bash", "-c", call], capture_output=True, text=True, timeout=240, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("run:")


@pytest.mark.parametrize("seeds", ["0-1", "0,00-7"])
def test_a_range_is_no_number(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Pydantic drops zeros at the front: 0-1 was read as -1."""
    assert main(["sweep", "digits", "--grid", "lr=0.1", "--seeds", seeds]) == 2
    error = capsys.readouterr().err
    assert f"--seeds (command line): got '{seeds}'" in error
    assert "whole numbers, separated by commas" in error


def test_a_line_stands_there_before_pytorch_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FirstLine("drivetrain eval")
    sys.meta_path.insert(0, first)
    first.find_spec("json", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert importlib.util.find_spec("torch") is not None
    assert capsys.readouterr().err == "", "it was looked for, not loaded"
    first.find_spec("torch", None)
    assert capsys.readouterr().err == "drivetrain eval: loading PyTorch …\n"
    assert first not in sys.meta_path


_WATCHED = """
import gc, os, sys
class Watch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("torch is loaded with", os.environ.get("MIMALLOC_PURGE_DELAY"))
        if name == "torch._dynamo":
            print("its compiler is loaded, and garbage collected:", gc.isenabled())
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Watch())
from drivetrain.cli import main
sys.exit(main(["train", "script.py"]))
"""


def test_torch_is_loaded_with_memory_that_is_kept(tmp_path: Path) -> None:
    """Torch for Arm reads it when it is loaded, and never again.

    No garbage is collected while the most is loaded, which would take 0.3 s; it is in the user's script.
    """
    (tmp_path / "script.py").write_text("import gc, torch, sys; sys.exit(7 if gc.isenabled() else 8)")
    environ = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}
    call = [sys.executable, "-c", _WATCHED]
    done = subprocess.run(call, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == 7, done.stderr
    compiler = "its compiler is loaded, and garbage collected: False"
    assert set(done.stdout.splitlines()) == {"torch is loaded with 1000", compiler}
