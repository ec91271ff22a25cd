"""`drivetrain train`: recipes learn and leave their files; scripts and functions of one's own are trained alike."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from drivetrain.cli import main
from drivetrain.commands.training import FOR_RECIPES
from drivetrain.config import configure
from drivetrain.core.plugins import RECIPES, recipe_summary
from drivetrain.recipes import Recipe, digits
from drivetrain.recipes.digits import DigitNet, load_digits
from drivetrain.recipes.gpt import CONTEXT, SmallGpt, Windows, next_token_loss
from tests import warm_python


def train(folder: Path, target: str, *flags: str, report: bool = False) -> int:
    ours = ["--gpu-mode", "cpu", "--output-dir", str(folder), "--report" if report else "--no-report"]
    return main(["train", target, *ours, *flags])


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "steps.jsonl").read_text().splitlines()]


def test_digits_learns_and_leaves_its_files(tmp_path: Path, capsys) -> None:
    assert train(tmp_path, "digits", "--epochs", "4", report=True) == 0
    run = tmp_path / "digits"
    assert str(run) in capsys.readouterr().out.replace("\n", "")
    epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in epochs] == [0, 1, 2, 3]
    assert epochs[-1]["valid_accuracy"] > 0.95
    assert (run / "training_metrics.png").read_bytes().startswith(b"\x89PNG")
    assert "compilation           not used" in (run / "performance_summary.txt").read_text()

    model = DigitNet()  # the weights load into plain PyTorch, and reach the accuracy that was claimed
    model.load_state_dict(load_file(run / "model.safetensors"))
    _, images, labels = load_digits()
    accuracy = float((model.eval()(images).argmax(1) == labels).double().mean())
    assert accuracy == pytest.approx(epochs[-1]["valid_accuracy"])


def test_flags_reach_the_job(tmp_path: Path) -> None:
    flags = ["--max-steps", "3", "--batch-size", "10", "--accumulation-steps", "3", "--seed", "7"]
    assert train(tmp_path, "digits", "--name", "a", *flags) == 0
    assert train(tmp_path, "digits", "--name", "b", *flags) == 0
    assert train(tmp_path, "digits", "--name", "c", *flags[:-1], "8") == 0
    rows = [json.loads(line) for line in (tmp_path / "a" / "steps.jsonl").read_text().splitlines()]
    assert [row["samples"] for row in rows] == [30, 30, 30]
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


@pytest.mark.parametrize(("recipe", "batch"), [("digits", 64), ("digits-moe", 64)])
def test_accumulating_multiplies_a_recipes_batch(tmp_path: Path, recipe: str, batch: int) -> None:
    assert train(tmp_path, recipe, "--name", "a", "--max-steps", "2", "--accumulation-steps", "3") == 0
    rows = [json.loads(line) for line in (tmp_path / "a" / "steps.jsonl").read_text().splitlines()]
    assert [row["samples"] for row in rows] == [3 * batch] * 2
    plan = yaml.safe_load((tmp_path / "a" / "plan.yaml").read_text())
    assert (plan["micro_batch"], plan["accumulation"], plan["global_batch"]) == (batch, 3, 3 * batch)


def test_bf16_workers_assertions_and_a_smaller_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU without instructions for bf16 a picture takes a hundred times as long.
    monkeypatch.setattr(digits, "NUM_VALID", 8)

    def found(name: str, *flags: str) -> list[float]:
        assert train(tmp_path, "digits", "--name", name, "--max-steps", "3", "--batch-size", "8", *flags) == 0
        return losses(tmp_path / name)

    plain = found("plain")
    assert found("other", "--num-workers", "1", "--device-assertions") == plain
    bf16 = found("bf16", "--precision", "bf16")
    assert bf16 == pytest.approx(plain, rel=0.05)
    assert bf16 != plain
    assert found("slow", "--learning-rate", "1e-6")[1:] != plain[1:]


def test_a_lost_run_stops_with_the_cause(tmp_path: Path, capsys) -> None:
    assert train(tmp_path, "digits", "--learning-rate", "1e30", "--max-steps", "5") == 1
    err = capsys.readouterr().err
    assert "the loss of step" in err
    assert "learning rate" in err


def test_gpt_learns_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 60)
    assert train(tmp_path, "gpt", "--data", str(text), "--max-steps", "18", "--batch-size", "4", "--epochs", "99") == 0
    found = losses(tmp_path / "gpt")
    assert found[0] > 5
    assert found[-1] < 3.5


@pytest.mark.parametrize(
    ("flags", "num_steps"),
    [
        (["--max-steps", "5"], 5),
        (["--max-steps", "5", "--epochs", "1"], 2),
        ([], 2),
    ],
)
def test_gpt_ends_where_it_is_told_to(tmp_path: Path, flags: list[str], num_steps: int) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 2)
    assert train(tmp_path, "gpt", "--data", str(text), "--batch-size", "2", *flags) == 0
    rows = [json.loads(line) for line in (tmp_path / "gpt" / "steps.jsonl").read_text().splitlines()]
    assert len(rows) == num_steps
    rates = [row["lr"] for row in rows]
    assert rates == sorted(rates)  # warm-up is longer than the run
    assert yaml.safe_load((tmp_path / "gpt" / "job.yaml").read_text())["num_steps"] == num_steps


def test_gpt_counts_bytes_not_pieces() -> None:
    pieces = Windows(bytes(range(200)) + b"x")
    assert len(pieces) == 2
    torch.manual_seed(0)
    model = SmallGpt(width=16, num_layers=1, num_heads=2).double()
    inputs, targets = (torch.stack(column) for column in zip(*(pieces[0], pieces[1]), strict=True))
    loss = next_token_loss(model, [inputs, targets])
    assert float(loss.count) == 200
    logits = model(inputs)
    kept = [(row, column) for row in range(2) for column in range(CONTEXT) if row * CONTEXT + column < 200]
    by_hand = -sum(torch.log_softmax(logits[r, c], 0)[int(targets[r, c])] for r, c in kept)
    assert float(loss.total.detach()) == pytest.approx(float(by_hand), rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "this recipe learns from a text file"),
        (["--data", "missing.txt"], "No such file"),
        (["--data", "/dev/null"], "holds no text"),
    ],
)
def test_gpt_without_a_text(tmp_path: Path, capsys, flags: list[str], words: str) -> None:
    assert train(tmp_path, "gpt", *flags) == 2
    assert words in capsys.readouterr().err


SCRIPT = """
import torch, drivetrain as dt
from torch.utils.data import TensorDataset

