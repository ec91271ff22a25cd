"""Reads chest X-rays in the layout of MIMIC-CXR-JPG, with their CheXpert labels and questions about them.

```
files/p10/p10000032/s50414267/<dicom>.jpg
mimic-cxr-2.0.0-chexpert.csv     subject_id, study_id, 14 labels: 1, 0, -1 (uncertain) or nothing
mimic-cxr-2.0.0-split.csv        optional: dicom_id, study_id, subject_id, split
mimic-cxr-2.0.0-metadata.csv     optional: dicom_id, ViewPosition
questions.json                   a list: subject_id, study_id, question_type, question, answer, grade
```
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import Dataset

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.files import BadInput, read_image, read_table

FILES = "files"
CHEXPERT, SPLIT, METADATA = (f"mimic-cxr-2.0.0-{name}.csv" for name in ("chexpert", "split", "metadata"))
QUESTIONS = "questions.json"
FINDINGS = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Enlarged Cardiomediastinum", "Fracture", "Lung Lesion",
    "Lung Opacity", "No Finding", "Pleural Effusion", "Pleural Other", "Pneumonia", "Pneumothorax", "Support Devices",
)  # fmt: skip
_ON_EACH_SIDE = (
    "lung", "apical zone", "upper lung zone", "mid lung zone", "lower lung zone", "hilar structures",
    "costophrenic angle", "hemidiaphragm", "clavicle",
)  # fmt: skip
REGIONS = (
    *(f"{side} {region}" for side in ("right", "left") for region in _ON_EACH_SIDE),
    "trachea", "spine", "aortic arch", "mediastinum", "superior vena cava", "cardiac silhouette", "carina", "abdomen",
)  # fmt: skip
# The answers that each head chooses from, and the question types that it answers.
HEADS: Mapping[str, Sequence[str]] = {
    "binary": ("no", "yes"),
    "category": FINDINGS,
    "region": REGIONS,
    "severity": ("none", "mild", "moderate", "severe"),
}
TYPES = {"D01": "category", "D02": "binary", "D03": "region", "D04": "severity", **{head: head for head in HEADS}}
GRADES = ("A", "B", "C", "D")
BEST_GRADES = ("A", "B", "")  # nothing: not graded
UNKNOWN_LABEL = -1
_LABELS = {"": UNKNOWN_LABEL, "-1": UNKNOWN_LABEL, "-1.0": UNKNOWN_LABEL, "0": 0, "0.0": 0, "1": 1, "1.0": 1}
_GROUP = re.compile(r"p\d\d")
_KEYS = ("subject_id", "study_id", "question_type", "question", "answer")
_VIEWS = ("PA", "AP")  # frontal ones, the better first
MOST_BYTES = 2 * 2**30  # of decoded images that are kept in memory


@dataclass(frozen=True)
class Question:
    """A question about one image, with its answer."""

    image: Path
    text: str
    head: int  # place in HEADS
    answer: int  # place among the head's answers
    grade: str
    labels: tuple[int, ...]  # by FINDINGS: 1, 0, or UNKNOWN_LABEL


@dataclass(frozen=True)
class XraySet:
    """The questions of a folder, and what had to be left out of it."""

    train: list[Question]
    valid: list[Question]
    lines: list[str]  # for the terminal
    counts: dict[str, int]  # for the record


def head_of(question_type: str) -> str | None:
    """Returns the head that answers a type: `D02_has_finding` is binary; None if no head does."""
    return TYPES.get(question_type.split("_")[0])


def read_questions(root: Path) -> XraySet:
    """Reads a folder in the layout of MIMIC-CXR-JPG. One that is something else is an error that lists what is wrong.

    Patients are either trained on or held out: by the split file (`validate`; `test` is left alone), else a tenth of
    them. Missing images, uncertain labels and question types that no head answers are left out and counted.
    """
    bad = BadInput()
    if not root.is_dir():
        raise ConfigError([Problem("--data", f"{root} is no folder", str(root), remedy="give the folder above files/")])
    _check_layout(root, bad)
    remedy = "--data takes the folder of MIMIC-CXR-JPG that holds files/: docs/guide/recipes/chest-xray-vqa.md"
    bad.raise_if_any(remedy)
    entries = _entries(root / QUESTIONS, bad)
    labels, num_uncertain, num_missing = _labels(root / CHEXPERT, bad)
    splits, views = _splits(root / SPLIT, bad), _views(root / METADATA, bad)
    images: dict[str, Path | None] = {}
    sides: dict[str, list[Question]] = {"train": [], "validate": [], "test": []}
    types: Counter[str] = Counter()
    no_image: Counter[str] = Counter()
    for number, entry in enumerate(entries, start=1):
        study = _study_of(entry, number, root / QUESTIONS, bad)
        if study is None:
            continue
        head = head_of(entry["question_type"])
        if head is None:
            types[entry["question_type"]] += 1
            continue
        answer = _answer_of(entry, head, number, root / QUESTIONS, bad)
        if study not in images:
            images[study] = _image_of(root / FILES / study, views)
        image = images[study]
        if image is None:
            no_image[study] += 1
        elif answer is not None:
            known = labels.get(study, (UNKNOWN_LABEL,) * len(FINDINGS))
            text, grade = entry["question"], entry.get("grade") or ""
            side = splits.get(study) or _side_of(study)
            sides[side].append(Question(image, text, list(HEADS).index(head), answer, grade, known))
    if not bad.count and not sides["train"]:
        bad.add(root / QUESTIONS, f"none of its {len(entries):,} questions can be trained on")
    bad.raise_if_any("correct these entries, or remove them; docs/guide/recipes/chest-xray-vqa.md shows what is read")
    without_labels = sum(study not in labels for study, image in images.items() if image)
    lines = _in_words(types, no_image, num_uncertain, num_missing, without_labels, len(sides["test"]))
    counts = {
        "studies_without_image": len(no_image),
        "questions_without_image": no_image.total(),
        "questions_of_unseen_types": types.total(),
        "uncertain_labels": num_uncertain,
        "missing_labels": num_missing,
        "studies_without_labels": without_labels,
        "test_questions": len(sides["test"]),
    }
    return XraySet(sides["train"], sides["validate"], lines, counts)


def _in_words(
    types: Counter[str], no_image: Counter[str], uncertain: int, missing: int, without_labels: int, test: int
) -> list[str]:
    lines = []
    if no_image:
        said = f"{len(no_image):,} studies have no image"
        lines.append(f"data: {said}; their {no_image.total():,} questions are left out")
    if uncertain or missing:
        lines.append(f"data: {uncertain:,} uncertain and {missing:,} missing CheXpert labels are masked")
    if without_labels:
        lines.append(f"data: {without_labels:,} studies have no row of CheXpert labels; all of theirs are masked")
    if types:
        named = ", ".join(f"{name} ({count:,})" for name, count in types.most_common(5))
        more = f" and {len(types) - 5} more types" if len(types) > 5 else ""
        lines.append(f"data: {types.total():,} questions of types that no head answers are left out: {named}{more}")
    if test:
        lines.append(f"data: {test:,} questions of the test split are left alone")
    return lines


def _check_layout(root: Path, bad: BadInput) -> None:
    for name in (CHEXPERT, QUESTIONS):
        if not (root / name).is_file():
            packed = (root / f"{name}.gz").is_file()
            bad.add(root / name, "there is no such file" + (f"; unpack it: gunzip {name}.gz" if packed else ""))
    if not (root / FILES).is_dir():
        names = sorted(path.name for path in root.iterdir())
        bad.add(root / FILES, f"there is no such folder; {root} holds {', '.join(names[:5]) or 'nothing'}")
        return
    folders = sorted(path for path in (root / FILES).iterdir() if path.is_dir())
    if not any(_GROUP.fullmatch(path.name) for path in folders):
        bad.add(root / FILES, "it has no folder of patients, such as p10")
    for path in folders:
        if not _GROUP.fullmatch(path.name):
            bad.add(path, "it is no folder of patients, such as p10")


def _entries(path: Path, bad: BadInput) -> list[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        bad.add(path, f"it is not JSON: {error.msg}", line=error.lineno)
    except (ValueError, RecursionError) as error:  # such as bytes that are not UTF-8
        bad.add(path, f"it is not JSON: {error}")
    else:
        if isinstance(found, list):
            return found
        bad.add(path, f"it holds a JSON {type(found).__name__}, and a list of questions is needed")
    return []


def _study_of(entry: Any, number: int, path: Path, bad: BadInput) -> str | None:
    """Returns the folder of the question's study below files/."""
    if not isinstance(entry, dict):
        bad.add(path, f"question {number} is a JSON {type(entry).__name__}, and an object is needed")
        return None
    missing = [key for key in _KEYS if entry.get(key) is None]
    if missing:
        bad.add(path, f"question {number} has no {', '.join(map(repr, missing))}; its keys are {', '.join(entry)}")
        return None
    wrong = [key for key in _KEYS[2:] if not isinstance(entry[key], str) or not entry[key].strip()]
    if wrong:
        bad.add(path, f"question {number}: {wrong[0]!r} is {entry[wrong[0]]!r}, and a text is needed")
        return None
    if (entry.get("grade") or "") not in ("", *GRADES):
        bad.add(path, f"question {number}: the grade {entry['grade']!r} is none of {', '.join(GRADES)}")
        return None
    study = study_folder(entry["subject_id"], entry["study_id"])
    if study is None:
        ids = f"subject_id {entry['subject_id']!r}, study_id {entry['study_id']!r}"
        bad.add(path, f"question {number}: {ids} are not numbers of eight digits")
    return study


