"""Trackers that work, and trackers that fail in every way: the run never notices."""

import csv
import json
import math
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import drivetrain as dt
from drivetrain.api.driving import drive
from drivetrain.api.training import train
from drivetrain.config import configure
from drivetrain.core import plugins
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.core.run_folder import read_rows
from drivetrain.monitor import recorder, tracking
from drivetrain.monitor import tracking as csv_tracker
from drivetrain.monitor.tracking import BackgroundTracker, Tracker, TrackerStart, keep_media, start_trackers
from tests.api.jobs import Variant, Vectors, run
from tests.api.jobs import make_job as make_plain_job
from tests.api.test_loss_parts import loss_of_means, make_data, make_job

SMALL = Variant(dtype=torch.float32, steps=30, num_samples=64, global_batch=8, save_every=100)


class Recorder:
    """Remembers; fails or hangs where it is told to."""

    def __init__(self, fails_at: str = "", hangs_at: str = "", release: threading.Event | None = None) -> None:
        self.points: list[tuple[Mapping[str, float], int]] = []
        self.closed = False
        self._fails_at, self._hangs_at, self._release = fails_at, hangs_at, release
        self._meet("init")

    def _meet(self, place: str) -> None:
        if place in self._fails_at.split():
            raise OSError(28, f"planted in {place}")
        if place == self._hangs_at:
            assert self._release is not None
            self._release.wait(60)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._meet("log")
        self.points.append((metrics, step))

    def close(self) -> None:
        self._meet("close")
        self.closed = True


def test_points_arrive_in_order_and_the_tracker_is_closed() -> None:
    recorder, told = Recorder(), []
    tracker = BackgroundTracker("test", lambda: recorder, told.append)
    for step in range(100):
        tracker.log({"loss": float(step)}, step)
    tracker.close()
    assert recorder.points == [({"loss": float(step)}, step) for step in range(100)]
    assert recorder.closed
    assert told == []


@pytest.mark.parametrize("place", ["init", "log", "close"])
def test_a_failure_is_told_once(place: str) -> None:
    told: list[str] = []
    tracker = BackgroundTracker("test", lambda: Recorder(fails_at=place), told.append)
    for step in range(50):
        tracker.log({"loss": 1.0}, step)
        time.sleep(0.0005)
    tracker.close()
    assert len(told) == 1
    assert "test is dropped" in told[0]
    assert f"planted in {place}" in told[0]
    assert "Error: " in told[0], "the error's type"
    assert "(test_trackers.py:" in told[0], "and the line that raised it"


@pytest.mark.parametrize("place", ["init", "log", "close"])
def test_one_that_hangs_is_left_behind(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundTracker, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(BackgroundTracker, "CAPACITY", 20)
    release, told = threading.Event(), []
    tracker = BackgroundTracker("test", lambda: Recorder(hangs_at=place, release=release), told.append)
    put = tracker._queue.put

    def put_at_once(item: Any, block: bool = True, timeout: float | None = None) -> None:
        assert not block, "nothing waits for it"
        put(item, block)

    with monkeypatch.context() as patch:
        patch.setattr(tracker._queue, "put", put_at_once)
        for step in range(100):
            tracker.log({"loss": 1.0}, step)
    began = time.perf_counter()
    tracker.close()
    assert time.perf_counter() - began < 30, "it hangs for a minute"
    assert any("left behind" in text for text in told)
    if place != "close":
        assert any("points are missing" in text for text in told)
    release.set()


def test_one_that_fails_is_closed_and_fails_again_unheard() -> None:
    """What broke `log` often breaks `close`: the cause is told, not what follows from it, and its thread ends."""
    told: list[str] = []
    made: list[Recorder] = []
    closings: list[str] = []

    class Closing(Recorder):
        def close(self) -> None:
            closings.append("asked")
            super().close()

    def make() -> Tracker:
        made.append(Closing(fails_at="log close"))
        return made[-1]

    tracker = BackgroundTracker("test", make, told.append)
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    assert not tracker._thread.is_alive()
    assert closings == ["asked"], "it may hold a file or a connection"
    assert [(recorder.points, recorder.closed) for recorder in made] == [([], False)]
    assert len(told) == 1
    assert "planted in log" in told[0]


def plant(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Tracker]) -> None:
    """Instead of TensorBoard."""
    monkeypatch.setattr(tracking, "prepare_tensorboard", lambda start: make)


