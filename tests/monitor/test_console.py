"""The lines on the terminal: the mean loss of an epoch, and how fast it went."""

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress

import drivetrain as dt
from drivetrain.config import configure
from drivetrain.core.metrics import StepRecord
from drivetrain.core.processes import request_stop
from drivetrain.monitor.console import LEAST_BAR, RunConsole, bar_words
from tests.api.jobs import Variant, Vectors, make_job, make_model, vector_loss
from tests.simulated_clock import SimulatedClock

LINE = re.compile(r"epoch +(\d+) +step +(\d+) +loss ([\d.]+) +([\d,]+) samples/s")


def record(step: int, epoch: int, loss: float, seconds: float = 1.0, items: float = 33.0) -> StepRecord:
    return StepRecord(step, epoch, 33, loss, items, 0.1, None, seconds)


def lines(text: str) -> list[tuple[int, int, float, int]]:
    return [(int(e), int(s), float(loss), int(rate.replace(",", ""))) for e, s, loss, rate in LINE.findall(text)]


def test_records_that_are_read_at_once_do_not_look_fast(capsys: Any) -> None:
    """The records of several steps, here each an epoch of its own, may come within microseconds."""
    console = RunConsole(3, 1, 0)
    for step in (1, 2, 3):
        console.show(record(step, step - 1, 0.5))
    assert lines(capsys.readouterr().out) == [(1, 1, 0.5, 33), (2, 2, 0.5, 33), (3, 3, 0.5, 33)]


