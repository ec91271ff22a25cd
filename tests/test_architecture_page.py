"""docs/how-it-works/architecture.md is true: its picture is current, and its reading lists lead from file to file."""

import re
import sys
from pathlib import Path

import pytest
import torch
from docs.layer_picture import PICTURE, picture

import drivetrain as dt
from drivetrain.checkpoint.files import Files
from tests.test_architecture import PACKAGE

PAGE = (Path(__file__).parents[1] / "docs" / "how-it-works" / "architecture.md").read_text(encoding="utf-8")
MOST = {"step": 11, "checkpoint": 8}  # files to read: 11 to the optimizer's step, 19 to the checkpoint on disk


def reading_list(name: str) -> list[tuple[str, list[str], str]]:
    """The rows of a table: file, names to look for, the file that they are reached from."""
    text = PAGE.partition(f"<!-- {name} -->")[2].partition("\n\n|")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "`" in line]
    found = []
    for cells in rows:
        file, words, *rest = [cell for cell in cells if cell]
        names = re.findall(r"`([\w.]+)(?:\(\))?`", words.partition(":")[0])
        found.append((file.strip("`"), names, rest[0].strip("`") if rest else ""))
    return found


def test_the_picture_is_current() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run: python -m docs.layer_picture"


@pytest.mark.parametrize("name", MOST)
def test_each_file_of_the_list_is_reached_from_the_one_it_names(name: str) -> None:
    rows = reading_list(name)
    assert 0 < len(rows) <= MOST[name]
    seen = [file for file, _, _ in reading_list("step")] if name == "checkpoint" else []
    for file, names, origin in rows:
        code = (PACKAGE / file).read_text(encoding="utf-8")
        assert names, file
        for each in names:
            assert re.search(rf"^\s*(def|class) {each.split('.')[-1]}\b", code, re.M), f"{file} has no {each}"
        if origin:
            assert origin in seen, f"{file}: {origin} is not read before it"
            called = (PACKAGE / origin).read_text(encoding="utf-8")
            words = {part for each in names for part in each.split(".")} | {Path(file).stem}
            assert any(re.search(rf"\b{word}\b", called) for word in words), f"{origin} does not mention {file}"
        seen.append(file)


EXPLAINS_KEYWORDS = "core/errors.py"  # what wraps `train`: it does nothing where all keywords are known


def on_the_stack() -> list[str]:
    """The package's files on the call stack, outermost first."""
    files, frame = [], sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and path != PACKAGE / EXPLAINS_KEYWORDS:
            files.append(path.relative_to(PACKAGE).as_posix())
        frame = frame.f_back  # type: ignore[assignment]
    return list(dict.fromkeys(reversed(files)))


def test_a_real_run_goes_through_the_files_of_the_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[str]] = []
    saves: list[list[str]] = []

    class WatchedSGD(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def, override]
            steps.append(on_the_stack())
            return super().step(closure)

    rename = Files.rename
    monkeypatch.setattr(Files, "rename", lambda *args: (saves.append(on_the_stack()), rename(*args))[1])
    monkeypatch.chdir(tmp_path)
    inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
    job = dt.Job(
        name="lists",
        model=lambda: torch.nn.Linear(1, 1),
        data=torch.utils.data.TensorDataset(inputs, 2 * inputs),
        loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
        optimizer=lambda parameters: WatchedSGD(parameters, lr=0.1),
        global_batch=16,
        epochs=2,
    )
    dt.train(job, quiet=True)
    first, second = ([file for file, _, _ in reading_list(name)] for name in ("step", "checkpoint"))
    assert steps[-1] == [file for file in first if file in steps[-1]]  # in the order of the list, and nothing else
    assert len(steps[-1]) == 5
    assert set(saves[-1]) <= {*first, *second}
    assert "checkpoint/checkpointer.py" in saves[-1]