@pytest.mark.parametrize(
    ("how", "place"),
    [(how, place) for how in ("fails", "hangs") for place in ("init", "log", "close")] + [("fails", "log close")],
)
def test_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, how: str) -> None:
    monkeypatch.setattr(BackgroundTracker, "PATIENCE_SECONDS", 0.2 if how == "hangs" else 120.0)
    release = threading.Event()
    plant(monkeypatch, lambda: Recorder(**{f"{how}_at": place}, release=release))
    plain = run(str(tmp_path / "plain"), SMALL)
    tracked = run(str(tmp_path / "tracked"), SMALL, settings={"trackers": ["tensorboard"], "log_every": 1})
    release.set()
    assert plain is not None
    assert tracked is not None
    assert tracked.rows == plain.rows
    notes = [row["text"] for row in rows(tmp_path / "tracked", "events") if row["event"] == "note"]
    assert sum("tensorboard" in text for text in notes) == 1
    assert (tmp_path / "tracked" / "suite" / "finished.json").exists()


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "suite" / f"{name}.jsonl").read_text().splitlines()]


def test_what_a_tracker_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    plant(monkeypatch, lambda: recorder)
    trained = run(str(tmp_path), SMALL, settings={"trackers": ["tensorboard"], "log_every": 7, "monitor_gpu": False})
    assert trained is not None
    assert [step for _, step in recorder.points] == [7, 14, 21, 28, 30]  # and what is left at the end
    figures, _ = recorder.points[1]
    mean = sum(row["loss"] * row["num_items"] for row in trained.rows[7:14]) / sum(
        row["num_items"] for row in trained.rows[7:14]
    )
    assert figures["train/loss"] == pytest.approx(mean)
    assert figures["train/lr"] == trained.rows[13]["lr"]
    assert figures["train/grad_norm"] == trained.rows[13]["grad_norm"]
    assert figures["speed/samples_per_second"] > 0
    assert figures["phase_ms/forward"] > 0
    assert all(isinstance(value, float) for value in figures.values())


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained = run(str(tmp_path), SMALL, settings={"trackers": ["tensorboard"], "log_every": 1})
    assert trained is not None
    events = EventAccumulator(str(tmp_path / "suite" / "tensorboard")).Reload()
    losses = events.Scalars("train/loss")
    assert [point.step for point in losses] == list(range(1, 31))
    assert [point.value for point in losses] == pytest.approx(trained.losses, rel=1e-6)


def test_wandb_works_offline_without_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody is logged in there
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    # A process of wandb's own has to start, which takes long on a busy machine.
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "120")
    monkeypatch.setattr(tracking, "START_SECONDS", 120.0)
    monkeypatch.setattr(BackgroundTracker, "PATIENCE_SECONDS", 240.0)
    settings = {"trackers": ["tensorboard", "wandb"], "log_every": 2, "monitor_gpu": False}
    job = make_job(name="suite", valid=make_data(16, seed=5), hooks=[dt.every(2, show)])
    train(job, configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=8, report=False, **settings), quiet=True)
    notes = [row["text"] for row in rows(tmp_path, "events") if row["event"] == "note"]
    assert any("not logged in" in text and "wandb sync" in text for text in notes), notes
    (kept,) = (tmp_path / "suite" / "wandb").glob("offline-run-*/run-*.wandb")
    assert (tmp_path / "suite" / "wandb.id").read_text().strip() in kept.name

    # Each part of the loss is a curve in both, under the names of docs/guide/training.md.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "suite" / "tensorboard")).Reload()
    wanted = {f"{split}/loss{part}" for split in ("train", "valid") for part in ("", "_answer", "_findings", "_size")}
    tags = set(events.Tags()["scalars"])
    assert wanted <= tags
    deadline = time.monotonic() + 120
    while not tags <= set(last := wandb_history(kept)) and time.monotonic() < deadline:
        time.sleep(0.1)  # a process of wandb's own writes it
    assert tags <= set(last)
    for tag in wanted:
        assert last[tag] == pytest.approx(events.Scalars(tag)[-1].value, rel=1e-5), tag

    # What hooks show is among its media, too.
    from PIL import Image as Picture

    kinds = {"train/picture": "image-file", "train/spread": "histogram", "train/words": "html-file"}
    assert {tag: last[f"{tag}/_type"] for tag in kinds} == kinds
    assert last["train/spread/values"] == [2, 1]
    picture = Picture.open(next(kept.parent.rglob("*.png")))
    assert picture.size == (3, 2)
    assert picture.getpixel((0, 0)) == (0, 128, 255)