def study_folder(subject: object, study: object) -> str | None:
    """Returns `p10/p10000032/s50414267` of 10000032 and 50414267; None if these are no such numbers."""
    if not (re.fullmatch(r"\d{8}", str(subject)) and re.fullmatch(r"\d{8}", str(study))):
        return None
    return f"p{str(subject)[:2]}/p{subject}/s{study}"


def _answer_of(entry: Mapping[str, Any], head: str, number: int, path: Path, bad: BadInput) -> int | None:
    answers = [answer.lower() for answer in HEADS[head]]
    said = entry["answer"].strip().lower()
    if said in answers:
        return answers.index(said)
    allowed = ", ".join(HEADS[head][:4]) + (f", … ({len(answers)} in all)" if len(answers) > 4 else "")
    bad.add(path, f"question {number}: the answer {entry['answer']!r} is none of those of {head}: {allowed}")
    return None


def _labels(path: Path, bad: BadInput) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Returns the labels of each study, and how many are uncertain and missing."""
    found = {}
    seen: Counter[str] = Counter()
    for row in read_table(path, ("subject_id", "study_id", *FINDINGS), bad):
        study = study_folder(row["subject_id"], row["study_id"])
        values = [row[name].strip() for name in FINDINGS]
        wrong = [name for name, value in zip(FINDINGS, values, strict=True) if value not in _LABELS]
        if study is None:
            ids = f"subject_id {row['subject_id']!r}, study_id {row['study_id']!r}"
            bad.add(path, f"{ids} are not numbers of eight digits", line=row.line)
        elif wrong:
            bad.add(path, f"{wrong[0]} is {row[wrong[0]]!r}; a label is 1, 0, -1 or nothing", line=row.line)
        else:
            found[study] = tuple(_LABELS[value] for value in values)
            seen.update("missing" if value == "" else "uncertain" for value in values if _LABELS[value] < 0)
    return found, seen["uncertain"], seen["missing"]


def _splits(path: Path, bad: BadInput) -> dict[str, str]:
    if not path.is_file():
        return {}
    found = {}
    for row in read_table(path, ("subject_id", "study_id", "split"), bad):
        study = study_folder(row["subject_id"], row["study_id"])
        if study is None or row["split"] not in ("train", "validate", "test"):
            bad.add(path, f"the split {row['split']!r} is none of train, validate, test", line=row.line)
        else:
            found[study] = row["split"]
    return found


def _side_of(study: str) -> str:
    """Holds out a tenth of the patients, by the hash of their number."""
    return "validate" if crc32(study.split("/")[1].encode()) % 10 == 0 else "train"


def _views(path: Path, bad: BadInput) -> dict[str, str]:
    if not path.is_file():
        return {}
    return {row["dicom_id"]: row["ViewPosition"] for row in read_table(path, ("dicom_id", "ViewPosition"), bad)}


def _image_of(folder: Path, views: Mapping[str, str]) -> Path | None:
    """Returns the study's best view: PA, AP, else the first by name."""
    if not folder.is_dir():
        return None
    rank = {view: number for number, view in enumerate(_VIEWS)}
    return min(folder.glob("*.jpg"), key=lambda path: (rank.get(views.get(path.stem, ""), 2), path.name), default=None)


