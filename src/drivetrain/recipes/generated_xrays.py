"""Writes a small synthetic set in the layout of MIMIC-CXR-JPG, with a learnable signal and known ceilings.

`python -m drivetrain.recipes.generated_xrays FOLDER` writes one. Each image shows two findings, each as a different
pattern, in two of eight regions, faint to bright by severity. Questions ask whether a finding is present, which one is
in a region, where one is, and how severe it is. Some answers and labels are wrong: the better the grade, the fewer.
"""

import csv
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from drivetrain.recipes.chest_xray_data import (
    BEST_GRADES,
    CHEXPERT,
    FILES,
    FINDINGS,
    HEADS,
    METADATA,
    QUESTIONS,
    SPLIT,
    study_folder,
)

SHOWN = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion", "Pneumothorax")
ZONES = ("apical zone", "upper lung zone", "mid lung zone", "lower lung zone")
PLACES = tuple(f"{side} {zone}" for side in ("right", "left") for zone in ZONES)  # the patient's right is on the left
USED = {"binary": HEADS["binary"], "category": SHOWN, "region": PLACES, "severity": HEADS["severity"]}
NUM_SHOWN = 2  # findings in an image
NOISE = {"A": 0.02, "B": 0.06, "C": 0.15, "D": 0.3}  # the part of the answers that is wrong, by grade
SHARES = {"A": 0.2, "B": 0.2, "C": 0.3, "D": 0.3}  # of the questions that are trained on; those held out are A and B
LABEL_NOISE, LABEL_MISSING, LABEL_UNCERTAIN = 0.03, 0.2, 0.08
NO_IMAGE, OTHER_TYPE, LATERAL = 0.02, 0.01, 0.1
ASKED_ABSENT = 0.25  # of the questions about severity
PIXELS = 32
_GLYPH = 7


def generate(root: Path, num_train: int, num_valid: int, seed: int = 0) -> None:
    """Writes studies to train on and to hold out, one patient each.

    Args:
        root: The folder to write to.
        num_train: Studies of the split `train`.
        num_valid: Studies of the split `validate`.
        seed: Another one gives other studies.
    """
    draw, noise = random.Random(seed), np.random.default_rng(seed)
    labels, splits, views, questions = [], [], [], []
    for number in range(num_train + num_valid):
        split = "train" if number < num_train else "validate"
        subject, study = 10_000_000 + 37 * number, 50_000_000 + 11 * number
        shown = dict(zip(draw.sample(SHOWN, NUM_SHOWN), draw.sample(PLACES, NUM_SHOWN), strict=True))
        severity = {finding: draw.randrange(1, 4) for finding in shown}
        folder = root / FILES / str(study_folder(subject, study))
        if split == "validate" or draw.random() >= NO_IMAGE:
            dicom = _dicom(draw)
            _write(folder / f"{dicom}.jpg", _image(shown, severity, draw, noise))
            splits.append((dicom, study, subject, split))
            views.append((dicom, "PA"))
            if draw.random() < LATERAL:
                dicom = _dicom(draw)
                _write(folder / f"{dicom}.jpg", _background(noise))
                splits.append((dicom, study, subject, split))
                views.append((dicom, "LATERAL"))
        labels.append((subject, study, *(_label(finding, shown, draw) for finding in FINDINGS)))
        for kind, text, answer in _questions(shown, severity, draw):
            grade = draw.choice("AB") if split == "validate" else draw.choices([*SHARES], [*SHARES.values()])[0]
            head = {"D01": "category", "D02": "binary", "D03": "region", "D04": "severity"}.get(kind[:3])
            if head is not None and draw.random() < NOISE[grade]:
                answer = draw.choice([other for other in USED[head] if other != answer])
            entry = {"subject_id": subject, "study_id": study, "question_type": kind, "question": text}
            questions.append({**entry, "answer": answer, "grade": grade})
    _table(root / CHEXPERT, ("subject_id", "study_id", *FINDINGS), labels)
    _table(root / SPLIT, ("dicom_id", "study_id", "subject_id", "split"), splits)
    _table(root / METADATA, ("dicom_id", "ViewPosition"), views)
    (root / QUESTIONS).write_text(json.dumps(questions, indent=0) + "\n", encoding="utf-8")


