"""email-sequence: order is learned where bag-of-words stays blind, the ceilings are right, bad input is refused."""

import csv
import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from drivetrain.cli import main
from drivetrain.config import configure
from drivetrain.recipes import email_sequence as recipe
from drivetrain.recipes import generated_emails as emails

ROOT = Path(__file__).parents[2]


def train(folder: Path, *flags: str) -> int:
    ours = ["--gpu-mode", "cpu", "--output-dir", str(folder), "--no-report", "--no-auto-optimize", "--quiet"]
    return main(["train", "email-sequence", *ours, *flags])


def accuracy(run: Path) -> float:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["valid_accuracy"]


def write_csv(path: Path, rows: list[tuple[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def test_order_is_learnt_and_a_bag_of_words_does_not_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many emails of fewer words show as much, in as many steps."""
    less = replace(recipe.SIZES["small"], num_train=2000, length=20, batch=32)
    monkeypatch.setitem(recipe.SIZES, "small", less)
    assert train(tmp_path, "--epochs", "2") == 0
    assert train(tmp_path, "--epochs", "2", "--baseline", "bag-of-words") == 0
    run = tmp_path / "email-sequence"
    assert accuracy(run) >= 0.95
    assert accuracy(tmp_path / "email-sequence-bag-of-words") < 0.75

    facts = next(row for row in map(json.loads, (run / "events.jsonl").open()) if row["event"] == "recipe")
    assert facts["ceiling"] == 0.98
    # Weights and vocabulary are enough to classify in plain PyTorch.
    kept = json.loads((run / "vocabulary.json").read_text())
    weights = load_file(run / "model.safetensors")
    model = recipe.EmailLSTM(len(kept["words"]) + 2, len(kept["labels"]), 48, 48).eval()
    model.load_state_dict(weights)
    said = "confirm invoice ba do reject invoice so approve budget", "reject invoice accept budget confirm invoice"
    inputs, _ = recipe.encode([(text, 0) for text in said], kept["words"], kept["length"]).tensors
    assert [kept["labels"][each] for each in model(inputs).argmax(1)] == ["declined", "approved"]


def test_the_ceilings_are_those_of_the_generator() -> None:
    """By all cases, and by a reader of counted words who has seen a great many emails."""
    right = total = 0
    cases: dict[int, list[int]] = defaultdict(list)
    for about in set(itertools.permutations("iioo")):
        for verdicts in itertools.product((0, 1), repeat=4):
            label = [verdict for verdict, thing in zip(verdicts, about, strict=True) if thing == "i"][-1]
            cases[sum(verdicts)].append(label)
    for labels in cases.values():
        right, total = right + max(Counter(labels).values()), total + len(labels)
    by_hand = right / total * 0.98 + (1 - right / total) * 0.02
    assert emails.bag_of_words_ceiling() == pytest.approx(by_hand)

    seen: dict[int, Counter[int]] = defaultdict(Counter)
    flipped = 0
    for text, label in (found := emails.generate(20_000, 30, seed=5)):
        words = text.split()
        seen[sum(word in emails.POSITIVE for word in words)][label] += 1
        last = max(place for place, word in enumerate(words) if word == emails.ASKED)
        flipped += (words[last - 1] in emails.POSITIVE) != label
    assert sum(max(counts.values()) for counts in seen.values()) / len(found) == pytest.approx(by_hand, abs=0.01)
    assert flipped / len(found) == pytest.approx(emails.NOISE, abs=0.004)
    assert 15 <= min(len(text.split()) for text, _ in found) <= max(len(text.split()) for text, _ in found) == 30


def test_padding_does_not_change_what_is_read() -> None:
    """The forward state is that of the last word, as if there were no padding behind it."""
    torch.manual_seed(0)
    model = recipe.EmailLSTM(10, 2, 4, 4).double().eval()
    words = torch.tensor([[3, 4, 5, 0, 0], [6, 7, 8, 9, 2]])
    states, _ = model.lstm(model.embed(words[:1, :3]))
    reverse = torch.nn.LSTM(4, 4, batch_first=True).double()
    reverse.load_state_dict(
        {name.removesuffix("_reverse"): value for name, value in model.lstm.state_dict().items() if "reverse" in name}
    )
    backwards, _ = reverse(model.embed(words[:1]).flip(1))  # padding first, then the words from behind
    expected = model.out(torch.cat([states[:, -1, :4], backwards[:, -1]], dim=1))
    torch.testing.assert_close(model(words)[:1], expected)


def test_own_files_with_other_names(tmp_path: Path) -> None:
    rows = emails.generate(60, 20, seed=3)
    path = tmp_path / "mails.jsonl"
    path.write_text("".join(json.dumps({"body": text, "tag": emails.LABELS[label]}) + "\n" for text, label in rows))
    flags = ["--data", str(path), "--text-column", "body", "--label-column", "tag", "--labels", "declined,approved"]
    assert train(tmp_path, *flags, "--max-steps", "2") == 0
    assert json.loads((tmp_path / "email-sequence" / "vocabulary.json").read_text())["labels"] == [*emails.LABELS]
    found = recipe.read_emails(path, "body", "tag", emails.LABELS)
    assert found == rows


def test_a_text_is_never_on_both_sides() -> None:
    mails = [(f"mail {number % 40}", number % 2) for number in range(200)]
    train_set, valid = recipe.split(mails)
    assert len(train_set) + len(valid) == 200
    assert {text for text, _ in train_set}.isdisjoint({text for text, _ in valid})
    assert len({text for text, _ in valid}) == 4
    assert recipe.split([("alone", 0)] * 3) == ([("alone", 0)] * 3, [])


def test_long_emails_are_cut_and_counted(tmp_path: Path, capsys) -> None:
    path = write_csv(tmp_path / "mails.csv", [(f"{'word ' * 60}{number}", str(number % 2)) for number in range(12)])
    ours = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path), "--no-report", "--no-auto-optimize"]
    assert main(["train", "email-sequence", *ours, "--data", str(path), "--max-steps", "1"]) == 0
    assert "12 emails are longer than 50 words" in capsys.readouterr().out


def test_bad_rows_are_listed_and_nothing_is_written(tmp_path: Path, capsys) -> None:
    rows = [("fine", "0"), ("  ", "1"), *[("wrong label", str(number)) for number in range(2, 14)], ("fine too", "1")]
    path = write_csv(tmp_path / "mails.csv", rows)
    assert train(tmp_path / "runs", "--data", str(path)) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "drivetrain: 13 problems with the input:"
    assert said[1] == f"  {path} line 3: the text is empty"
    assert said[2] == f"  {path} line 4: the label '2' is none of 0, 1"
    assert said[10].startswith(f"  {path} line 12: ")
    assert said[11] == "  and 3 more"
    assert "remedy" in said[12]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--label-column", "tag"], "there is no column 'tag'; the columns are 'text', 'label'"),
        (["--baseline", "none-such"], "allowed: bag-of-words"),
        (["--labels", "0"], "--labels"),
    ],
)
def test_wrong_settings(tmp_path: Path, capsys, flags: list[str], words: str) -> None:
    path = write_csv(tmp_path / "mails.csv", [("a", "0"), ("b", "1")])
    assert train(tmp_path / "runs", "--data", str(path), *flags) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_configuration_file_is_the_full_size() -> None:
    path = ROOT / "examples" / "email-sequence.yaml"
    assert configure(path).recipe.size == "full"
    assert set(yaml.safe_load(path.read_text())) == {"recipe", "budget", "watch"}
