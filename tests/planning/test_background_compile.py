"""Training eagerly while another process compiles, and going over to the compiled code at a step on record."""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.core.errors import ConfigError
from drivetrain.core.metrics import StepRecord
from drivetrain.core.run_folder import read_switch, write_switch
from drivetrain.monitor.recorder import NoRunRecorder
from drivetrain.planning import fresh_process
from drivetrain.planning.fresh_process import ChildError, refuse_background
from drivetrain.strategies.compiling import num_graphs
from tests import warm_python


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.dropout(functional.gelu(self.first(inputs))))
        return hidden


def loss(model: Callable[..., Tensor], batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def job(after_step: Callable[[dt.StepContext], Any], **changes: Any) -> dt.Job:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator))
    made: dict[str, Any] = {
        "name": "net",
        "model": Net,
        "data": data,
        "loss": loss,
        "optimizer": lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        "global_batch": 8,
        "max_steps": 8,
        "hooks": [dt.every(1, after_step)],
    }
    return dt.Job(**(made | changes))


def settings(folder: Path, **others: Any) -> Any:
    return dt.configure(output_dir=folder, gpu_mode="cpu", report=False, auto_optimize=False, num_workers=0, **others)


class StopError(Exception):
    """Raised by a hook to end a run."""


def compiled_steps(folder: Path, stop: int = 0, **others: Any) -> tuple[list[int], dt.Result | None]:
    """Train, until an error after some step. Return the numbers of the steps in which something was compiled."""
    torch.compiler.reset()
    graphs, found = [num_graphs()], []

    def look(context: dt.StepContext) -> None:
        graphs.append(num_graphs())
        if graphs[-1] > graphs[-2]:
            found.append(context.step)
        if context.step == stop:
            raise StopError

    try:
        return found, dt.train(job(look), settings(folder, **others), quiet=True)
    except StopError:
        return found, None


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "net" / "steps.jsonl").read_text().splitlines()]


def recorded(folder: Path) -> dict[str, Any]:
    choices: dict[str, Any] = yaml.safe_load((folder / "net" / "plan.yaml").read_text())["choices"]
    return choices


def test_compiled_steps_follow_eager_ones_and_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.planning.planner.why_not_compiled", lambda device: "")  # it compiles a function
    _, eager = compiled_steps(tmp_path / "eager", compile=False)
    steps, result = compiled_steps(tmp_path / "later", compile=True, compile_from=3)
    assert eager is not None
    assert result is not None
    assert steps == [4]
    expected, found = losses(tmp_path / "eager"), losses(tmp_path / "later")
    assert found[:3] == expected[:3]  # to the bit
    assert found == pytest.approx(expected, rel=1e-5)  # dropout draws the same numbers; others are 1e-2 away
    assert recorded(tmp_path / "later")["compile.from_step"]["value"] == 3
    assert result.compilation.endswith("graphs in mode default")


@pytest.mark.parametrize(("stop", "resumed"), [(3, [5]), (7, [7])], ids=["before", "after"])
def test_a_resumed_run_goes_over_at_the_same_step(
    stop: int, resumed: list[int], tmp_path: Path, no_kernels: None
) -> None:
    first, _ = compiled_steps(tmp_path, stop, compile=True, compile_from=4, checkpoint_every=2)
    assert first == ([5] if stop > 4 else [])
    again, result = compiled_steps(tmp_path)  # by the checkpoint's plan, without any flag
    assert result is not None
    assert result.resumed_from == stop // 2 * 2
    assert again == resumed


class Other:
    """Stands in for the other process, and gives one answer over and over."""

    pid = 0
    answer: dict[str, Any] | None = None  # it takes long
    problem = ""

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def tell(self, message: Any) -> None:
        assert message["bits"]["compile_mode"] == "default"

    def poll(self) -> dict[str, Any] | None:
        if self.problem:
            raise ChildError(self.problem)
        return self.answer

    def close(self) -> None:
        pass


