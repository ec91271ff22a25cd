"""The hooks of docs/guide/hooks.md do what the page says; those that change something go on exactly after a crash."""

import http.server
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import drivetrain as dt
from drivetrain.api import training
from tests.api.test_resume import CrashingLoss, PlantedError

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "hooks.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Run the page's code in one folder, as somebody would type it."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
    names: dict[str, Any] = {"__name__": "hooks_page"}
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "write_report", lambda folder, **how: [])
        patch.setenv("DRIVETRAIN_GPU_MODE", "cpu")
        os.chdir(tmp_path_factory.mktemp("hooks"))
        try:
            Path("hooks_page.py").write_text(code, encoding="utf-8")  # where the source of its functions is found
            exec(compile(code, "hooks_page.py", "exec"), names)
            yield names
        finally:
            os.chdir(before)


def test_there_are_eight() -> None:
    assert len(re.findall(r"^### ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) == 8


def initial(page: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(page["copy"].deepcopy(page["body"]), torch.nn.Linear(32, 10)).state_dict()


def test_head_first(page: dict[str, Any]) -> None:
    """The body is as it was for twenty steps, and moves then; the head moves from the first step on."""
    seen: dict[int, torch.Tensor] = {}

    def remember(context: dt.StepContext) -> None:
        seen[context.step] = context.model.get_parameter("0.1.weight").detach().clone()

    page["train"]("head-first-watched", [page["HeadFirst"](), dt.every(10, remember)])
    start = initial(page)["0.1.weight"]
    assert [torch.equal(seen[step], start) for step in (10, 20, 30)] == [True, True, False]
    assert not torch.equal(page["head_first"].model.state_dict()["1.weight"], initial(page)["1.weight"])


def test_look(page: dict[str, Any]) -> None:
    media = [path.name for path in (page["looked"].folder / "media").rglob("*") if path.is_file()]
    assert len(media) >= 2 * 5, media  # four weights and an image, twice


def test_sample(page: dict[str, Any]) -> None:
    texts = [path.read_text() for path in (page["sampled"].folder / "media").rglob("*.txt")]
    assert texts
    assert all(re.search(r"saw \[\d(, \d){4}\], which were \[0, 1, 2, 3, 4\]", text) for text in texts)


def test_stopped(page: dict[str, Any]) -> None:
    result = page["stopped"]
    assert result.finished
    assert result.steps % 5 == 0
    assert result.steps < 400
    assert result.last.loss < 1.5


def test_taught(page: dict[str, Any]) -> None:
    """The teacher is the moving average of the students, computed here by a second look at each of them."""
    students: list[torch.Tensor] = []

    def remember(context: dt.StepContext) -> None:
        students.append(context.model.student[1].bias.detach().clone())

    hooks = [dt.every(1, page["follow"]), dt.every(1, remember)]
    result = page["train"]("taught-watched", hooks, model=page["WithTeacher"], loss=page["consistent"])
    torch.manual_seed(0)
    teacher = page["WithTeacher"]().teacher[1].bias
    for student in students:
        teacher = teacher.lerp(student, 0.05)
    torch.testing.assert_close(result.model.teacher[1].bias, teacher, rtol=0, atol=1e-6)
    assert len(students) == 40


def test_curriculum(page: dict[str, Any]) -> None:
    assert page["curriculum"].model.noise.item() == 0.5


def test_kept(page: dict[str, Any]) -> None:
    folder = page["kept"].folder
    assert sorted(path.name for path in folder.glob("weights-*.pt")) == ["weights-20.pt", "weights-40.pt"]
    last = torch.load(folder / "weights-40.pt")
    assert all(torch.equal(last[name], value) for name, value in page["kept"].model.state_dict().items())


def test_sent(page: dict[str, Any]) -> None:
    received: list[Any] = []

    class Chat(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        before = set(threading.enumerate())
        page["train"]("sent-here", [page["Send"](f"http://127.0.0.1:{server.server_port}/chat")])
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
    finally:
        server.shutdown()
        server.server_close()
    assert [re.fullmatch(r"sent-here: epoch 1 done, loss \d\.\d+", each["text"]) is not None for each in received] == [
        True
    ]


@pytest.mark.parametrize("name", ["head", "teacher", "curriculum"])
def test_a_crash_changes_nothing(page: dict[str, Any], name: str) -> None:
    def plain(model: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    hooks, changes = {
        "head": ([page["HeadFirst"]()], {"loss": plain}),
        "teacher": ([dt.every(1, page["follow"])], {"model": page["WithTeacher"], "loss": page["consistent"]}),
        "curriculum": ([dt.every(10, page["harder"])], {"model": page["Noisy"], "loss": plain}),
    }[name]
    changes["checkpoint_every"] = 7
    whole = page["train"](f"whole-{name}", hooks, **changes)
    crashing = {**changes, "loss": CrashingLoss(changes["loss"], 33)}
    with pytest.raises(PlantedError):
        page["train"](f"crashed-{name}", hooks, **crashing)
    again = page["train"](f"crashed-{name}", hooks, **changes)
    assert 0 < again.resumed_from < 40
    for key, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], value), key
