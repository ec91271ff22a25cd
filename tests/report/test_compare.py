"""`drivetrain compare`: arms, pairs, refusals and verdicts, from run folders that are written here."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import main
from drivetrain.core.errors import DrivetrainError
from drivetrain.report.compare import _as_letters, compare
from drivetrain.report.page import comparison_page
from tests.report.test_page import CHROMIUM, HOSTILE, chromium_starts, drawn, figures_of, in_browser  # noqa: F401

NUM_STEPS, BATCH = 40, 8


def make_run(
    folder: Path, seed: int = 0, loss: float = 1.0, rate: float = 0.1, *, steps: int = NUM_STEPS, **changes: Any
) -> Path:
    """A finished run whose validation loss falls to `loss`; `changes` are of its records."""
    folder.mkdir(parents=True)
    job = {
        "name": folder.name,
        "num_samples": 64,
        "global_batch": BATCH,
        "num_steps": steps,
        "seed": seed,
        "shuffle": True,
    }
    print_ = {
        "python": "3.11", "torch": "2", "machine": "here",
        "functions": {"loss function": "a", "metric accuracy": "m", **changes.get("code", {})},
        "methods": {}, "parts": {"": "p"},
        "samples": {"training": {"length": 64, "digests": {str(seed): changes.get("trained", "t")}},
                    "validation": {"length": changes.get("num_valid", 16),
                                   "digests": {"3": changes.get("valid", "v")}}},
    }  # fmt: skip
    rows = {
        "steps": [{"step": step, "epoch": 0, "samples": BATCH, "num_items": BATCH, "loss": 2.0, "lr": rate,
                   "grad_norm": 1.0, "seconds": 0.1} for step in range(1, steps + 1)],
        "metrics": [{"step": step, "valid_loss": loss + (steps - step) / 10, "valid_accuracy": 1 - loss / 10}
                    for step in range(10, steps + 1, 10)],
        "events": [{"event": "finish", "time": f"2026-01-01T00:00:{seed:02}", "step": steps}],
    }  # fmt: skip
    rows |= changes.get("rows", {})
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    config = {
        "run": {"name": folder.name, "seed": seed},
        "optimizer": {"learning_rate": rate},
        "watch": {"log_every": seed},
    }
    (folder / "job.yaml").write_text(json.dumps(job | changes.get("job", {})))
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "plan.yaml").write_text(json.dumps({"precision": "fp32", "device": "cpu"}))
    (folder / "fingerprint.json").write_text(json.dumps(print_))
    (folder / "source.json").write_text(json.dumps({"target": "train.py", "arguments": changes.get("arguments", [])}))
    if changes.get("finished", True):
        (folder / "finished.json").write_text("{}")
    return folder


def arms(tmp_path: Path, number: int = 6, gain: float = 0.05, **changes: Any) -> list[Path]:
    """Pairs of runs that share a seed's luck, and differ by a gain that varies a little."""
    found = []
    for seed in range(number):
        luck = math.sin(7 * seed)  # far more than the gain
        found.append(make_run(tmp_path / f"base-{seed}", seed, 3 + luck))
        found.append(make_run(tmp_path / f"new-{seed}", seed, 3 + luck - gain - seed / 1000, 0.2, **changes))
    return found


def test_a_small_gain_is_found_below_the_noise_of_seeds(tmp_path: Path) -> None:
    found = compare(arms(tmp_path))
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.is_paired, len(verdict.pairs)) == ("better", True, 6)
    assert verdict.test is not None
    assert verdict.test.mean == pytest.approx(-0.0525)
    assert verdict.test.low < -0.0525 < verdict.test.high < 0
    assert [arm.label for arm in found.arms] == ["learning_rate=0.1", "learning_rate=0.2"]
    assert ("config: optimizer.learning_rate", ("0.1", "0.2")) in found.differences
    assert "base-3" in str(found)
    assert "better: learning_rate=0.2 than learning_rate=0.1" in str(found)


def test_more_of_an_accuracy_is_better(tmp_path: Path) -> None:
    runs = arms(tmp_path)
    assert compare(runs, metric="valid_accuracy").verdicts[0].kind == "better"
    assert compare(runs[::-1], metric="valid_accuracy").verdicts[0].kind == "worse"
    assert compare(runs, metric="valid_loss", mode="max").verdicts[0].kind == "worse"