@pytest.fixture
def other(no_kernels: None, monkeypatch: pytest.MonkeyPatch) -> type[Other]:
    """A process that never answers, unless the test gives it an answer or a problem."""
    kind = type("Other", (Other,), {})
    monkeypatch.setattr(fresh_process, "target_to_rerun", lambda: "script.py")
    monkeypatch.setattr(fresh_process, "Child", kind)
    monkeypatch.setattr("os.setpriority", lambda *_: None)
    return kind


def test_a_switch_after_the_last_checkpoint_is_found_in_the_run_folder(tmp_path: Path, other: type[Other]) -> None:
    assert compiled_steps(tmp_path, 3, compile=True, compile_from="ready", checkpoint_every=2)[0] == []
    write_switch(tmp_path / "net", 4)
    again, result = compiled_steps(tmp_path)  # by the plan of its checkpoint, without any flag
    assert result is not None
    assert (result.resumed_from, again) == (2, [5])


def test_a_run_that_waits_goes_on_waiting_when_resumed(tmp_path: Path, other: type[Other]) -> None:
    compiled_steps(tmp_path, 3, compile=True, compile_from="ready", checkpoint_every=2)
    other.answer = {"bits": {}}
    again, result = compiled_steps(tmp_path)
    assert result is not None
    assert (again, read_switch(result.folder)) == ([3], 2)
    assert recorded(tmp_path)["compile.from_step"]["value"] == 2


def test_steps_stay_eager_where_compiling_fails(
    tmp_path: Path, other: type[Other], capsys: pytest.CaptureFixture[str]
) -> None:
    other.problem = "no such module"
    before = num_graphs()
    config = settings(tmp_path, compile=True, compile_from="ready")
    result = dt.train(job(lambda context: None), config)
    assert num_graphs() == before
    assert "failed in the background, and steps stay eager: no such module" in capsys.readouterr().out
    assert result.compilation == "in the background: it was not done before the run ended"
    assert read_switch(result.folder) is None
    assert recorded(tmp_path)["compile.from_step"]["value"] == "ready"


def test_compiling_comes_first_where_no_other_process_can_make_the_job(
    tmp_path: Path, no_kernels: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fresh_process, "target_to_rerun", lambda: "")
    torch.compiler.reset()
    before = num_graphs()
    dt.train(job(lambda context: None, max_steps=2), settings(tmp_path, compile=True, compile_from="ready"))
    assert num_graphs() > before
    assert "--compile-from ready is not obeyed, compiling comes before training" in "".join(capfd.readouterr())
    assert recorded(tmp_path)["compile.from_step"]["value"] == 0


@pytest.mark.parametrize(
    ("target", "answer", "problem", "words"),
    [
        ("script.py", {"bits": {}}, "", ["done in the background: steps are compiled from step 3 on"]),
        ("script.py", None, "", ["done by this process (the other one is not ready): steps are compiled from step 3"]),
        (
            "script.py",
            None,
            "no such module",
            [
                "failed in the background, and this process compiles: no such module",
                "done by this process (the other one failed): steps are compiled from step 3 on",
            ],
        ),
        ("", None, "", ["done by this process (no other process can make this job, since it is not the first of a"]),
    ],
    ids=["done", "not ready", "failed", "no other process"],
)
def test_the_line_says_which_process_compiled(
    target: str,
    answer: Any,
    problem: str,
    words: list[str],
    tmp_path: Path,
    other: type[Other],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fresh_process, "target_to_rerun", lambda: target)
    other.answer, other.problem = answer, problem
    torch.compiler.reset()
    before = num_graphs()
    dt.train(job(lambda context: None, max_steps=4), settings(tmp_path, compile=True, compile_from=2))
    assert num_graphs() > before
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  compiling")]
    assert len(told) == len(words)
    assert all(expected in line for expected, line in zip(words, told, strict=True))


# A script that trains slowly until the compiled code is ready, and is killed where that is asked for.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import drivetrain as dt
from drivetrain.core.run_folder import read_switch
from drivetrain.planning import fresh_process
from tests.planning.test_background_compile import job, settings