data = TensorDataset(torch.arange(24.0).unsqueeze(1) / 24, torch.arange(24.0).unsqueeze(1) / 12)

def make_job():
    return dt.Job(
        name="mine", model=lambda: torch.nn.Linear(1, 1), data=data, epochs=4, global_batch=6,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.3),
    )

if __name__ == "__main__":
    result = dt.train(make_job())
    print("steps", result.steps, "in", result.folder)
"""


def in_a_process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # On a machine with a GPU, too, these compare losses to more digits than bf16 has.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return warm_python.run(words, cwd=folder, timeout=250, env=environment)


def test_a_script_alone_by_drivetrain_and_as_a_function(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    alone = in_a_process(tmp_path, "mine.py")
    assert "steps 16" in alone.stdout, alone.stderr
    command = ["-m", "drivetrain", "train", "--no-report"]
    function = in_a_process(tmp_path, *command, "mine:make_job", "--output-dir", "third")
    assert function.returncode == 0, function.stderr
    monkeypatch.chdir(tmp_path)
    assert train(Path("elsewhere"), "mine.py", "--batch-size", "2") == 0
    assert "steps 16" in capsys.readouterr().out
    assert losses(tmp_path / "elsewhere" / "mine") == pytest.approx(losses(tmp_path / "runs" / "mine"), rel=1e-5)
    assert losses(tmp_path / "third" / "mine") == losses(tmp_path / "runs" / "mine")


@pytest.mark.parametrize("target", ["mine.py", "budgets:make_job"])
def test_how_long_a_job_of_one_s_own_trains(tmp_path: Path, monkeypatch, capsys, target: str) -> None:
    """As the command line says, whatever the job does; what only recipes read is refused, not passed over."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "budgets.py").write_text(SCRIPT)
    for flags, steps in (
        (("--epochs", "2"), 8),
        (("--max-steps", "7"), 7),
        (("--epochs", "3", "--max-steps", "5"), 5),
    ):
        folder = tmp_path / "-".join(flags)
        assert train(folder, target, *flags) == 0
        assert len(losses(folder / "mine")) == steps
    assert main(["plan", target, "--epochs", "2"]) == 0
    assert "8 steps" in capsys.readouterr().out
    assert main(["plan", target, "--epochs", "2", "--for", "1xL4", "--out", "there.yaml"]) == 0
    assert yaml.safe_load(Path("there.yaml").read_text())["num_steps"] == 8
    capsys.readouterr()
    assert train(tmp_path / "refused", target, "--experts", "3", "--data", "there") == 2
    said = capsys.readouterr().err
    assert all(f"{flag} (command line): it is for recipes" in said for flag in ("--experts", "--data"))
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("target", ["mine.py", "budgets:make_job"])
def test_the_seed_of_a_job_is_set_by_a_flag(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "budgets.py").write_text(SCRIPT)
    (tmp_path / "other.py").write_text(SCRIPT.replace("dt.Job(", "dt.Job(seed=4, "))
    assert train(tmp_path / "flag", target, "--seed", "4") == 0
    assert train(tmp_path / "job", "other.py") == 0
    assert train(tmp_path / "plain", "mine.py") == 0
    assert losses(tmp_path / "flag" / "mine") == losses(tmp_path / "job" / "mine")
    assert losses(tmp_path / "flag" / "mine") != losses(tmp_path / "plain" / "mine")