def test_one_seed_against_another_is_no_improvement(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a", 0, 9.0), make_run(tmp_path / "b", 1, 1.0, 0.2)
    (verdict,) = compare([one, other]).verdicts
    assert verdict.kind == "cannot tell"
    assert "the seed alone may make this difference" in verdict.words
    same = make_run(tmp_path / "c", 0, 1.0, 0.2)
    assert compare([one, same]).verdicts[0].kind == "cannot tell"


def test_five_pairs_are_too_few_and_the_words_say_how_many_it_takes(tmp_path: Path) -> None:
    (verdict,) = compare(arms(tmp_path, 5)).verdicts
    assert verdict.kind == "cannot tell"
    assert "at least 6 pairs" in verdict.words


def test_seeds_of_one_configuration_are_not_compared(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"s{seed}", seed, 1 + seed) for seed in range(8)]
    found = compare(runs)
    assert len(found.arms) == 1
    assert found.differences == ()
    assert found.verdicts[0].kind == "cannot tell"
    assert "standard deviation of 2.45" in found.verdicts[0].words


def test_arms_can_be_given_by_name(tmp_path: Path) -> None:
    runs = arms(tmp_path)
    found = compare({"old": runs[::2], "young": [path.name for path in runs[1::2]]}, output_dir=tmp_path)
    assert [arm.label for arm in found.arms] == ["old", "young"]
    assert found.verdicts[0].kind == "better"


def test_runs_without_a_common_seed_are_matched_by_order(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"a{seed}", seed, 3.0 + seed / 100) for seed in range(6)]
    runs += [make_run(tmp_path / f"b{seed}", 10 + seed, 1.0 + seed / 100, 0.2) for seed in range(6)]
    found = compare(runs)
    assert (found.verdicts[0].kind, found.verdicts[0].is_paired) == ("better", False)
    assert any("share no seed" in note for note in found.notes)


def test_only_one_run_of_a_seed_counts_and_runs_without_a_partner_do_not(tmp_path: Path) -> None:
    runs = [*arms(tmp_path), make_run(tmp_path / "again", 2, 0.0, 0.2), make_run(tmp_path / "lonely", 77, 0.0, 0.2)]
    found = compare(runs)
    assert len(found.verdicts[0].pairs) == 6
    assert any("again has the configuration and the seed of new-2" in note for note in found.notes)
    assert any("not used: lonely" in note for note in found.notes)


def test_a_change_without_effect_is_called_identical(tmp_path: Path) -> None:
    assert compare(arms(tmp_path, 2, gain=0)[:2]).verdicts[0].kind == "identical"


def test_several_arms_share_the_chance_of_a_false_verdict(tmp_path: Path) -> None:
    runs = arms(tmp_path) + [make_run(tmp_path / f"third-{seed}", seed, 9.0, 0.3) for seed in range(6)]
    found = compare(runs)
    assert [verdict.kind for verdict in found.verdicts] == ["cannot tell", "cannot tell"]
    assert all("at least 7 pairs" in verdict.words for verdict in found.verdicts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_valid": 17}, "the validation data has 16 samples in base-0 and 17 in new-0"),
        ({"valid": "other"}, "sample 3 of the validation data is another one"),
        ({"code": {"loss function": "b"}}, "the code of the loss function differs"),
        ({"job": {"loss_weights": {"a": 2}}}, "the weights of the loss differ"),
        ({"steps": 80}, "other budgets: 320 samples in base-0 and 640 in new-0"),
        ({"rows": {"metrics": [{"step": 40, "valid_loss": math.nan}]}}, "finite valid_loss"),
    ],
    ids=["fewer samples", "other samples", "other loss", "other weights", "longer", "diverged"],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = arms(tmp_path, **changes)
    (verdict,) = compare(runs).verdicts
    assert verdict.kind == "refused"
    assert words in verdict.words
    assert main(["compare", *map(str, runs), "--output-dir", str(tmp_path)]) == 1
    assert "refused: " in capsys.readouterr().out


def test_runs_of_one_configuration_on_other_data_are_no_repetitions(tmp_path: Path) -> None:
    one, other, trained = (tmp_path / name for name in ("one", "other", "trained"))
    make_run(one, 0, 1.0)
    make_run(other, 0, 0.5, valid="other")
    (verdict,) = compare([one, other]).verdicts
    assert verdict.kind == "refused"
    assert "sample 3 of the validation data is another one" in verdict.words
    make_run(trained, 0, 0.5, trained="other")
    found = compare([one, trained])
    assert len(found.arms) == 2
    assert found.verdicts[0].kind == "cannot tell"
    assert "other training samples" in found.notes[0]


def test_another_loss_can_be_compared_by_a_metric_of_the_same_code(tmp_path: Path) -> None:
    runs = arms(tmp_path, code={"loss function": "b"})
    assert compare(runs, metric="valid_accuracy").verdicts[0].kind == "better"


def test_a_larger_batch_over_as_many_samples_is_no_other_budget(tmp_path: Path) -> None:
    longer = {"steps": [{"step": step, "samples": 16, "num_items": 16, "seconds": 1, "loss": 1.0, "epoch": 0, "lr": 0.1}
                        for step in range(1, 21)],
              "metrics": [{"step": 20, "valid_loss": 0.5}]}  # fmt: skip
    runs = arms(tmp_path, job={"global_batch": 16, "num_steps": 20}, rows=longer)
    assert compare(runs).verdicts[0].kind != "refused"
    assert compare(runs, over="steps").verdicts[0].kind == "refused"


