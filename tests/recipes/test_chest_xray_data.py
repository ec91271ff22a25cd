"""The layout of MIMIC-CXR-JPG: what is read, what is counted, what is refused; the generator writes exactly that."""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.core.errors import ConfigError, InputError
from drivetrain.recipes import chest_xray_data as data
from drivetrain.recipes import generated_xrays as generator


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mimic")
    generator.generate(root, 120, 40, seed=3)
    return root


def entry(**changes: Any) -> dict[str, Any]:
    right = {"subject_id": 10000032, "study_id": 50414267, "question_type": "D02_has_finding"}
    return {**right, "question": "Is there edema?", "answer": "yes", "grade": "A", **changes}


def small_set(root: Path, questions: Any, rows: list[dict[str, str]] | None = None) -> Path:
    """Two patients with one study each, the first with two images."""
    for study, names in {"p10/p10000032/s50414267": ("b", "a"), "p11/p11000001/s51000001": ("c",)}.items():
        for name in names:
            path = root / "files" / study / f"{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), ord(name), np.uint8)).save(path, quality=100)
    with (root / data.CHEXPERT).open("w", newline="") as file:
        writer = csv.DictWriter(file, ("subject_id", "study_id", *data.FINDINGS))
        writer.writeheader()
        writer.writerows(
            rows or [{"subject_id": "10000032", "study_id": "50414267", "Edema": "1.0", "Fracture": "-1.0"}]
        )
    (root / data.QUESTIONS).write_text(json.dumps(questions))
    return root


