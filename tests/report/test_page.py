"""report.html: its figures, and the page in a real browser."""

import base64
import functools
import hashlib
import html
import json
import math
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.core.goodput import BUCKETS, Account
from drivetrain.core.metrics import Histogram, Text
from drivetrain.moe import KnowledgeGraph
from drivetrain.monitor.tracking import keep_media
from drivetrain.report import RunData, summary
from drivetrain.report.charts import charts, thinned
from drivetrain.report.page import ASSETS, page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-sync", "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


@functools.cache
def chromium_starts() -> bool:
    """Whether there is a Chromium that draws a page: in some containers it is installed, and ends at once."""
    if CHROMIUM is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "--dump-dom", "data:text/html,<p>drawn</p>"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:
            return False
    return "<p>drawn</p>" in done.stdout


in_browser = pytest.mark.skipif(  # the condition is evaluated by the test that asks, in its module
    "not chromium_starts()", reason="no Chromium here that starts: the page is not drawn (apt install chromium)"
)


def make_folder(
    folder: Path,
    num_steps: int = 300,
    name: str = "made",
    metric: str = "valid_accuracy",
    per_epoch: int = 100,
    **logged: float,
) -> Path:
    """A run folder with the files that a report reads, written without training."""
    folder.mkdir(parents=True)
    steps = [
        {"step": step, "epoch": step // per_epoch, "samples": 8, "loss": 3 / step + (step % 7) / 50, "num_items": 8.0,
         "lr": 1e-3 / step, "grad_norm": 1 + step % 5, "seconds": 0.01, "skipped": False, **logged}
        for step in range(1, num_steps + 1)
    ]  # fmt: skip
    steps[num_steps // 2]["loss"] = 77.0  # one spike, which no downsampling may lose
    speed = [
        {"step": step, "epoch": 0, "steps": 10, "seconds": 0.1, "samples_per_second": 800.0, "phase_steps": 10,
         "phases": {"data": 0.001, "forward": 0.004, "backward": 0.005}}
        for step in range(10, num_steps + 1, 10)
    ]  # fmt: skip
    metrics = [
        {"step": step, "epoch": 0, "valid_loss": 4 / step, metric: math.sin(step / 90), "seconds": 0.1}
        for step in range(50, num_steps + 1, max(50, num_steps // 200))
    ]
    events = [
        {"event": "start", "time": "2026-01-01T00:00:00+00:00", "step": 0, "way": "fp32, micro-batch 8, eager"},
        {"event": "resume", "time": "2026-01-01T00:01:00+00:00", "step": 120},
        {"event": "finish", "time": "2026-01-01T00:02:00+00:00", "step": num_steps},
    ]
    for file, rows in {"steps": steps, "speed": speed, "metrics": metrics, "events": events}.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(json.dumps({"name": name}))
    (folder / "source.json").write_text(json.dumps({"target": "train.py", "arguments": ["--width", "3"]}))
    return folder


def made_page(folder: Path) -> str:
    data = RunData.read(folder)
    return page(data, summary(data), {})


def figures_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.none()), min_size=1, max_size=400),
    st.integers(9, 60),
)
def test_downsampling_keeps_extremes_ends_and_gaps(values: list[float | None], most: int) -> None:
    x, y = thinned(list(range(len(values))), values, most)
    assert len(x) <= most + 2
    assert x == sorted(set(x))
    assert (x[0], x[-1]) == (0, len(values) - 1)
    finite = [float(f"{value:.6g}") for value in values if value is not None and math.isfinite(value)]
    kept = [value for value in y if value is not None]
    assert not finite or (min(kept), max(kept)) == (min(finite), max(finite))
    assert (None in y) == (len(finite) < len(values))


