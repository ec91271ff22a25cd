"""Pictures and the page of a mixture, from events that are written here."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain.report import RunData, picture, write_report
from drivetrain.report.picture import draw_activations, draw_devices, draw_lifecycle
from tests.report.test_report import pixels


def load(step: int, loads: dict[str, int], ranks: dict[str, int] | None = None) -> dict[str, Any]:
    where = ranks or dict.fromkeys(loads, 0)
    return {"event": "load", "step": step, "layer": "mixture", "loads": loads, "ranks": where}


def night(step: int, cycle: int) -> dict[str, Any]:
    stage = {"what": "replay", "kept": False, "loss": [0.1, 0.2], "words": "3 × 8 samples <replayed>"}
    return {
        "event": "sleep", "step": step, "cycle": cycle, "why": "20 steps awake", "stages": [stage], "seconds": 1.25,
        "before": {"valid_loss": 0.5, "valid_accuracy": 0.9}, "after": {"valid_loss": 0.4, "valid_accuracy": 0.95},
        "serves": {"mixture": {"0": {"a": 0.75, "b": 0.0}, "1": {"a": 0.25, "b": 1.0}}}, "specialisation": 0.5,
    }  # fmt: skip


EVENTS = [
    {"event": "start", "step": 0},
    load(10, {"0": 30, "1": 10}),
    {"event": "expert", "step": 12, "layer": "mixture", "what": "grown", "expert": 2, "parent": 0, "new_share": 0.4},
    {"event": "expert", "step": 14, "layer": "mixture", "what": "active", "expert": 2},
    night(20, 1),
    load(20, {"0": 20, "1": 10, "2": 10}),
    {"event": "expert", "step": 24, "layer": "mixture", "what": "pruned", "expert": 1, "share": 0.01},
    {"event": "resume", "step": 20},
    {"event": "expert", "step": 26, "layer": "mixture", "what": "grown", "expert": 3, "parent": 0, "why": "loss <9>"},
    {"event": "expert", "step": 28, "layer": "mixture", "what": "merged", "expert": 2, "into": 0, "agreement": 0.99},
    load(30, {"0": 25, "1": 15}),
]


def written(folder: Path, events: list[dict[str, Any]], **plan: Any) -> RunData:
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    row = {"loss": 1.0, "num_items": 8, "seconds": 0.1, "samples": 8, "epoch": 0}
    (folder / "steps.jsonl").write_text("".join(f"{json.dumps({**row, 'step': step})}\n" for step in range(1, 31)))
    plan = {"world_size": 1, "device": "cpu", "global_batch": 8, "precision": "fp32", "strategy": "single", **plan}
    plan |= {"micro_batch": 8, "accumulation": 1}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    return RunData.read(folder)


def test_what_was_done_again_after_a_resume_is_told_once(tmp_path: Path) -> None:
    data = written(tmp_path, EVENTS)
    assert [(row["step"], row["what"]) for row in data.told("expert")] == [
        (12, "grown"),
        (14, "active"),
        (26, "grown"),
        (28, "merged"),
    ]
    assert [row["step"] for row in data.told("load")] == [10, 20, 30]


def test_there_are_pictures_where_there_are_experts(tmp_path: Path) -> None:
    data = written(tmp_path, EVENTS)
    for draw in (draw_activations, draw_lifecycle):
        made = draw(data)
        assert made is not None
        assert pixels(made)[2] > 50, draw.__name__
    assert draw_devices(data) is None, "on one device there is nothing to see"
    plain = written(tmp_path, EVENTS[:1])
    assert [draw(plain) for draw in (draw_activations, draw_lifecycle, draw_devices)] == [None] * 3


def test_experts_of_several_devices_and_without_sleep(tmp_path: Path) -> None:
    events = [load(10, {"0": 30, "1": 10, "2": 5}, {"0": 0, "1": 1, "2": 1})]
    data = written(tmp_path, events, world_size=2, strategy="expert_parallel")
    two = draw_devices(data)
    assert two is not None
    assert pixels(two)[2] > 50
    assert draw_devices(written(tmp_path, events, world_size=2, strategy="ddp")) is None, "each has all experts"
    assert draw_lifecycle(data) is None
    assert draw_activations(data) is not None


def test_the_page_holds_all_of_it_and_nothing_breaks_out(tmp_path: Path) -> None:
    written(tmp_path, EVENTS)
    assert write_report(tmp_path) == []
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "3 × 8 samples &lt;replayed&gt; (taken back)" in page
    assert "valid accuracy 0.9000 → 0.9500" in page
    assert "expert 2 grown" in page
    assert "from expert 0: 40% of tokens are far from what all experts know" in page, "a run of before has no `why`"
    assert "from expert 0: loss &lt;9&gt;" in page
    assert "expert 1 pruned" not in page, "those steps were done again, otherwise"
    assert page.count("<script>") == 2, "those of the page itself, which is allowed no others"
    assert 'src="http' not in page
    assert 'href="http' not in page


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize("number", [3, 40, 150])
def test_no_label_lies_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, sleeps: bool) -> None:
    """Taken from the drawn figure itself: the frames of all texts of each kind."""
    figures: list[Any] = []
    monkeypatch.setattr(picture.Canvas, "png", lambda self: figures.append(self.figure) or b"")
    experts = [str(expert) for expert in range(number)]
    rows = [load(step, {name: 5 + int(name) * step % 7 for name in experts}) for step in (10, 20, 30)]
    classes = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Ankle boot"]
    serves = {name: {label: int(name) % 5 / 5 for label in classes} for name in experts}
    draw_activations(written(tmp_path, [*rows, *([{**night(20, 1), "serves": {"mixture": serves}}] if sleeps else [])]))
    (figure,) = figures
    figure.canvas.draw()
    frame = figure.bbox
    left, right = figure.axes
    rest = [text for text in left.texts if text.get_text().isdigit()]
    assert len(rest) >= (10 if number == 40 else 0)
    for texts in (right.get_yticklabels(), [] if sleeps else right.get_xticklabels(), rest):
        boxes = [text.get_window_extent() for text in texts if text.get_text()]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        assert all(frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)
    if sleeps:
        lowest = min(text.get_window_extent().y0 for text in right.get_xticklabels())
        assert lowest >= right.xaxis.label.get_window_extent().y1
        assert right.xaxis.label.get_window_extent().y0 >= 0


def texts_of(monkeypatch: pytest.MonkeyPatch, draw: Any, data: RunData) -> list[str]:
    figures: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(picture.Canvas, "png", lambda self: figures.append(self.figure) or b"")
        draw(data)
    (figure,) = figures
    return [text.get_text() for where in (figure, *figure.axes) for text in where.texts]


def test_a_sleep_that_changed_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {**night(25, 2), "after": {"valid_loss": 0.4, "valid_accuracy": 0.9}}
    assert "no change" not in texts_of(monkeypatch, draw_lifecycle, written(tmp_path, EVENTS))
    data = written(tmp_path, [*EVENTS[:6], same])
    assert texts_of(monkeypatch, draw_lifecycle, data).count("no change") == 1


@pytest.mark.parametrize(("chosen", "words"), [(None, False), (1, False), (2, True)])
def test_the_ceiling_of_a_share_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: int | None, words: bool
) -> None:
    rows = [{**load(10, {"0": 8, "1": 8}), **({} if chosen is None else {"top_k": chosen})}]
    shown = " ".join(texts_of(monkeypatch, draw_activations, written(tmp_path, rows)))
    assert ("each token goes to 2 experts: a share is 50% at most" in shown) == words


def test_the_best_point_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(10, 0.5, 0.7), (20, 0.3, 0.9), (30, 0.4, 0.8)]
    text = "".join(
        json.dumps({"step": step, "epoch": 0, "valid_loss": loss, "valid_accuracy": share, "seconds": 0.1}) + "\n"
        for step, loss, share in rows
    )
    (tmp_path / "metrics.jsonl").write_text(text)
    shown = texts_of(monkeypatch, picture.draw, written(tmp_path, EVENTS[:1]))
    assert {"best 0.3 at 20", "best 0.9 at 20"} <= set(shown)