@pytest.mark.parametrize("name", RECIPES.names())
def test_what_a_recipe_says_of_itself(name: str) -> None:
    """Its literals are read without importing it, and name settings that only recipes read."""
    recipe, summary = RECIPES.load(name), recipe_summary(name)
    assert isinstance(recipe, Recipe)
    assert summary is not None
    assert (summary.about, summary.reads) == (recipe.about, recipe.reads)
    assert summary.about
    assert {*summary.reads} <= {*FOR_RECIPES}


def test_every_setting_for_recipes_has_a_reader() -> None:
    summaries = [recipe_summary(name) for name in RECIPES.names()]
    read = {setting for summary in summaries if summary is not None for setting in summary.reads}
    assert read == {*FOR_RECIPES}


def test_a_file_may_hold_what_is_for_others(tmp_path: Path, capsys) -> None:
    """Also where its values reach workers as flags: digits has no blocks, which another trainer's file may not know."""
    theirs = "training:\n  gradient_checkpointing: true\n"
    (tmp_path / "shared.yaml").write_text(f"data:\n  path: book.txt\n{theirs}")
    flags = ["--config", str(tmp_path / "shared.yaml"), "--max-steps", "2", "--cpu", "--num-processes", "2"]
    ours = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path / "two"), "--no-report"]
    done = warm_python.run(["-m", "tests.launch.forked_workers", "train", "digits", *ours, *flags])
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "two" / "digits")) == 2
    assert train(tmp_path / "refused", "digits", *flags, "--experts", "3") == 2
    assert "the recipe digits does not use it" in capsys.readouterr().err


def test_a_recipe_in_a_script_is_as_long_as_the_command_line_says(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = "import drivetrain as dt\nfrom drivetrain.recipes import digits\ndt.train(digits.job(dt.configure()))\n"
    (tmp_path / "mine.py").write_text(script)
    assert train(tmp_path / "short", "mine.py", "--max-steps", "3") == 0
    assert len(losses(tmp_path / "short" / "digits")) == 3


def test_a_recipe_refuses_what_it_does_not_use(tmp_path: Path, capsys) -> None:
    assert train(tmp_path / "refused", "digits", "--experts", "3", "--data", "a.txt") == 2
    said = capsys.readouterr().err
    assert all(f"{flag} (command line): the recipe digits does not use it" in said for flag in ("--experts", "--data"))
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("missing.py", 2, "there is no such script"),
        ("empty.py", 1, "ended without calling dt.train"),
        ("nothing.here:job", 1, "cannot be loaded"),
        ("json:dumps", 1, "dumps"),
        ("digit", 2, "did you mean `digits`?"),
    ],
)
def test_targets_that_are_not_there(tmp_path: Path, monkeypatch, capsys, target: str, code: int, words: str) -> None:
    (tmp_path / "empty.py").write_text("print('nothing to see')\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", target]) == code
    assert words in capsys.readouterr().err


def test_gpt_learns_tokens_of_a_bpe_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    text = "the cat sat on the mat, and the dog sat on the log. " * 60
    (tmp_path / "book.txt").write_text(text)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=80, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = ["train", "gpt", "--data", f"{tmp_path}/book.txt", "--output-dir", str(tmp_path), "--gpu-mode", "cpu"]
    words += ["--max-steps", "3", "--no-report", "--no-auto-optimize", "--log-every", "1"]
    assert main([*words, "--tokenizer", f"{tmp_path}/tokenizer.json"]) == 0
    out = capsys.readouterr().out
    assert "nats per token" in out
    assert re.search(r"Speed: [0-9,]+ tokens/s \(median\)", out)
    job = RECIPES.load("gpt").job(configure(data=tmp_path / "book.txt", tokenizer=tmp_path / "tokenizer.json"))
    model = job.model()  # type: ignore[operator]
    assert model.out.out_features == 64 * -(-tokenizer.get_vocab_size() // 64)
    inputs, targets = job.source.dataset[0]
    expected = tokenizer.encode(text).ids
    assert inputs.tolist() == expected[:128]
    assert targets.tolist() == expected[1:129]
    assert main([*words, "--name", "bad", "--tokenizer", f"{tmp_path}/book.txt"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