def test_the_curves_are_the_records(tmp_path: Path) -> None:
    figures = figures_of(made_page(make_folder(tmp_path / "run")))
    by_title = {chart["title"]: chart["lines"] for chart in figures["charts"]}
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    training, validation = by_title["Loss"]
    assert training["x"] == [row["step"] for row in steps]
    assert training["y"] == [float(f"{row['loss']:.6g}") for row in steps]
    assert validation["best"] == len(validation["y"]) - 1  # it falls until the end
    accuracy = by_title["Accuracy"][0]
    assert accuracy["y"][accuracy["best"]] == max(accuracy["y"])
    assert {"Learning rate", "Gradient norm", "Samples per second"} <= set(by_title)
    assert figures["resumed"] == [120]
    assert figures["axes"]["samples"][-1] == 8 * 300
    assert figures["axes"]["seconds"][-1] == pytest.approx(3.0)


def test_what_is_on_the_page(tmp_path: Path) -> None:
    text = made_page(make_folder(tmp_path / "run"))
    for words in ("best validation accuracy", "fp32, micro-batch 8, eager"):
        assert words in html.unescape(text), words
    again = shlex.split(re.findall(r"<pre>(drivetrain train .*?)</pre>", html.unescape(text))[0])
    assert again[again.index("--") + 1 :] == ["--width", "3"], "our own flags are not the script's"
    assert {str(tmp_path / "run" / name) for name in ("config.yaml", "plan.yaml")} <= set(again)
    assert 'href="./steps.jsonl"' in text
    assert not re.search(r'(src|href)="(?!data:|\./)', text), "nothing is fetched from anywhere"


