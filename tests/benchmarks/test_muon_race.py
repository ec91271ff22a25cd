"""The race between optimizers: what it counts as the time to a loss, how it searches rates, and a tiny one."""

import math
from pathlib import Path

import pytest
import torch
from benchmarks.muon_race import (
    SHARE,
    SIZES,
    VALIDATIONS,
    Trial,
    corpus_of,
    figures,
    pair_loss,
    race,
    steps_that_fit,
    tuned,
)


def test_seconds_are_those_of_the_steps_until_a_validation_is_no_worse() -> None:
    trial = Trial(0.1, {10: 3.0, 20: 2.0, 30: 2.5, 40: 1.0}, 0.5)
    assert trial.seconds_until(2.0) == 10.0
    assert trial.seconds_until(1.9) == 20.0  # nothing is taken from between two validations
    assert trial.seconds_until(0.9) is None


def test_the_target_is_the_best_end_of_adamw_and_any_trial_of_muon_may_reach_it() -> None:
    adamw = [Trial(1e-3, {50: 2.0, 100: 1.5}, 0.1), Trial(2e-3, {50: 1.4, 100: 1.6}, 0.1)]
    muon = [Trial(0.02, {30: 1.6, 60: 1.3}, 0.2), Trial(0.04, {30: 1.5, 60: 1.4}, 0.2)]
    told = figures(adamw, muon, 2.1)
    assert told["AdamW: its loss is below 0.75 of that table's (1: the race counts)"] == [1.0]
    assert figures(adamw, muon, 1.9)["AdamW: its loss is below 0.75 of that table's (1: the race counts)"] == [0.0]
    assert told["Muon / AdamW: seconds to the loss (goal: at most 0.8)"] == [pytest.approx(6.0 / 10.0)]
    assert told["Muon / AdamW: steps to the loss"] == [pytest.approx(0.3)]
    assert told["Muon: its learning rate there"] == [0.04]
    missed = figures(adamw, [Trial(0.02, {60: 1.6}, 0.2), Trial(0.04, {60: math.nan}, 0.2)], 2.1)
    assert missed["Muon: trials that reached the loss"] == [0]
    assert not any("seconds to the loss" in row for row in missed)


def test_the_loss_of_a_table_of_byte_pairs() -> None:
    """After a 1 comes a 2 or a 3, as often; after those always a 1: half of the bytes take one bit."""
    text = torch.tensor([1, 2, 1, 3] * 50_000 + [1], dtype=torch.uint8).view(1, -1)
    assert pair_loss(text, text) == pytest.approx(math.log(2) / 2, rel=0.01)


@pytest.mark.parametrize("best", [3e-3, 2e-4, 0.05])
def test_rates_are_searched_next_to_the_best_and_what_diverged_is_worst(best: float) -> None:
    def run(rate: float) -> Trial:
        loss = math.nan if rate > 0.02 else abs(math.log(rate / best))
        return Trial(rate, {1: loss}, 1.0)

    trials = tuned(run, 1e-3, trials=7)
    assert trials[0].last == min(trial.last for trial in trials)
    assert len({trial.rate for trial in trials}) == 7
    reachable = min(best, 0.02)
    assert abs(math.log2(trials[0].rate / reachable)) <= 0.5 + 1e-9


def test_trials_fit_the_time() -> None:
    steps = steps_that_fit(30.0, 0.02, 0.03)
    assert 29.9 < steps * 0.02 + SHARE * steps * 0.03 <= 30.0
    assert steps_that_fit(-5.0, 0.02, 0.03) == VALIDATIONS


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    files = [tmp_path / f"{number:02}.py" for number in range(40)]
    for number, path in enumerate(files):
        path.write_bytes(bytes([number]) * 200)
    corpus = corpus_of(files, SIZES["tiny"])
    seen, kept = (set(data.tensors[0].unique().tolist()) for data in (corpus.train, corpus.held_out))
    assert kept == {0, 20}
    assert seen == set(range(40)) - kept
    files[7].write_bytes(b"x" * 200)
    assert corpus_of(files, SIZES["tiny"]).digest != corpus.digest


def test_a_tiny_race(tmp_path: Path) -> None:
    for number in range(21):
        (tmp_path / f"{number:02}.py").write_bytes(b"def a_function(of, words): return of * words\n" * 20)
    size = SIZES["tiny"]
    corpus = corpus_of(sorted(tmp_path.iterdir()), size)
    told = race(size, corpus, 0.0, {"batch_size": 8, "auto_optimize": False}, trials=2, warm_steps=2)
    assert len(told["AdamW: learning rates tried"]) == len(told["Muon: learning rates tried"]) == 2
    assert told["AdamW: best last validation loss"] == [min(told["AdamW: last validation losses"])]
    assert told["AdamW: steps of a trial"] == [VALIDATIONS]
    assert told["Muon: steps of a trial"] == [int(SHARE * VALIDATIONS)]
    assert 0 < told["AdamW: best last validation loss"][0] < math.log(256)