class XrayDataset(Dataset[dict[str, Tensor]]):
    """Questions as tensors: image (1, size, size), words, and target: head, answer, then the labels by FINDINGS.

    Args:
        questions: What is asked.
        words: The questions' words as numbers, a row each.
        size: Pixels across.
        once: Keep the labels of each image with its first question only, so that figures count an image once.
    """

    def __init__(self, questions: Sequence[Question], words: Tensor, size: int, once: bool = False) -> None:
        places = {path: place for place, path in enumerate(dict.fromkeys(each.image for each in questions))}
        self.paths, self.size, self.words = list(places), size, words
        self.image_of = torch.tensor([places[each.image] for each in questions])
        self.target = torch.tensor([(each.head, each.answer, *each.labels) for each in questions])
        if once:
            first = {place: number for number, place in reversed(list(enumerate(self.image_of.tolist())))}
            again = torch.ones(len(questions), dtype=torch.bool)
            again[list(first.values())] = False
            self.target[again, 2:] = UNKNOWN_LABEL
        self.is_kept = len(self.paths) * size * size <= MOST_BYTES
        self.images = self._decoded() if self.is_kept else None

    def _decoded(self) -> Tensor:
        bad = BadInput()
        found = [read_image(path, self.size, bad, mode="L") for path in self.paths]
        bad.raise_if_any("restore these images, or remove them: a study without an image is left out")
        return torch.stack([image for image in found if image is not None])

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "image": self._image(int(self.image_of[index])),
            "words": self.words[index],
            "target": self.target[index],
        }

    def _image(self, place: int) -> Tensor:
        if self.images is not None:
            return self.images[place]
        bad = BadInput()
        image = read_image(self.paths[place], self.size, bad, mode="L")
        bad.raise_if_any("restore this image, or remove it: a study without an image is left out")
        assert image is not None
        return image