def test_csv_is_written_and_continued(tmp_path: Path) -> None:
    """A resumed run drops the lines of steps that it does again."""
    tracker = csv_tracker.CsvTracker(tmp_path / "metrics.csv", 0)
    for step in (1, 2, 3):
        tracker.log({"train/loss": step / 2, "of a, b": 0.1}, step)
    tracker.close()
    tracker = csv_tracker.CsvTracker(tmp_path / "metrics.csv", 2)
    tracker.log({"train/loss": 9.0}, 3)
    tracker.close()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["step", "name", "value"]
    assert lines == [
        ["1", "train/loss", "0.5"],
        ["1", "of a, b", "0.1"],
        ["2", "train/loss", "1.0"],
        ["2", "of a, b", "0.1"],
        ["3", "train/loss", "9.0"],
    ]


def show(context: dt.StepContext) -> None:
    dt.log("picture", dt.Image(torch.stack([torch.full((2, 3), value) for value in (0.0, 0.5, 2.0)])))
    dt.log("spread", dt.Histogram(torch.tensor([0.0, 0.0, 1.0, math.nan]), bins=2))
    dt.log("words", dt.Text("a < b"))
    dt.log("number", 1.5)


def test_pictures_histograms_and_texts(tmp_path: Path) -> None:
    """They are files of the run, and TensorBoard reads them; a tracker that takes none is told once."""
    pytest.importorskip("tensorboard")
    from PIL import Image as Picture
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"trackers": ["tensorboard", "csv"], "monitor_gpu": False, "report": False}
    job = make_job(name="suite", hooks=[dt.every(3, show)])
    train(job, configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=8, **settings), quiet=True)
    folder = tmp_path / "suite" / "media"
    assert Picture.open(folder / "picture-00000003.png").getpixel((2, 1)) == (0, 128, 255)
    assert json.loads((folder / "spread-00000006.json").read_text()) == {"counts": [2, 1], "edges": [0, 0.5, 1]}
    assert (folder / "words-00000003.txt").read_text() == "a < b"
    assert [row["number"] for row in rows(tmp_path, "metrics")] == [1.5, 1.5]
    events = EventAccumulator(str(tmp_path / "suite" / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert [image.step for image in events.Images("train/picture")] == [3, 6]
    assert events.Images("train/picture")[0].encoded_image_string == (folder / "picture-00000003.png").read_bytes()
    assert events.Histograms("train/spread")[0].histogram_value.num == 3
    assert events.Tensors("train/words/text_summary")[0].tensor_proto.string_val == [b"a < b"]
    notes = [row["text"] for row in rows(tmp_path, "events") if row["event"] == "note"]
    assert [text for text in notes if "takes no pictures" in text] == [
        "csv takes no pictures, histograms and texts; the run's folder has them"
    ]


def test_media_are_encoded_once_for_the_folder_and_all_trackers() -> None:
    image, histogram = dt.Image(torch.zeros(2, 2)), dt.Histogram(torch.zeros(3))
    assert image.as_png() is image.as_png()
    assert image.as_bytes() is image.as_bytes()
    assert histogram.counted() is histogram.counted()


def test_the_results_at_the_end_have_the_test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read from the run's file, whose last rows were not on the disk yet; and read once for all trackers."""
    found, reads = list[Mapping[str, float]](), []

    class Finishing(Recorder):
        def finish(self, metrics: Mapping[str, float]) -> None:
            found.append(metrics)

    plant(monkeypatch, Finishing)
    monkeypatch.setattr(recorder, "read_rows", lambda path: reads.append(path) or read_rows(path))
    job = make_job(name="suite", valid=make_data(16, seed=5), test=make_data(16, seed=6))
    settings = {"trackers": ["tensorboard", "csv"], "monitor_gpu": False, "report": False}
    result = train(job, configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=8, **settings), quiet=True)
    assert [metrics["test/loss"] for metrics in found] == [result.test["test_loss"]]
    assert len(reads) == 1


class LateTracker:
    """Looks at what it got only when it is told to."""

    release = threading.Event()
    seen: ClassVar[list[dict[str, Any]]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def media(self, name: str, value: Any, step: int) -> None:
        self.release.wait(60)
        is_image = isinstance(value, dt.Image)
        self.seen.append({name: value.as_bytes().flatten().tolist() if is_image else value.counted()[1]})

    def close(self) -> None:
        pass


LATE = f"{__name__}:prepare_late"


def prepare_late(start: TrackerStart) -> Callable[[], Tracker]:
    return LateTracker


@pytest.mark.parametrize("driven", [False, True], ids=["hook", "own loop"])
def test_what_was_logged_does_not_change_with_the_tensor(tmp_path: Path, driven: bool) -> None:
    """A tracker's thread reads it later, when the weights have changed; a hook may change it before it returns."""
    LateTracker.release.clear()
    LateTracker.seen.clear()
    scalar, total, pixels, values = torch.ones(()), torch.ones(()), torch.zeros(1, 2), torch.tensor([0.0, 4.0])

    def show(log: Callable[..., None]) -> None:
        log("scalar", scalar)
        log("mean", dt.LossSum(total, 2))
        log("picture", dt.Image(pixels))
        log("spread", dt.Histogram(values, bins=1))
        for tensor in (scalar, total, pixels, values):
            tensor.add_(1)

    config = configure(output_dir=tmp_path, gpu_mode="cpu", trackers=[LATE], monitor_gpu=False, report=False)
    if driven:
        model = torch.nn.Linear(1, 1)
        optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), list(torch.ones(8, 1))
        loop = drive(model, optimizer, data, name="suite", global_batch=8, epochs=1, config=config, quiet=True)
        for batch in loop:
            loop.backward(loop.model(batch).square().mean())
            loop.step()
            show(loop.log)
            LateTracker.release.set()
    else:
        then = dt.every(6, lambda context: LateTracker.release.set())
        train(make_job(name="suite", hooks=[dt.every(6, lambda context: show(dt.log)), then]), config, quiet=True)
    assert LateTracker.seen == [{"train/picture": [0, 0]}, {"train/spread": [0.0, 4.0]}]
    logged = {name: value for row in rows(tmp_path, "metrics") for name, value in row.items()}
    assert (logged["scalar"], logged["mean"]) == (1.0, 0.5)


@pytest.mark.parametrize("value", [dt.Text("a"), dt.Image(torch.zeros(3, 2, 2)), dt.Histogram(torch.zeros(3))])
def test_a_loss_logs_scalars_only(tmp_path: Path, value: Any) -> None:
    def loss(model: Any, batch: Any) -> Any:
        dt.log("media", value)
        return loss_of_means(model, batch)

    with pytest.raises(
        dt.DrivetrainError, match=f"got a {type(value).__name__} in a loss or metric, expected a scalar"
    ):
        train(make_job(name="suite", loss=loss), configure(output_dir=tmp_path, gpu_mode="cpu"), quiet=True)


def test_mlflow_has_curves_settings_and_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(BackgroundTracker, "PATIENCE_SECONDS", 240.0)
    settings = {"trackers": ["csv", "mlflow"], "log_every": 1, "monitor_gpu": False, "report": False}
    job = make_job(name="suite", valid=make_data(16, seed=5))
    train(job, configure(output_dir=tmp_path, gpu_mode="cpu", batch_size=8, **settings), quiet=True)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    kept = client.get_run((tmp_path / "suite" / "mlflow.id").read_text().strip())
    steps, measured = rows(tmp_path, "steps"), rows(tmp_path, "metrics")[-1]
    curve = client.get_metric_history(kept.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in curve] == [(row["step"], row["loss"]) for row in steps]
    assert kept.data.params["watch.log_every"] == "1"
    assert float(kept.data.tags["final.valid/loss"]) == pytest.approx(measured["valid_loss"], rel=1e-5)
    assert kept.info.status == "FINISHED"
    with (tmp_path / "suite" / "metrics.csv").open(newline="") as file:
        losses = [float(line[2]) for line in csv.reader(file) if line[1] == "train/loss"]
    assert losses == [row["loss"] for row in steps]


def wandb_history(path: Path) -> dict[str, Any]:
    """The last value of every curve in an offline file of wandb: a log in LevelDB's format, behind 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, raw, found = path.read_bytes(), 7, b"", {}
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if kind == 0 or place + 7 + length > len(data):
            break
        raw += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(raw)
            raw = b""
            found.update({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    return {name: json.loads(value) for name, value in found.items()}


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise ModuleNotFoundError("No module named 'wandb'")

    monkeypatch.setattr(tracking, "prepare_wandb", missing)
    told: list[str] = []
    assert start_trackers(("wandb",), TrackerStart(tmp_path, "name", {}, 0, told.append)) == []
    assert "pip install 'drivetrain[wandb]'" in told[0]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("in the way")
    told: list[str] = []
    (tracker,) = start_trackers(("tensorboard",), TrackerStart(tmp_path, "name", {}, 0, told.append))
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    assert len(told) == 1
    assert "tensorboard is dropped" in told[0]


@pytest.mark.parametrize(
    ("value", "meant"), [("tensorbord", "tensorboard"), ("tensorboard,wanbd", "wandb"), (["wand"], "wandb")]
)
def test_a_wrong_name_is_an_error_with_the_right_one(value: Any, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(trackers=value)
    (problem,) = caught.value.problems
    assert problem.remedy == f"did you mean `{meant}`?"
    assert "csv, mlflow, tensorboard, wandb" in problem.allowed


def test_the_right_names() -> None:
    assert configure(trackers="tensorboard,wandb").watch.trackers == ("tensorboard", "wandb")
    assert configure(trackers="wandb").watch.trackers == ("wandb",)
    assert configure().watch.trackers == ()


def documented() -> str:
    """The complete tracker of CONTRIBUTING.md."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("**A tracker.**")[2].partition("```python\n")[2].partition("```")[0]


def test_a_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of CONTRIBUTING.md, given by module and function."""
    (tmp_path / "own_tracker.py").write_text(documented())
    monkeypatch.syspath_prepend(tmp_path)
    trained = run(str(tmp_path), SMALL, settings={"trackers": ["own_tracker:prepare"], "log_every": 1})
    assert trained is not None
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.reader(file) if row[1] == "train/loss"]
    assert [(int(row[0]), float(row[2])) for row in rows] == [*enumerate(trained.losses, start=1)]


def test_a_function_stands_for_its_name() -> None:
    assert configure(trackers=[tracking.prepare_tensorboard, "wandb"]).watch.trackers == ("tensorboard", "wandb")
    assert configure(trackers=own_prepare).watch.trackers == (f"{__name__}:own_prepare",)
    with pytest.raises(ConfigError, match="no module has this tracker at its top level"):
        configure(trackers=lambda start: None)


def own_prepare(start: TrackerStart) -> Any:
    return None


@pytest.mark.parametrize("name", ["nowhere:prepare", f"{__name__}:own_prepair"])
def test_a_mistyped_one_stops_the_run_before_it_starts(tmp_path: Path, name: str) -> None:
    config = configure(trackers=name, output_dir=tmp_path, gpu_mode="cpu")
    with pytest.raises(DrivetrainError, match=f"the tracker {name} cannot be loaded"):
        train(make_plain_job(SMALL), config, quiet=True)
    model = torch.nn.Linear(6, 4)
    with pytest.raises(DrivetrainError, match=f"the tracker {name} cannot be loaded"):
        drive(model, torch.optim.SGD(model.parameters()), Vectors(SMALL), global_batch=8, max_steps=1, config=config)
    assert list(tmp_path.iterdir()) == []


def test_an_entry_point_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_entry_points", lambda group: {"theirs": "someones.module:prepare"})
    assert configure(trackers="theirs,wandb").watch.trackers == ("theirs", "wandb")


def test_files_of_names_that_files_cannot_have_stay_apart(tmp_path: Path) -> None:
    names = ["\u732b", "\u72ac", "x" * 300, "x" * 299 + "y", "a/b"]
    files = [keep_media(tmp_path, name, dt.Text(name), 1) for name in names]
    assert [path.read_text() for path in files] == names
    assert files[-1].name == "a_b-00000001.txt"