def test_memory_is_that_of_the_device_or_of_the_process(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    rows = [{"step": 1, "device": "cpu", "process_memory_gib": gib} for gib in (0.5, 1.25, 0.75)]
    (folder / "gpu.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert "<dt>memory</dt><dd>1.25 GiB</dd>" in made_page(folder)
    with (folder / "gpu.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "device": "gpu0", "memory_peak_gib": 40.0}) + "\n")
    text = made_page(folder)
    assert "<dt>peak memory</dt><dd>40.00 GiB</dd>" in text
    assert "<dt>memory</dt>" not in text


def rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_metric_that_may_be_better_either_way_has_no_best(tmp_path: Path) -> None:
    text = made_page(make_folder(tmp_path / "run", metric="valid_sharpness"))
    assert "best validation sharpness" not in text
    assert re.search(r"<dt>validation sharpness</dt><dd>[-.\d]+</dd><dd class=note>at the end; ", text)
    charts_by_title = {chart["title"]: chart["lines"] for chart in figures_of(text)["charts"]}
    assert "best" not in charts_by_title["Sharpness"][0]
    assert re.search(r"valid sharpness +[-.\d]+ at the end\n", text)


def test_several_sets_are_curves_of_one_chart(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")

    def with_sets(row: dict[str, Any]) -> dict[str, Any]:
        first = {name.replace("valid_", "valid_clean_"): row[name] for name in ("valid_loss", "valid_accuracy")}
        other = {name.replace("clean", "noisy"): value / 2 for name, value in first.items()}
        return {**row, "valid_margin": 1.0, **first, "valid_clean_margin": 1.0, **other, "valid_noisy_margin": 2.0}

    rewrite(folder / "metrics.jsonl", with_sets)
    rewrite(folder / "steps.jsonl", lambda row: {**row, "margin": row["step"] / 2})
    found = {chart["title"]: chart["lines"] for chart in figures_of(made_page(folder))["charts"]}
    assert [line["name"] for line in found["Loss"]] == ["training", "clean loss", "noisy loss"]
    assert [line["name"] for line in found["Accuracy"]] == ["clean", "noisy"]
    assert [line["name"] for line in found["margin"]] == ["training", "clean", "noisy"]
    assert sorted(title.lower() for title in found).count("margin") == 1


def test_what_is_not_finite_is_a_gap_or_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")

    def spoil(row: dict[str, Any]) -> dict[str, Any]:
        is_measured = row["step"] % 5 == 0
        logged = {"never": -math.inf, "once": None if row["step"] == 9 else 1.0}
        return {**row, **logged, "grad_norm": row["grad_norm"] if is_measured else None}

    rewrite(folder / "steps.jsonl", spoil)
    text = made_page(folder)
    found = {chart["title"]: chart["lines"] for chart in figures_of(text)["charts"]}
    assert found["once"][0]["y"][7:10] == [1.0, None, 1.0]
    assert found["Gradient norm"][0]["x"] == list(range(5, 301, 5)), "what was not measured is no gap"
    assert "never" not in found
    assert "no value is a finite number: never<" in text


def test_a_curve_has_the_rows_that_have_its_value(tmp_path: Path) -> None:
    kinds: list[list[Any]] = [[0.5], [1], [True], [None], [math.nan], [math.inf], ["text"], [[1.0]], []]
    columns: dict[str, dict[int, Any]] = {
        name: {step: value for step in range(1, 701) for value in kinds[step * step % modulus % len(kinds)]}
        for name, modulus in (("mixed", 89), ("other", 127))
    }
    columns["rare"] = {650: 3}
    folder = make_folder(tmp_path / "run", 700)
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    for name, column in columns.items():
        for step, value in column.items():
            rows[step - 1][name] = value
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = {chart["title"]: chart["lines"][0] for chart in charts(RunData.read(folder))}
    for name, column in columns.items():
        expected = {step: value for step, value in column.items() if not isinstance(value, (str, list))}
        assert drawn[name]["x"] == list(expected)
        assert drawn[name]["y"] == [
            None if value is None or not math.isfinite(value) else value for value in expected.values()
        ]


def test_logged_texts_and_histograms_are_there(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    for step, words in ((1, "early"), (2, HOSTILE)):
        keep_media(folder, "said", Text(words), step)
        keep_media(folder, "weights", Histogram(torch.tensor([0.0, 0.0, 1.0]), bins=2), step)
    text = made_page(folder)
    assert html.escape(HOSTILE) in text, "the latest"
    assert "early" not in text
    heights = [float(height) for height in re.findall(r'height="([\d.]+)"/>', text)]
    assert heights == [60.0, 30.0]


def test_names_full_of_html_are_text(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run", name=HOSTILE, metric=f"valid_{HOSTILE}")
    (folder / f"a{HOSTILE.replace('/', '')}.txt").write_text("")
    text = made_page(folder)
    assert "<img src=x" not in text
    assert text.count("<script>") == 2
    assert HOSTILE in [line["name"] for chart in figures_of(text)["charts"] for line in chart["lines"]]
    if chromium_starts():
        assert drawn(tmp_path / "page.html", text)["title"] == f"run ({HOSTILE})"


def test_what_others_wrote_is_as_they_published_it() -> None:
    expected = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    assert {name: hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() for name in expected} == expected
    assert "MIT License" in (ASSETS / "uPlot.LICENSE").read_text()


@pytest.mark.alone
def test_a_hundred_thousand_steps_make_a_small_page_soon(tmp_path: Path) -> None:
    logged = {f"value {number}": number + 0.5 for number in range(12)}
    folder = make_folder(tmp_path / "run", 100_000, per_epoch=8, **logged)
    lines = (folder / "steps.jsonl").read_text().splitlines()

    def parse() -> float:
        began = time.process_time()
        for line in lines:
            json.loads(line)
        return time.process_time() - began

    parsing = parse()
    began = time.process_time()
    data = RunData.read(folder)
    text = page(data, summary(data), {})
    seconds, parsing = time.process_time() - began, (parsing + parse()) / 2
    # Three seconds; more on a machine where parsing the lines alone takes more than half of that.
    assert seconds < max(3.0, 1.8 * parsing)
    assert len(text) < 3_000_000
    assert max(charts(data)[0]["lines"][0]["y"]) == 77.0


def fault_rows(folder: Path) -> None:
    """A run on two processes: rank 1 is killed, it goes on from a checkpoint, runs out of memory, is killed again."""

    def row(second: int, event: str, **facts: Any) -> str:
        return (
            json.dumps({"event": event, "time": f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}+00:00", **facts})
            + "\n"
        )

    spent = {"step": 5.0, "eval": 1.0, "data_wait": 2.0, "ckpt_block": 0.0, "init": 2.0, "other": 0.0}
    later = {**spent, "step": 15.0}
    (folder / "events.jsonl").write_text(
        row(10, "start", step=0, since={"seconds": 10.0})
        + row(20, "time", step=50, spent=spent)
        + row(30, "time", step=100, spent=later)
        + row(50, "resume", step=80, since={"seconds": 8.0})
        + row(55, "out of memory", step=85, words="micro-batches of 8")
        + row(56, "micro-batch capped", step=85, words="4 samples from now on")
        + row(60, "time", step=120, spent=spent)
        + row(87, "claim")
        + row(88, "note", text="before it goes on")
        + row(90, "resume", step=120, since={"seconds": 5.0}, last_step=131, last_write=1767225664.0)
        + row(91, "job changed", step=120, changes=["lr is 0.1, was 0.2", "samples 3 and 5 of the training data"])
        + row(100, "finish", step=300)
    )
    (folder / "attempts.jsonl").write_text(
        row(35, "failure", cause="killed", rank=1, step=103) + row(100, "end", code=0)
    )


def test_faults_and_recoveries_are_on_the_clock(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    fault_rows(folder)
    text = made_page(folder)
    seen = figures_of(text)["timeline"]
    assert seen["seconds"] == 100
    assert [start[:3] for start in seen["starts"]] == [[0.0, 0.1, 0.35], [0.42, 0.5, 0.64], [0.85, 0.9, 1.0]]
    first, second = seen["starts"][0][4]
    assert first == [0.1, 0.2, [0.5, 0.2, 0.1, 0.0, 0.2, 0.0]]
    assert second == [0.2, 0.3, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]], "what was spent since the row before"
    assert seen["marks"] == [
        [0.35, "fault", "35 s", "failed on rank 1, step 103: killed"],
        [0.5, "recovery", "50 s", "went on from step 80; 23 steps done again, 15 s after the end"],
        [0.55, "fault", "55 s", "out of memory, step 85: micro-batches of 8"],
        [0.56, "recovery", "56 s", "smaller micro-batches, step 85: 4 samples from now on"],
        [0.64, "fault", "1 min 4 s", "ended without a word: killed, or the machine went down"],
        [0.9, "recovery", "1 min 30 s", "went on from step 120; 11 steps done again, 26 s after the end"],
        [1.0, "end", "1 min 40 s", "finished at step 300"],
    ]
    assert "<td>failure</td><td>killed</td>" in text
    killed = "<td>131</td><td>ended without a word</td><td>killed, or the machine went down</td>"
    assert f"<td>2026-01-01 00:01:04</td>{killed}" in text, "steps.jsonl is what it last wrote"
    assert "<td>job changed</td><td>lr is 0.1, was 0.2; samples 3 and 5 of the training data</td>" in text


def test_what_follows_from_a_failed_rank_is_no_fault_of_its_own(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")

    def marks(rank: int) -> list[Any]:
        rows = [
            {"event": "start", "time": "2026-01-01T00:00:00+00:00", "step": 0},
            {
                "event": "stopped by an error",
                "time": "2026-01-01T00:00:10+00:00",
                "error": "RuntimeError: reset by peer",
            },
            {"event": "resume", "time": "2026-01-01T00:00:20+00:00", "step": 80},
            {"event": "finish", "time": "2026-01-01T00:00:30+00:00", "step": 300},
        ]
        failure = {"event": "failure", "time": "2026-01-01T00:00:12+00:00", "cause": "signal", "rank": rank, "step": 98}
        (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "attempts.jsonl").write_text(json.dumps(failure) + "\n")
        return [mark[3] for mark in figures_of(made_page(folder))["timeline"]["marks"]]

    went_on = "went on from step 80; 18 steps done again, 10 s after the end"
    assert marks(1) == ["failed on rank 1, step 98: signal", went_on, "finished at step 300"]
    own = "stopped by an error: RuntimeError: reset by peer"
    assert marks(0) == [own, "failed on rank 0, step 98: signal", went_on, "finished at step 300"]


def test_the_card_of_the_time_says_what_it_counts(tmp_path: Path) -> None:
    account = Account(dict.fromkeys(BUCKETS, 1.0), {"killed": 1}, (7,), (2.0,), ())
    text = page(replace(RunData.read(make_folder(tmp_path / "run")), account=account), "", {})
    words = "interruptions 1: killed (1); 2 s to go on and 7 steps lost (means)"
    assert f"<dt>wall time</dt><dd>13 s</dd><dd class=note>{words}</dd>" in text
    quiet = replace(RunData.read(tmp_path / "run"), account=replace(account, interruptions={}))
    assert "<dt>wall time</dt><dd>13 s</dd></div>" in page(quiet, "", {})


def test_the_forecast_stands_beside_what_was_measured(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")  # 300 steps of 0.01 s, and 6 validations of 0.1 s
    forecast = {"step_seconds": 0.02, "job_seconds": 6.5}
    (folder / "plan.yaml").write_text(
        json.dumps({"device": "cpu", "choices": {"batch.size": {"value": 8, "why": "w"}}, "forecast": forecast})
    )
    (folder / "job.yaml").write_text(json.dumps({"name": "made", "num_steps": 300}))

    def cells() -> list[str]:
        data = RunData.read(folder)
        plan = page(data, "", {}).partition("<h2>Plan</h2>")[2].partition("</section>")[0]
        return re.findall(r"<td>(.*?)</td>", plan.partition("forecast</th>")[2])

    whole = ["steps and validations together", "6.5 s", "3.6 s"]
    assert cells() == ["seconds per step", "0.02", "0.01 (median)", *whole]
    (folder / "job.yaml").write_text(json.dumps({"name": "made", "num_steps": 400}))
    assert cells()[3:] == [], "it has not come to its end"


def test_a_run_that_began_anew_or_stays_killed_says_so(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")

    def events(*rows: dict[str, Any]) -> list[Any]:
        (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [mark[1:] for mark in figures_of(made_page(folder))["timeline"]["marks"]]

    start = {"event": "start", "time": "2026-01-01T00:00:00+00:00", "step": 0}
    anew = start | {"time": "2026-01-01T00:00:50+00:00", "last_step": 30, "last_write": 1767225640.0}
    words = "ended without a word: killed, or the machine went down"
    assert events(start, anew, {"event": "finish", "time": "2026-01-01T00:01:00+00:00", "step": 300}) == [
        ["fault", "40 s", words],
        ["recovery", "50 s", "began anew; 30 steps done again, 10 s after the end"],
        ["end", "1 min 0 s", "finished at step 300"],
    ]
    assert events(start, {"event": "time", "time": "2026-01-01T00:00:05+00:00", "step": 9, "spent": {}}) == [
        ["fault", "7.91 s", words]
    ], "what its steps took after the last event: a copied folder has other times of its files"
    assert "<td>300</td><td>ended without a word</td>" in made_page(folder)
    refused = {"event": "refused", "time": "2026-01-01T00:00:30+00:00", "error": "no"}
    assert events(start, {"event": "claim", "time": "2026-01-01T00:00:29+00:00"}, refused) == [["fault", "3 s", words]]


def test_damaged_times_and_graphs_leave_a_page(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "time", "time": 3, "spent": 4}\n')
        file.write('{"event": "time", "time": "2026-01-01T00:01:30+00:00", "spent": [1]}\n')
        file.write('{"event": "resume", "time": "2026-01-01T00:01:40+00:00", "step": null, "since": 7}\n')
    (folder / "knowledge").mkdir()
    (folder / "knowledge" / "epoch_0001.json").write_text('{"step": 3, "layers": {"a": {"graph": []}}}')
    (folder / "knowledge" / "epoch_0002.json").write_text("[")
    figures = figures_of(made_page(folder))
    assert figures["knowledge"] == []
    assert len(figures["timeline"]["starts"]) == 3


def make_graph(folder: Path) -> None:
    """Three experts and two concepts, one of them with a name full of HTML; at two steps."""
    (folder / "knowledge").mkdir()
    for number in (1, 2):
        graph = KnowledgeGraph()
        for expert in range(3):
            graph.add_expert(expert, 0, parent=0 if expert == 2 else None)
            graph.note(expert, activations=100 * (expert + 1), last_use=10 * number)
        graph.add_concept(HOSTILE)
        graph.add_concept("cats")
        graph.look(
            {
                "composition": {(0, "cats"): 0.75, (1, "cats"): 0.25, (1, HOSTILE): 1.0},
                "co-activation": {(0, 1): 0.5},
            }
        )
        layer = {"graph": graph.as_json(), "experts": [0, 1, 2], "loads": [6, 3, 1], "ranks": [0, 0, 0]}
        row = {
            "step": 10 * number,
            "epoch": number,
            "layers": {"moe": {**layer, "capabilities": [1.0], "together": 1.0}},
        }
        (folder / "knowledge" / f"epoch_{number:04d}.json").write_text(json.dumps(row))
    with (folder / "events.jsonl").open("a") as file:
        for step in (10, 20):
            loads = {"event": "load", "step": step, "layer": "moe", "top_k": 2, "loads": {"0": 6, "1": 3, "2": 1}}
            file.write(json.dumps(loads) + "\n")


def test_experts_and_what_they_know(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    make_graph(folder)
    figures = figures_of(made_page(folder))
    assert [graph["step"] for graph in figures["knowledge"]] == [10, 20]
    nodes = {node["name"]: node for node in figures["knowledge"][-1]["nodes"]}
    assert set(nodes) == {"0", "1", "2", "cats", HOSTILE}
    assert nodes["0"]["told"][:2] == ["60.0% of the last step's tokens", "100 tokens in all"]
    assert any(line.startswith("serves the concept: cats") for line in nodes["0"]["told"])
    assert "grown from expert 0" in nodes["2"]["told"]
    shares = {line["name"]: line["y"] for line in figures["experts"]["lines"]}
    assert shares == {"expert 0": [60.0, 60.0], "expert 1": [30.0, 30.0], "expert 2": [10.0, 10.0]}
    assert figures["experts"]["note"] == "each token goes to 2 experts: a share is 50% at most"


# In a browser. A script of the test presses keys and writes what it sees into the page; the policy of the copy lets it.
PROBE = """
addEventListener('securitypolicyviolation', (event) => seen.errors.push('policy: ' + event.violatedDirective));
const seen = {errors: []};
addEventListener('error', (event) => seen.errors.push(String(event.message)));
addEventListener('load', async () => {
  const root = document.documentElement, chart = document.querySelector('.chart');
  const legend = () => chart.querySelector('.u-legend').textContent;
  chart.focus();
  const before = legend();
  for (const key of ['Home', 'ArrowRight', 'ArrowRight'])
    chart.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
  Object.assign(seen, {before, after: legend(), focused: document.activeElement === chart, drawn: root.dataset.drawn,
    canvases: document.querySelectorAll('canvas').length, title: document.title, theme: root.dataset.theme,
    width: document.scrollingElement.scrollWidth, room: innerWidth});
  // uPlot draws in a microtask: what the plot shows is read when it has.
  const shown = () => uPlot.sync('run').plots[0].scales.x, span = () => shown().max - shown().min;
  const area = chart.querySelector('.u-over'), spans = [span()];
  const press = (key) => { chart.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true})); };
  const finger = (kind, at, y = 50) => {
    const edges = area.getBoundingClientRect();
    area.dispatchEvent(new PointerEvent(kind, {pointerType: 'touch', bubbles: true,
      clientX: edges.left + at * edges.width, clientY: edges.top + y}));
  };
  const settled = () => new Promise((done) => setTimeout(done, 400));  // a touch at once would be a double tap
  for (const key of ['+', '-', '+', 'Escape']) { press(key); await settled(); spans.push(span()); }
  finger('pointerdown', 0.25); finger('pointermove', 0.5); finger('pointerup', 0.5);
  await settled(); spans.push(span());
  finger('pointerdown', 0.25); finger('pointermove', 0.27); finger('pointercancel', 0.27);
  await settled(); spans.push(span());
  finger('pointerdown', 0.3); finger('pointerup', 0.3); finger('pointerdown', 0.3); finger('pointerup', 0.3);
  await settled(); spans.push(span());
  seen.spans = spans.map((each) => each / spans[0]);
  const inked = [...document.querySelectorAll('canvas')].map((canvas) =>
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value));
  const over = document.querySelector('select');
  over.value = 'seconds'; over.dispatchEvent(new Event('change'));
  document.querySelector('button').click();
  Object.assign(seen, {inked, other: root.dataset.theme, redrawn: document.querySelectorAll('canvas').length});
  const graph = document.querySelector('.graph svg'), info = document.querySelector('.graph .info');
  if (graph) {
    const names = [info.textContent];
    graph.focus();
    for (const key of ['ArrowRight', 'ArrowRight', 'End', 'Escape']) {
      graph.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
      names.push(info.querySelector('b').textContent);
    }
    graph.querySelector('g').dispatchEvent(new MouseEvent('mouseenter'));
    const hovered = info.textContent, faint = graph.querySelectorAll('.faint').length;
    const slider = document.querySelector('.slider input');
    slider.value = 0; slider.dispatchEvent(new Event('input'));
    const mark = document.querySelector('.mark.fault');
    if (mark) mark.focus();
    Object.assign(seen, {names, hovered, faint, step: document.querySelector('.slider output').textContent,
      mark: document.querySelector('#timeline .told').textContent});
  }
  const told = document.createElement('pre'); told.id = 'seen'; told.textContent = JSON.stringify(seen);
  document.body.appendChild(told);
});
"""


def drawn(path: Path, text: str, *flags: str) -> Any:
    """Return what the page says of itself in a headless browser."""
    digest = hashlib.sha256(PROBE.encode()).digest()
    allowed = base64.b64encode(digest).decode()
    text = text.replace("script-src ", f"script-src 'sha256-{allowed}' ", 1)
    path.write_text(text.replace("<body>", f"<body><script>{PROBE}</script>", 1), encoding="utf-8")
    assert CHROMIUM is not None
    options = [*FLAGS, "--virtual-time-budget=5000", f"--user-data-dir={path.parent / 'profile'}", *flags]
    run = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    found = re.search(r'<pre id="seen">(.*?)</pre>', run.stdout, re.DOTALL)
    assert found is not None, run.stdout[-2000:] + run.stderr[-2000:]
    return json.loads(html.unescape(found.group(1)))


@in_browser
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (390, True)], ids=["wide", "a phone in the dark"])
def test_the_page_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    folder = make_folder(tmp_path / "run")
    fault_rows(folder)
    make_graph(folder)
    text = made_page(folder)
    flags = [f"--window-size={width},900", *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] * dark)]
    seen = drawn(tmp_path / "page.html", text, *flags)
    assert seen["errors"] == []
    assert int(seen["drawn"]) == seen["canvases"] == seen["redrawn"] == len(figures_of(text)["charts"]) + 1
    assert all(seen["inked"])
    assert seen["focused"]
    assert "–" in seen["before"]
    assert seen["after"] != seen["before"], "arrow keys move along the curve"
    whole, closer, back, again, escaped, by_finger, scrolled, shown = seen["spans"]
    assert (whole, closer, back, again, escaped) == (1, pytest.approx(0.5, abs=0.01), 1, closer, 1)
    assert by_finger == pytest.approx(0.25, abs=0.02), "a finger that moves sideways zooms"
    assert scrolled == by_finger, "one that scrolls the page does not"
    assert shown == 1, "a double tap shows all"
    assert {seen["theme"], seen["other"]} == {"light", "dark"}
    assert seen["width"] <= seen["room"], "nothing is wider than the window"
    nodes = figures_of(text)["knowledge"][-1]["nodes"]
    kinds = [f"{'concept' if 'radius' not in node else 'expert'} {node['name']}" for node in nodes]
    assert seen["names"][1:] == [kinds[0], kinds[1], kinds[-1], "layer moe"], "arrow keys go from node to node"
    assert nodes[0]["told"][0] in seen["hovered"]
    assert seen["faint"] > 0, "what is not tied to it steps back"
    assert seen["step"] == "10"
    assert seen["mark"] == "35 s: failed on rank 1, step 103: killed"
    assert seen["title"] == "run (made)"
