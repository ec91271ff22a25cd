"""Methods side by side: kept in a file, gone on with after an end, and told in numbers, words and pictures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from studies.continual.comparison import Book, MethodOutcome, Study, compare, margin, summary, tune
from studies.continual.methods import METHODS, MethodSettings, Scale, trials_of
from studies.continual.pictures import draw_all
from studies.continual.screen import in_words, verdicts
from studies.continual.tasks import Images

from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError

SCALE = Scale(hidden=8, max_experts=4, batch=8, steps_per_task=20, remembered=20, nap=10, replay_steps=2)


class Listener:
    def __init__(self) -> None:
        self.begun: list[tuple[str, int, str]] = []
        self.tasks: list[list[float]] = []

    def begins(self, method: str, seed: int, why: str) -> None:
        self.begun.append((method, seed, why))

    def task_done(self, method: str, accuracies: list[float]) -> None:
        self.tasks.append(accuracies)

    def ended(self, outcome: MethodOutcome, why: str) -> None:
        assert outcome.matrix[-1] == self.tasks[-1]


def images(num_samples: int) -> Images:
    """Each class has its own bright pixel: to be learned in a few steps."""
    generator = torch.Generator().manual_seed(num_samples)
    labels = torch.arange(num_samples) % 4
    pixels = 0.2 * torch.rand(num_samples, 16, generator=generator)
    pixels[torch.arange(num_samples), labels] += 1.0
    return Images(pixels, labels, 4)


def study(**changes: object) -> Study:
    return replace(Study("made", "permuted", 2, SCALE, images(80), images(40)), **changes)


def config(folder: Path) -> Config:
    watch = {"quiet": True, "report": False, "log_every": 0}
    found: Config = Config.model_validate(
        {
            "run": {"output_dir": folder / "runs"},
            "watch": watch,
            "plan": {"auto_optimize": False},
            "device": {"mode": "cpu"},
        }
    )
    return found


def outcome(method: str, seed: int, accuracy: float) -> MethodOutcome:
    return MethodOutcome(method, seed, MethodSettings(1e-3), [[1.0, 0.0], [accuracy, accuracy]], [], 1.0)


def test_methods_are_trained_once_and_go_on_where_they_were(tmp_path: Path) -> None:
    methods, listener = ["dense", "ewc", "growing+sleep"], Listener()
    book = Book(tmp_path, study())
    found = compare(book, lambda method: MethodSettings(1e-2, 10.0), methods[:2], [0], config(tmp_path), listener)
    assert [one.method for one in found] == methods[:2]

    again, later = Book(tmp_path, study()), Listener()
    found = compare(again, lambda method: MethodSettings(1e-2, 10.0), methods, [0], config(tmp_path), later)
    assert [name for name, _, _ in later.begun] == ["growing+sleep"]  # the others were there
    assert [one.method for one in found] == methods
    assert len(later.tasks) == 2
    for one in found:
        assert len(one.matrix) == 2
        assert one.matrix[0][0] > 0.5, one.method  # it has learned the first task
    assert found[-1].experts[0][1] == 2
    document = json.loads((tmp_path / "continual.json").read_text())
    assert document["summary"].keys() == set(methods)
    assert document["summary"]["growing+sleep"]["samples"] == 2 * 20 * 8 + 4 * 2 * 64
    assert document["summary"]["dense"]["samples"] == 2 * 20 * 8


def test_the_same_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    found = [
        compare(
            Book(folder, study()), lambda method: MethodSettings(1e-2), ["growing"], [3], config(folder), Listener()
        )[0]
        for folder in (tmp_path / "a", tmp_path / "b")
        if folder.mkdir() is None
    ]
    assert (found[0].matrix, found[0].experts) == (found[1].matrix, found[1].experts)


def test_another_comparison_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    Book(tmp_path, study()).write()
    with pytest.raises(DrivetrainError, match="another comparison"):
        Book(tmp_path, study(num_tasks=3))


def test_tuning_tries_all_and_never_sees_the_test_set(tmp_path: Path) -> None:
    scale = replace(SCALE, steps_per_task=5)
    unseen = Images(torch.full((4, 16), torch.nan), torch.zeros(4, dtype=torch.long), 4)
    book, listener = Book(tmp_path, study(scale=scale, test=unseen)), Listener()
    best = tune(book, "dense", config(tmp_path), listener)
    assert {why for _, _, why in listener.begun} == {"tuning"}
    assert [MethodSettings(**row["settings"]) for row in book.tuning] == list(trials_of(METHODS["dense"]))
    accuracies = [row["accuracy"] for row in book.tuning]
    assert best == trials_of(METHODS["dense"])[accuracies.index(max(accuracies))]
    again = Listener()
    assert tune(Book(tmp_path, book.study), "dense", config(tmp_path), again) == best
    assert again.begun == []


def test_a_margin_by_hand() -> None:
    outcomes = [outcome("growing", seed, value) for seed, value in enumerate((0.70, 0.80, 0.90))]
    outcomes += [outcome("dense", seed, value) for seed, value in enumerate((0.50, 0.50, 0.80))]
    found = margin(outcomes, "growing", "dense")
    assert found is not None
    assert found.mean == pytest.approx(0.2)
    assert found.least == pytest.approx(0.1)
    assert found.spread == pytest.approx((0.03) ** 0.5)  # of 0.5, 0.5, 0.8: mean 0.6, squares 0.06 over 2
    assert found.is_clear
    assert in_words(found) == ("growing is 20.0 points above dense; seeds differ by 17.3, in the worst seed +10.0.")
    assert margin(outcomes[:1], "growing", "dense") is None
    assert len(list(verdicts(outcomes))) == 1


def test_within_the_spread_is_said_so() -> None:
    outcomes = [outcome(method, seed, value) for method, values in
                {"growing": (0.5, 0.9), "fixed": (0.9, 0.45)}.items() for seed, value in enumerate(values)]  # fmt: skip
    (words,) = verdicts(outcomes)
    assert "differ by +2.5 points, no more than seeds do (31.8), in the worst seed -40.0" in words


def test_summary_and_pictures(tmp_path: Path) -> None:
    outcomes = [outcome("dense", seed, value) for seed, value in enumerate((0.5, 0.7))]
    outcomes += [replace(outcome("growing", 0, 0.9), experts=[[5, 2], [20, 3]])]
    found = summary(study(), outcomes)
    assert found["dense"]["accuracy"] == {"mean": 0.6, "spread": 0.14142, "least": 0.5, "most": 0.7}
    assert found["dense"]["forgetting"]["mean"] == pytest.approx(0.4)
    assert found["growing"]["experts"] == 3
    written = draw_all(tmp_path, study(), outcomes, ["one", "two"])
    assert [path.name for path in written] == [
        "accuracy_matrices.png",
        "accuracy_over_tasks.png",
        "experts_over_time.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert len(draw_all(tmp_path, study(), outcomes[:2], ["one", "two"])) == 2  # nothing grew