def test_the_generator_writes_the_layout(written: Path) -> None:
    images = [path.relative_to(written).as_posix() for path in written.rglob("*.jpg")]
    assert images
    name = re.compile(r"files/p(\d\d)/p(\1\d{6})/s\d{8}/[0-9a-f]{8}(-[0-9a-f]{8}){4}\.jpg")
    assert all(map(name.fullmatch, images))
    with (written / "mimic-cxr-2.0.0-chexpert.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["subject_id", "study_id", *data.FINDINGS]
    assert len(data.FINDINGS) == 14
    assert {value for row in rows for value in row[2:]} == {"1.0", "0.0", "-1.0", ""}
    assert set(json.loads((written / "questions.json").read_text())[0]) == set(entry())


def test_generated_questions_are_read_and_what_is_left_out_is_counted(written: Path) -> None:
    found = data.read_questions(written)
    entries = json.loads((written / "questions.json").read_text())
    studies = {f"p{str(each['subject_id'])[:2]}/p{each['subject_id']}/s{each['study_id']}" for each in entries}
    absent = {study for study in studies if not (written / "files" / study).exists()}
    others = [each for each in entries if each["question_type"].startswith("D05")]
    assert found.counts["studies_without_image"] == len(absent) > 0
    assert found.counts["questions_of_unseen_types"] == len(others) > 0
    text = (written / data.CHEXPERT).read_text()
    assert found.counts["uncertain_labels"] == text.count("-1.0") > 0
    assert len(found.train) + len(found.valid) + found.counts["questions_without_image"] + len(others) == len(entries)
    assert f"data: {len(absent)} studies have no image" in found.lines[0]
    assert f"{len(others)} questions of types that no head answers are left out: D05_view" in found.lines[2]
    assert len(found.lines) == 3
    # No patient is on both sides, and what is held out has the better grades.
    sides = [{each.image.parts[-3] for each in side} for side in (found.train, found.valid)]
    assert sides[0].isdisjoint(sides[1])
    assert {each.grade for each in found.valid} == {"A", "B"}
    assert {each.grade for each in found.train} == {"A", "B", "C", "D"}
    assert {each.head for each in found.valid} == {0, 1, 2, 3}


def test_images_labels_and_answers_belong_together(tmp_path: Path) -> None:
    other = entry(subject_id=11000001, study_id=51000001, question_type="region", answer="Left Lung", grade=None)
    root = small_set(tmp_path, [entry(), other, entry(question_type="D04_x", answer="severe")])
    (root / data.SPLIT).write_text(
        "dicom_id,study_id,subject_id,split\na,50414267,10000032,train\nc,51000001,11000001,validate\n"
    )
    found = data.read_questions(root)
    (first, last), (held_out,) = found.train, found.valid
    assert first.image.name == "a.jpg"  # the first by name
    assert [data.FINDINGS[place] for place, value in enumerate(first.labels) if value == 1] == ["Edema"]
    assert set(first.labels) == {1, data.UNKNOWN_LABEL}
    assert (first.head, first.answer, last.head, last.answer) == (0, 1, 3, 3)
    assert data.REGIONS[held_out.answer] == "left lung"
    assert held_out.labels == (data.UNKNOWN_LABEL,) * 14
    assert found.counts["studies_without_labels"] == 1
    assert found.counts["uncertain_labels"] == 1
    assert found.counts["missing_labels"] == 12

    (root / data.METADATA).write_text("dicom_id,ViewPosition\na,LATERAL\nb,PA\n")
    assert data.read_questions(root).train[0].image.name == "b.jpg"

    samples = data.XrayDataset([first, last, held_out], torch.zeros(3, 2, dtype=torch.long), 4, once=True)
    assert samples[0]["image"].shape == (1, 4, 4)
    assert samples[2]["image"].float().mean() == pytest.approx(ord("c"), abs=2)
    assert samples[0]["target"][2:].max() == 1
    assert samples[1]["target"].tolist() == [3, 3, *[-1] * 14]  # the same image again


def test_images_that_do_not_fit_in_memory_are_decoded_when_needed(tmp_path: Path, monkeypatch) -> None:
    questions = data.read_questions(small_set(tmp_path, [entry()])).train
    words = torch.zeros(1, 2, dtype=torch.long)
    kept = data.XrayDataset(questions, words, 4)
    monkeypatch.setattr(data, "MOST_BYTES", 1)
    later = data.XrayDataset(questions, words, 4)
    assert later.images is None
    torch.testing.assert_close(later[0], kept[0])
    questions[0].image.write_bytes(b"torn")
    with pytest.raises(InputError, match="it is not an image of a known format"):
        later[0]


def test_ceilings_are_those_of_the_generator(tmp_path: Path, monkeypatch) -> None:
    """By counting, over many questions whose right answers are known from a set without noise."""
    monkeypatch.setattr(generator, "_write", lambda path, pixels: path.parent.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(generator, "_image", lambda *given: None)
    monkeypatch.setattr(generator, "_background", lambda *given: None)
    asked: list[tuple[str, str]] = []
    right: list[tuple[dict[str, str], dict[str, int], str, str]] = []
    really = generator._questions

    def questions(shown: dict[str, str], severity: dict[str, int], draw: Any) -> list[tuple[str, str, str]]:
        found = really(shown, severity, draw)
        right.extend((shown, severity, kind, answer) for kind, _, answer in found)
        return found

    monkeypatch.setattr(generator, "_questions", questions)
    generator.generate(tmp_path, 0, 3000)
    asked = [(each["question_type"], each["answer"]) for each in json.loads((tmp_path / data.QUESTIONS).read_text())]
    correct: dict[str, list[bool]] = {head: [] for head in data.HEADS}
    blind: dict[str, list[bool]] = {head: [] for head in data.HEADS}
    answers: dict[str, Counter[str]] = {head: Counter() for head in data.HEADS}
    for (shown, severity, kind, truth), (_, said) in zip(right, asked, strict=True):
        head = data.head_of(kind)
        if head is None:
            continue
        correct[head].append(said == truth)
        answers[head][said] += 1
        finding = next(iter(shown))
        levels = data.HEADS["severity"][severity[finding]]
        guess = {"binary": "yes", "category": finding, "region": shown[finding], "severity": levels}[head]
        blind[head].append(said == guess)  # the image is seen, and not what is asked
    for head in data.HEADS:
        assert np.mean(correct[head]) == pytest.approx(generator.ceilings()[head], abs=0.01)
        assert np.mean(blind[head]) == pytest.approx(generator.blind_ceilings("question")[head], abs=0.03)
        most = max(answers[head].values()) / answers[head].total()
        assert most == pytest.approx(generator.blind_ceilings("image")[head], abs=0.03)
    with (tmp_path / data.CHEXPERT).open() as file:
        rows = list(csv.DictReader(file))
    truths = dict.fromkeys(data.FINDINGS, 0.0)
    for finding in generator.SHOWN:
        shown_in = [finding in shown for shown, _, kind, _ in right if kind.startswith("D01")][::2]
        scores: dict[str, list[bool]] = {"1.0": [], "0.0": []}
        for row, score in zip(rows, shown_in, strict=True):
            scores.get(row[finding], []).append(score)
        ones, zeros = np.array(scores["1.0"], float), np.array(scores["0.0"], float)
        truths[finding] = float(((ones[:, None] > zeros) + 0.5 * (ones[:, None] == zeros)).mean())
    measured = np.mean([truths[finding] for finding in generator.SHOWN])
    assert measured == pytest.approx(generator.ceilings()["chexpert"], abs=0.01)


def _other_folder(root: Path) -> None:
    for number in range(12):
        (root / "files" / f"class{number:02}").mkdir(parents=True)


def _nothing(root: Path) -> None:
    (root / "photos").mkdir()


@pytest.mark.parametrize(
    ("make", "count", "words"),
    [
        (_nothing, 3, "files: there is no such folder; "),
        (_other_folder, 15, "class00: it is no folder of patients, such as p10"),
    ],
)
def test_a_folder_that_is_something_else_is_refused(
    tmp_path: Path, make: Callable[[Path], None], count: int, words: str
) -> None:
    make(tmp_path)
    with pytest.raises(InputError) as error:
        data.read_questions(tmp_path)
    assert f"{count} problems with the input" in str(error.value)
    assert words in str(error.value)
    assert "the folder of MIMIC-CXR-JPG that holds files/" in str(error.value)
    with pytest.raises(ConfigError, match="is no folder"):
        data.read_questions(tmp_path / "none")


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        ([entry(answer="maybe")], "question 1: the answer 'maybe' is none of those of binary: no, yes"),
        ([entry(), entry(question=" ")], "question 2: 'question' is ' ', and a text is needed"),
        ([entry(grade="E")], "question 1: the grade 'E' is none of A, B, C, D"),
        ([entry(study_id="s5")], "are not numbers of eight digits"),
        ([{"study_id": 50414267}], "question 1 has no 'subject_id', 'question_type', 'question', 'answer'"),
        ([3], "question 1 is a JSON int"),
        ({}, "it holds a JSON dict, and a list of questions is needed"),
        ([entry(question_type="D09_x")], "none of its 1 questions can be trained on"),
    ],
)
def test_bad_questions(tmp_path: Path, questions: Any, words: str) -> None:
    with pytest.raises(InputError) as error:
        data.read_questions(small_set(tmp_path, questions))
    assert words in str(error.value)