def test_unfinished_runs_are_compared_at_the_last_common_point_if_asked(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", 0, 1.0), make_run(tmp_path / "b", 0, 2.0, 0.2, steps=25, finished=False)]
    with pytest.raises(DrivetrainError, match="not finished: b is at step 25") as caught:
        compare(runs)
    assert "--common" in caught.value.remedy
    found = compare(runs, common=True)
    assert [row["at step"] for row in found.rows()] == [20, 20]
    assert found.verdicts[0].test is not None
    assert found.verdicts[0].test.mean == pytest.approx((2 + 0.5) - (1 + 2))


def test_the_best_value_is_taken_if_asked(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 0, loss, rate) for name, loss, rate in (("a", 1.0, 0.1), ("b", 2.0, 0.2))]
    rows = compare(runs, which="best", mode="max", metric="valid_loss").rows()
    assert [row["at step"] for row in rows] == [10, 10]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: [make_run(path / "a")], "nothing to compare"),
        (lambda path: [make_run(path / "a"), make_run(path / "a2").parent / "a2"][:1] * 2, "nothing to compare"),
        (lambda path: [make_run(path / "a"), path / "b"], "b is no folder of a run"),
        (lambda path: [make_run(path / "a"), make_run(path / "b", rows={"metrics": []})], "b has no validation"),
        (
            lambda path: [make_run(path / "a"), make_run(path / "b", rows={"metrics": [{"step": 1, "valid_f1": 1.0}]})],
            "b has no metric valid_loss",
        ),
    ],
)
def test_errors_have_a_remedy(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(DrivetrainError, match=message) as caught:
        compare(make(tmp_path), output_dir=tmp_path)
    assert caught.value.remedy


def test_flags_of_a_script_make_arms_and_its_seed_does_not(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"r{seed}", seed, arguments=["--width", "3", "--seed", str(seed)]) for seed in range(2)]
    runs.append(make_run(tmp_path / "wide", 0, arguments=["--width", "4", "--seed=0"]))
    assert [len(arm.runs) for arm in compare(runs).arms] == [2, 1]


def test_the_command_by_names_with_flags_between_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [path.name for path in arms(tmp_path)]
    words = [
        "compare",
        *names[:4],
        "--json",
        *names[4:],
        "--output-dir",
        str(tmp_path),
        "--out",
        str(tmp_path / "x.html"),
    ]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdicts"][0]["verdict"] == "better"
    assert len(told["runs"]) == 12
    assert "12 runs compared" in (tmp_path / "x.html").read_text()


def test_the_page_has_a_line_for_each_run_on_its_own_axes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / HOSTILE.replace("/", "|"), 0, 2.0, 0.2, steps=80)]
    text = comparison_page(compare(runs, common=True))
    figures = figures_of(text)
    first = figures["charts"][0]
    assert first["title"] == "Loss: validation"
    assert [line["name"] for line in first["lines"]] == [path.name for path in runs]
    assert [run["axes"]["samples"][-1] for run in figures["runs"]] == [320, 640]
    assert "<img src=x" not in text
    assert text.count("<script>") == 2


@in_browser
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (390, True)], ids=["wide", "a phone in the dark"])
def test_the_page_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    assert CHROMIUM
    text = comparison_page(compare(arms(tmp_path)))
    flags = [f"--window-size={width},900", *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] * dark)]
    seen = drawn(tmp_path / "page.html", text, *flags)
    assert seen["errors"] == []
    assert int(seen["drawn"]) == seen["canvases"] == seen["redrawn"] == len(figures_of(text)["charts"])
    assert all(seen["inked"])
    assert seen["after"] != seen["before"], "arrow keys move along the curve"
    assert seen["width"] <= seen["room"], "nothing is wider than the window"


def test_how_a_run_was_begun_is_no_difference(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 0, 1.0) for name in ("a", "b")]
    (runs[1] / "config.yaml").write_text("checkpoint: {fresh: true, keep_last: 5}\n")
    names = [name for name, _ in compare(runs).differences]
    assert "config: checkpoint.keep_last" in names
    assert "config: checkpoint.fresh" not in names
    assert _as_letters(("None", "x", "y")) == ("not there", "version A", "version B")


def test_the_verdict_is_said_where_the_page_cannot_be_written(tmp_path: Path, capsys: Any) -> None:
    runs = [str(make_run(tmp_path / name, 0, 1.0)) for name in ("a", "b")]
    (tmp_path / "file").write_text("")
    assert main(["compare", *runs, "--out", str(tmp_path / "file" / "page.html")]) == 1
    said = capsys.readouterr()
    assert "cannot tell: all runs have one configuration" in said.out
    assert "cannot be written" in said.err