def short_epochs(
    clock: SimulatedClock, num_epochs: int, seconds: float, *, known: bool = True, until: int | None = None
) -> None:
    """Show epochs of four steps, each with its validation, which is best in epoch 777."""
    with RunConsole(4 * num_epochs if known else None, 4 if known else None, 0) as console:
        for step in range(1, 4 * (until or num_epochs) + 1):
            clock.spend(seconds / 4)
            console.show(record(step, (step - 1) // 4, 0.5, seconds / 4))
            if step % 4 == 0:
                console.validated(
                    {"valid_loss": abs(step - 3108) / 1e4}, best=f"valid loss {step}" if step <= 3108 else ""
                )


def gaps(shown: list[tuple[int, int, float, int]]) -> list[int]:
    return [second[0] - first[0] for first, second in itertools.pairwise(shown)]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_thousands_of_short_epochs_get_few_lines(
    simulated_clock: SimulatedClock, capsys: Any, monkeypatch: pytest.MonkeyPatch, known: bool, terminal: bool
) -> None:
    """Ten milliseconds each: all of the beginning, then ever fewer, the last, and the best wherever it was."""
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(Progress, "start", lambda self: None)  # its thread would read the simulated clock, too
    short_epochs(simulated_clock, 3000, 0.01, known=known)
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    shown = lines(out)
    assert [line[0] for line in shown[:20]] == [*range(1, 21)]
    assert shown[-1][:2] == (3000, 12000)
    assert len(shown) < 250, "no flood"
    assert max(gaps(shown)) <= 160, "a twentieth of the time so far, not long silence"
    validations = [line for line in out.splitlines() if "valid loss" in line]
    assert len(validations) == len(shown), "a validation has a line where its epoch has one"
    assert sum("best valid loss 3108 at step 3108" in line for line in validations) == 1
    assert out.count("metrics.jsonl") == 1, "that lines are left out is said once"


def test_epochs_that_are_few_or_long_have_a_line_each(simulated_clock: SimulatedClock, capsys: Any) -> None:
    short_epochs(simulated_clock, 100, 0.001)
    assert gaps(lines(capsys.readouterr().out)) == [1] * 99
    short_epochs(simulated_clock, 400, 10.1)
    out = capsys.readouterr().out
    assert gaps(lines(out)) == [1] * 399
    assert "metrics.jsonl" not in out
    short_epochs(simulated_clock, 100_000, 0.5, until=20_000)
    assert len(lines(capsys.readouterr().out)) < 20_000 * 0.5 / 10 + 200, "at most one in ten seconds, in the long run"


def test_the_last_epoch_before_a_stop_has_its_line(simulated_clock: SimulatedClock, capsys: Any) -> None:
    """A run may be stopped after any epoch, which nobody knows beforehand."""
    short_epochs(simulated_clock, 3000, 0.01, until=1718)
    out = capsys.readouterr().out.splitlines()
    assert lines(out[-2])[0][:2] == (1718, 6872)
    assert out[-1].split() == ["valid", "loss", "0.3764"]


def test_lines_that_are_asked_for_are_not_left_out(simulated_clock: SimulatedClock, capsys: Any) -> None:
    console = RunConsole(4000, 4, 0, line_every=4)
    for step in range(1, 2001):
        console.show(record(step, (step - 1) // 4, 0.5, 0.001))
        if step % 4 == 0:
            console.validated({"valid_loss": 0.5})
    out = capsys.readouterr().out
    assert len(lines(out)) == 500
    assert out.count("valid loss") == 500


def test_validations_inside_an_epoch_are_no_flood_either(simulated_clock: SimulatedClock, capsys: Any) -> None:
    console = RunConsole(100_000, 100_000, 0)
    for step in range(1, 5001):
        simulated_clock.spend(0.001)
        console.show(record(step, 0, 0.5, 0.001))
        console.validated({"valid_loss": 1 / step}, best="valid loss")
    validations = capsys.readouterr().out.splitlines()
    assert 100 < len(validations) < 250
    assert "best" not in validations[-1], "this one is the best"


def epochs_with_validations_inside(
    clock: SimulatedClock, num_epochs: int, seconds: float, *, each: int, until: int | None = None
) -> None:
    """Show epochs of 100 steps, and a validation after every `each` steps."""
    with RunConsole(100 * num_epochs, 100, 0) as console:
        for step in range(1, (until or 100 * num_epochs) + 1):
            clock.spend(seconds / 100)
            console.show(record(step, (step - 1) // 100, 0.5, seconds / 100))
            if step % each == 0:
                console.validated({"valid_loss": step / 1e6})


@pytest.mark.parametrize(("num_epochs", "seconds"), [(80, 0.1), (300, 60.0)])
def test_validations_do_not_take_the_lines_of_epochs(
    simulated_clock: SimulatedClock, capsys: Any, num_epochs: int, seconds: float
) -> None:
    """Few epochs, and those that take longer than ten seconds, have a line each, however many validations there are."""
    epochs_with_validations_inside(simulated_clock, num_epochs, seconds, each=3)
    out = capsys.readouterr().out
    assert [line[0] for line in lines(out)] == [*range(1, num_epochs + 1)]
    assert "--log-every" not in out, "it would not bring back what is left out: validations"
    assert out.count("fewer lines") == 1


def test_what_was_left_out_last_stands_at_the_end_in_its_order(simulated_clock: SimulatedClock, capsys: Any) -> None:
    """The last epoch and the last validation, each once, and with its step: no validation is of the line above it."""
    for until in (200_001, 200_004, 200_049, 200_099):
        epochs_with_validations_inside(simulated_clock, 3000, 0.01, each=7, until=until)
        out = capsys.readouterr().out
        last_epoch, last_validation = until - until % 100, until - until % 7
        assert lines(out)[-1][:2] == (until // 100, last_epoch)
        told = [line for line in out.splitlines()[-2:] if re.search(rf"step +{last_validation} +valid loss", line)]
        assert len(told) == 1
        assert f"valid loss {last_validation / 1e6:.4f}" in told[0]
        steps = [int(found) for found in re.findall(r"step +(\d+)", out)]
        assert steps[:-1] == sorted(steps[:-1]), until


def test_skipped_steps_are_told_once(simulated_clock: SimulatedClock, capsys: Any) -> None:
    with RunConsole(4000, 4, 0) as console:
        for step in range(1, 4001):
            simulated_clock.spend(0.001)
            console.show(record(step, (step - 1) // 4, 0.5, 0.001)._replace(skipped=step % 10 == 0))
            if step % 4 == 0:
                console.validated({"valid_loss": 0.5})
    assert sum(int(found) for found in re.findall(r"(\d+) steps? skipped", capsys.readouterr().out)) == 400


def test_an_epochs_line_is_of_the_whole_epoch(capsys: Any) -> None:
    console = RunConsole(8, 4, 0, line_every=3)
    for step in range(1, 9):
        console.show(record(step, (step - 1) // 4, float(step), items=float(step)))
    shown = lines(capsys.readouterr().out)
    assert [line[:2] for line in shown] == [(1, 3), (1, 4), (2, 6), (2, 8)]
    whole = [sum(n * n for n in steps) / sum(steps) for steps in ((1, 2, 3), (1, 2, 3, 4), (5, 6), (5, 6, 7, 8))]
    assert [line[2] for line in shown] == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize(("columns", "shown"), [(90, True), (70, False)])
def test_a_warning_does_not_break_the_lines_of_a_terminal(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, columns: int, shown: bool
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(Progress, "start", lambda self: None)
    console = RunConsole(4, 2, 0)
    console.warn("validation-bound 44%")
    for step in range(1, 5):
        console.show(record(step, (step - 1) // 2, 0.5))
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).splitlines()
    assert len(out) == 2
    assert all(("validation-bound 44%" in line) == shown for line in out)


def test_epochs_of_unknown_length(capsys: Any) -> None:
    with RunConsole(None, None, 0) as console:
        for step, epoch in ((1, 0), (2, 0), (3, 1)):
            console.show(record(step, epoch, float(step)))
    assert [line[:3] for line in lines(capsys.readouterr().out)] == [(1, 2, 1.5), (2, 3, 3.0)]


def test_a_small_loss_is_not_zero_and_a_name_is_no_markup(capsys: Any) -> None:
    console = RunConsole(1, 1, 0)
    console.show(record(1, 0, 1.38795e-05))
    console.validated(
        {"valid_[/b] [red]\nx": 0.5, **{f"valid_{number}": 1.0 for number in range(20)}, "valid_loss": 2e-7}
    )
    console.say(": begins", bold="a [b] name")
    shown = capsys.readouterr().out.splitlines()
    assert "loss 1.388e-05" in shown[0]
    assert shown[1].split("   ")[4:6] == ["valid loss 2e-07", "valid [/b] [red] x 0.5000"], "losses are not left out"
    assert shown[1].endswith("and 10 more in metrics.jsonl")
    assert shown[2] == "a [b] name: begins"


PARTS = {
    "epoch": "epoch 2 of 400",
    "steps": "step 40 of 9,200",
    "loss": "loss 0.3720",
    "metric": "accuracy 0.7972",
    "rate": "2,033 samples/s",
    "eta": "ETA 4:41",
    "warning": "data-bound: waits for data 40% of the time",
}


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, {*PARTS}),
        (100, {"epoch", "loss", "metric", "rate", "eta"}),
        (80, {"epoch", "loss", "metric", "rate", "eta"}),
        (60, {"epoch", "loss", "rate", "eta"}),
        (40, {"loss", "eta"}),
    ],
)
def test_a_bar_shows_what_a_terminal_has_room_for(width: int, shown: set[str]) -> None:
    before, after = bar_words(PARTS, width)
    assert {name for name, text in PARTS.items() if text in f"{before}  {after}"} == shown
    assert len(before) + LEAST_BAR + len(after) + 2 <= width
    assert before in ("epoch 2 of 400", "epoch 2/400")


def test_the_bar_on_a_terminal(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epoch k of n, loss, metric, samples per second and the time left, each with its label."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(RunConsole, "BAR_SECONDS", 0.0)
    with RunConsole(40, 10, 0) as console:
        console.validated({"valid_loss": 0.7, "valid_top_1": 0.8125})
        for step in range(1, 16):
            console.show(record(step, (step - 1) // 10, 1 / step))
            time.sleep(0.002)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    last = plain.rstrip().splitlines()[-1]
    assert re.search(r"epoch 2 of 4 .*step 15 of 40  loss 0\.0667  top 1 0\.8125  33 samples/s  ETA 0:0\d", last), last


def test_the_bar_says_that_it_validates(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no step is done the bar says what is, and how much of it; afterwards it is that of the steps again."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(RunConsole, "BAR_SECONDS", 0.0)
    bars = []
    with RunConsole(40, 10, 0) as console:
        for share in (0.0, 0.25, 1.0):
            for step in (None, 10):
                if step is not None:
                    console.show(record(step, 0, 0.5))
                console.measuring("validating clean", share)
                bars.append(console._progress.tasks[0].fields["after"])
        console.validated({"valid_loss": 0.7})
        bars.append(console._progress.tasks[0].fields["after"])
    assert bars[0] == "validating clean 0%", "a run that goes on has no step yet"
    assert bars[1].startswith("validating clean 0%  step 10 of 40  loss 0.5000")
    assert [bar.split("  ")[0] for bar in bars[2::2]] == [
        "validating clean 25%",
        "validating clean 100%",
        "step 10 of 40",
    ]
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setattr(RunConsole, "LINE_SECONDS", -1.0)
    capsys.readouterr()
    with RunConsole(40, 10, 0) as console:
        console.measuring("testing", 0.5)
    assert capsys.readouterr().out.split() == ["testing", "50%"], "where there is no bar, a long one gets lines"


def test_a_validation_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch of each set is told, by its part of the set's samples; so are those of the test."""
    told: list[tuple[str, float]] = []
    monkeypatch.setattr(RunConsole, "measuring", lambda self, words, share: told.append((words, share)))
    data = [(torch.randn(4),) for _ in range(10)]
    job = dt.Job(
        name="told",
        model=lambda: torch.nn.Linear(4, 1),
        data=data,
        valid={"near": data[:7], "far": data[:4]},
        test=data[:2],
        valid_batch=4,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=10,
        epochs=1,
    )
    dt.train(job, configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0))
    assert [words for words, _ in told] == [*["validating near"] * 3, *["validating far"] * 2, *["testing"] * 2]
    assert [share for _, share in told] == pytest.approx([0, 4 / 7, 1, 0, 1, 0, 1])


class Stop:
    every = 1

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, context: dt.StepContext) -> None:
        if context.step == self.at:
            raise RuntimeError("planted")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_after_a_resume_the_mean_is_of_the_whole_epoch(tmp_path: Path, capsys: Any) -> None:
    def loss(model: Any, batch: Any) -> Any:
        time.sleep(0.02)
        return vector_loss(model, batch)

    variant = Variant(steps=10, global_batch=8, num_samples=40, save_every=3)  # five steps an epoch
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, batch_size=8, report=False)
    with pytest.raises(RuntimeError, match="planted"):
        dt.train(make_job(variant, loss=loss, hooks=[Stop(4)]), config)
    capsys.readouterr()
    result = dt.train(make_job(variant, loss=loss, hooks=[Stop(0)], valid=make_job(variant).data), config)
    assert result.resumed_from == 3
    rows = [json.loads(line) for line in (result.folder / "steps.jsonl").read_text().splitlines()]
    shown = lines(capsys.readouterr().out)
    assert [line[:2] for line in shown] == [(1, 5), (2, 10)]
    for epoch, line in enumerate(shown):
        own = [row for row in rows if row["epoch"] == epoch]
        mean = sum(row["loss"] * row["num_items"] for row in own) / sum(row["num_items"] for row in own)
        assert line[2] == pytest.approx(mean, abs=1e-4)
        assert 8 < line[3] <= 8 / 0.02
    metrics = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    epochs = {row["step"]: row["epoch"] for row in rows}
    assert [(row["step"], row["epoch"]) for row in metrics] == [(step, epochs[step]) for step in (5, 10)]


def test_nothing_stands_below_the_last_words(tmp_path: Path, capsys: Any) -> None:
    """A run that is asked to stop says so after its summary and report."""

    def stop(context: dt.StepContext) -> None:
        if context.step == 4:
            request_stop()

    variant = Variant(steps=10, global_batch=8, num_samples=40)
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, batch_size=8)
    result = dt.train(make_job(variant, hooks=[dt.every(1, stop)]), config)
    assert not result.finished
    shown = capsys.readouterr().out.rstrip().splitlines()
    assert shown[-1] == f"stopped at step {result.steps} of 10; the same command goes on from there"
    assert any("report.html" in line for line in shown)
    assert sum("the same command goes on" in line for line in shown) == 1


def test_the_last_epoch_stands_above_the_summary(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that were left out are shown with the steps: not below the verdict, the test or the last words."""
    monkeypatch.setattr("drivetrain.monitor.console._Pace.SHARE", 100.0)  # all lines but the first ones are left out

    def stop(context: dt.StepContext) -> None:
        if context.step == 61:
            request_stop()

    variant = Variant(steps=4000, global_batch=8, num_samples=16)
    job = make_job(variant, hooks=[dt.every(1, stop)], valid=Vectors(variant), test=Vectors(variant))
    dt.train(job, configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, batch_size=8))
    out = capsys.readouterr().out
    assert "fewer lines" in out
    order = [out.rindex(words) for words in ("epoch ", "valid loss", "  took", "stopped at step")]
    assert order == sorted(order)
    assert "verdict" not in out[: order[1]]


def test_the_last_words_of_a_loop_of_ones_own(tmp_path: Path, capsys: Any) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.ones(6), torch.tensor(0))] * 40)

    model = make_model(Variant(dtype=torch.float32))
    config = configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0, batch_size=8)
    run = dt.drive(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Stream(), config=config, epochs=5, global_batch=8
    )
    for step, batch in enumerate(run):
        run.backward(vector_loss(run.model, batch))
        run.step()
        if step == 6:
            break
    shown = capsys.readouterr().out.rstrip().splitlines()
    assert "the same command goes on from there" in shown[-1]
    assert lines("\n".join(shown))[-1][:2] == (2, 7)