fresh_process.NICENESS = 0  # the machine may be busy with other tests
folder, kill_at, last, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

def after_step(context):
    over = read_switch(folder / "net")
    if kill_at and context.step == kill_at or kill_at < 0 and over is not None and context.step == over + 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if kill_at < 0 and over is None:
        time.sleep(0.6)

others = {} if kill_at > 0 else {"compile": True, "compile_from": "ready"}
dt.train(job(after_step, max_steps=last), settings(folder, checkpoint_every=every, **others))
"""
LAST = 500  # of which most may be slow, on a busy machine


def test_killed_after_the_switch_it_comes_to_the_same_bits(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "runs"
    script.write_text(SCRIPT)

    def start(kill_at: int, every: int) -> str:
        done = warm_python.run([str(script), str(folder), str(kill_at), str(LAST), str(every)])
        assert done.returncode == (-9 if kill_at else 0), done.stderr
        return done.stdout

    start(5, 4)  # eager: there is a checkpoint of step 4
    assert "compiled from step" in start(-1, 100_000)
    over = read_switch(folder / "net")
    assert over is not None
    assert 4 < over < LAST
    start(0, 100_000)
    assert recorded(folder)["compile.from_step"]["value"] == over
    whole = job(lambda context: None, max_steps=LAST, name="net")
    dt.train(whole, settings(tmp_path / "reference", compile=True, compile_from=over), quiet=True)
    assert losses(folder) == losses(tmp_path / "reference")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world": SimpleNamespace(size=2)}, "2 processes train this job"),
        ({"shards": True}, "the model is sharded"),
        ({"devices": [0, 1]}, "2 GPUs share a step"),
    ],
    ids=["processes", "sharded", "gpus"],
)
def test_it_is_refused_where_it_cannot_be_done(changes: dict[str, Any], words: str) -> None:
    plain = {"way": SimpleNamespace(compiled_from=None), "world": SimpleNamespace(size=1), "shards": False}
    run: Any = SimpleNamespace(**{**plain, "devices": [0], **changes})
    with pytest.raises(ConfigError, match=words):
        refuse_background(run)


def test_a_loop_of_ones_own_is_refused(tmp_path: Path) -> None:
    model = Net()
    config = settings(tmp_path, compile=True, compile_from="ready")
    data = TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,)))
    with pytest.raises(ConfigError, match="another process cannot make your own loop again"):
        dt.drive(model, torch.optim.SGD(model.parameters(), lr=0.1), data, config=config, global_batch=8, epochs=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compile_from": "ready"}, "compiling is not asked for"),
        ({"compile": False, "compile_from": 5}, "compiling is off"),
        ({"compile": True, "compile_from": "ready", "capture": "on"}, "are not captured"),
        ({"compile": True, "compile_from": "soon"}, "soon"),
        ({"compile": True, "compile_from": -1}, "-1"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dt.configure(**settings)


@pytest.mark.parametrize(("seconds", "words"), [(0.5, "2.00 times"), (1.25, "0.80 times as fast as before: without")])
def test_it_tells_once_how_much_faster_steps_became(seconds: float, words: str) -> None:
    lines: list[str] = []
    switch = fresh_process.CompileSwitch.__new__(fresh_process.CompileSwitch)
    switch.is_eager, switch._eager_seconds, switch._compiled_seconds = True, deque(maxlen=20), []
    switch._recorder, switch._went_over_after = RecordingLines(lines), None
    for step in range(1, 80):
        if step == 30:
            switch.is_eager, switch._went_over_after = False, 29
        took = 1.0 if step < 30 else 9.0 if step < 33 else seconds  # the first compiled steps take long
        switch.observe(StepRecord(step, 0, 8, 0.0, 8.0, 0.1, None, took))
    assert len(lines) == 1
    assert words in lines[0]


class RecordingLines(NoRunRecorder):
    def __init__(self, lines: list[str]) -> None:
        self.say = lines.append  # type: ignore[method-assign]