def _questions(shown: dict[str, str], severity: dict[str, int], draw: random.Random) -> list[tuple[str, str, str]]:
    """Returns two questions of each kind: type, text, the right answer."""
    absent = [finding for finding in SHOWN if finding not in shown]
    found: list[tuple[str, str, str]] = []
    for finding, place in shown.items():
        is_there = draw.random() < 0.5
        asked = draw.choice([*shown] if is_there else absent)
        found.append(("D02_has_finding", f"Is there {asked.lower()}?", "yes" if is_there else "no"))
        found.append(("D01_which_finding", f"Which finding is in the {place}?", finding))
        found.append(("D03_where_is_finding", f"Where is the {finding.lower()}?", place))
        is_there = draw.random() >= ASKED_ABSENT
        asked = draw.choice([*shown] if is_there else absent)
        found.append(
            ("D04_how_severe", f"How severe is the {asked.lower()}?", HEADS["severity"][severity.get(asked, 0)])
        )
    if draw.random() < OTHER_TYPE * len(found):
        found.append(("D05_view", "Which view is this?", "PA"))
    return found


def _label(finding: str, shown: dict[str, str], draw: random.Random) -> str:
    chance = draw.random()
    if finding not in SHOWN or chance < LABEL_MISSING:
        return ""
    if chance < LABEL_MISSING + LABEL_UNCERTAIN:
        return "-1.0"
    return "1.0" if (finding in shown) != (draw.random() < LABEL_NOISE) else "0.0"


def _dicom(draw: random.Random) -> str:
    return "-".join(f"{draw.getrandbits(32):08x}" for _ in range(5))


def _background(noise: np.random.Generator) -> np.ndarray:
    rows = np.linspace(40, 80, PIXELS)[:, None]
    return rows + noise.normal(0, 5, (PIXELS, PIXELS))


def _image(
    shown: dict[str, str], severity: dict[str, int], draw: random.Random, noise: np.random.Generator
) -> np.ndarray:
    pixels = _background(noise)
    for finding, place in shown.items():
        column, row = divmod(PLACES.index(place), len(ZONES))
        top = row * (PIXELS // len(ZONES)) + draw.randint(0, 1)
        left = column * (PIXELS // 2) + draw.randint(1, PIXELS // 2 - _GLYPH - 1)
        pixels[top : top + _GLYPH, left : left + _GLYPH] += _pattern(finding) * (0, 45, 90, 150)[severity[finding]]
    return pixels


def _pattern(finding: str) -> np.ndarray:
    """Returns a square of zeros and ones."""
    y, x = np.mgrid[:_GLYPH, :_GLYPH]
    radius = np.hypot(y - _GLYPH // 2, x - _GLYPH // 2)
    patterns = {
        "Atelectasis": y % 3 == 0,
        "Cardiomegaly": radius <= 3.2,
        "Consolidation": (x // 2 + y // 2) % 2 == 0,
        "Edema": x % 3 == 0,
        "Pleural Effusion": y >= x,
        "Pneumothorax": (radius <= 3.7) & (radius >= 2.3),
    }
    found: np.ndarray = patterns[finding].astype(float)
    return found


def _write(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=95)


def _table(path: Path, header: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def ceilings() -> dict[str, float]:
    """Returns the best that can be expected on held-out questions: accuracy of each head, AUROC of the labels."""
    wrong = _wrong()
    return {**dict.fromkeys(HEADS, 1 - wrong), "chexpert": _label_auroc()}


def blind_ceilings(without: str) -> dict[str, float]:
    """Returns the same for a reader who does not see the `image`, or does not see the `question`.

    Without the image every answer is as likely as any other. Without the question, yes and no are; of the two findings
    that are seen, either may be meant; a severity is `none` in a quarter of the cases, else that of either finding.
    """
    if without == "image":
        return {**{head: 1 / len(answers) for head, answers in USED.items()}, "chexpert": 0.5}
    same = 1 / 3  # both findings are equally severe
    severity = same * (1 - ASKED_ABSENT) + (1 - same) * max(ASKED_ABSENT, (1 - ASKED_ABSENT) / NUM_SHOWN)
    right = {"binary": 0.5, "category": 1 / NUM_SHOWN, "region": 1 / NUM_SHOWN, "severity": severity}
    wrong = _wrong()
    found = {head: it * (1 - wrong) + (1 - it) * wrong / (len(USED[head]) - 1) for head, it in right.items()}
    return {**found, "chexpert": _label_auroc()}


def _wrong() -> float:
    grades = [grade for grade in BEST_GRADES if grade]
    return sum(NOISE[grade] for grade in grades) / len(grades)


def _label_auroc() -> float:
    """Returns (1 + sensitivity - false alarms) / 2 of a reader who knows the truth, against labels that are noisy."""
    there = NUM_SHOWN / len(SHOWN)
    positive = there * (1 - LABEL_NOISE) + (1 - there) * LABEL_NOISE
    return (1 + there * (1 - LABEL_NOISE) / positive - there * LABEL_NOISE / (1 - positive)) / 2


if __name__ == "__main__":
    generate(Path(sys.argv[1]), *(int(number) for number in sys.argv[2:4] or ("800", "200")))
    print(f"{sys.argv[1]}: drivetrain train chest-xray-vqa --data {sys.argv[1]}")