def test_bad_labels_json_and_images(tmp_path: Path) -> None:
    rows = [{"subject_id": "10000032", "study_id": "50414267", "Edema": "2"}, {"subject_id": "x", "study_id": "1"}]
    root = small_set(tmp_path, [entry()], rows)
    with pytest.raises(InputError) as error:
        data.read_questions(root)
    assert f"{root / data.CHEXPERT} line 2: Edema is '2'; a label is 1, 0, -1 or nothing" in str(error.value)
    assert "line 3: subject_id 'x'" in str(error.value)

    root = small_set(tmp_path, [entry()])
    (root / data.SPLIT).write_text("dicom_id,study_id,subject_id,split\na,50414267,10000032,dev\n")
    with pytest.raises(InputError, match="line 2: the split 'dev' is none of train, validate, test"):
        data.read_questions(root)
    (root / data.SPLIT).unlink()
    questions = data.read_questions(root).train
    questions[0].image.write_bytes(questions[0].image.read_bytes()[:100])
    with pytest.raises(InputError, match=r"a\.jpg: it"):
        data.XrayDataset(questions, torch.zeros(1, 2, dtype=torch.long), 4)
    (root / data.QUESTIONS).write_text("[\n{,\n")
    with pytest.raises(InputError, match=r"questions\.json line 2: it is not JSON"):
        data.read_questions(root)
    (root / data.CHEXPERT).rename(root / f"{data.CHEXPERT}.gz")
    with pytest.raises(InputError, match="unpack it: gunzip"):
        data.read_questions(root)
