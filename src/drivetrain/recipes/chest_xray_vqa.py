"""Answers questions about chest X-rays: an image and a question encoder, cross-attention, a head per kind of answer.

`drivetrain train chest-xray-vqa` learns from a generated set; `--data FOLDER` from MIMIC-CXR-JPG.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from drivetrain.api.training import Result, export
from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.metrics import LossSum
from drivetrain.core.schedules import WarmupCosine
from drivetrain.job import Job
from drivetrain.recipes import generated_xrays
from drivetrain.recipes.chest_xray_data import BEST_GRADES, HEADS, XrayDataset, XraySet, read_questions
from drivetrain.recipes.chest_xray_model import (
    IMAGE_BLIND,
    PADDING,
    QUESTION_BLIND,
    UNKNOWN,
    XrayVQA,
    at_least_float32,
    find_backbone,
)
from drivetrain.recipes.chest_xray_scores import LabelAUROC, MacroF1
from drivetrain.recipes.email_sequence import vocabulary_of, words_of
from drivetrain.recipes.facts import RecipeFacts, facts_of
from drivetrain.recipes.recipe import Recipe

CHEXPERT = "chexpert"
WEIGHTS = {"binary": 1.0, "category": 0.5, "region": 0.5, "severity": 0.3, CHEXPERT: 0.3}
BASELINES = (IMAGE_BLIND, QUESTION_BLIND)
VOCABULARY = "vocabulary.json"
_IGNORED = -100


@dataclass(frozen=True)
class VqaSize:
    """The sizes of data and model. The small one takes at most two minutes on two cores."""

    num_train: int  # studies
    num_valid: int
    image: int  # pixels across
    length: int  # words that are read of a question
    vocabulary: int
    width: int
    num_layers: int
    batch: int
    epochs: int
    rate: float


SIZES = {
    "small": VqaSize(3000, 300, 32, 10, 1000, 64, 1, 24, 4, 2e-3),
    "full": VqaSize(10_000, 1000, 224, 32, 10_000, 256, 2, 256, 20, 1e-3),
}


def job(config: Config) -> Job:
    size, options, asked = SIZES[config.recipe.size], config.recipe, config.batch_asked
    if options.baseline not in (None, *BASELINES):
        allowed = ", ".join(BASELINES)
        raise ConfigError([Problem("--baseline", "chest-xray-vqa has no such", options.baseline, allowed=allowed)])
    backbone = find_backbone(options.backbone, size.image, size.width)
    sets = _generated(config, size, backbone.image) if config.data.path is None else _read(config, size, backbone.image)
    rate = config.optimizer.learning_rate or (size.rate if backbone.folder is None else 5e-5)
    batch = min(size.batch, len(sets.train))
    epochs = config.budget.epochs or size.epochs
    per_step = (asked.size or batch) * (asked.accumulation or 1)
    num_steps = min(config.budget.max_steps or 10**9, epochs * -(-len(sets.train) // per_step))
    num_words, kept = len(sets.words) + 2, {VOCABULARY: {"words": sets.words, "length": size.length}}
    phase = None if options.phase == "all" else options.phase
    return Job(
        name="-".join(filter(None, ["chest-xray-vqa", phase, options.baseline])),
        model=lambda: XrayVQA(backbone, num_words, size.length, size.width, size.num_layers, options.baseline),
        data=sets.train,
        valid=sets.valid,
        loss=loss,
        loss_weights=WEIGHTS,
        count=counts,
        metrics={} if sets.valid is None else metrics(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98)),
        global_batch=None if asked.is_set else batch,
        default_batch=batch,
        epochs=epochs,
        max_steps=config.budget.max_steps,
        seed=config.run.seed,
        schedule=WarmupCosine(warmup_steps=num_steps // 10),
        clip_norm=1.0,
        weight_decay=0.01,
        hooks=[RecipeFacts(sets.lines, kept, phase=options.phase, **sets.known)],
    )


def loss(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> dict[str, LossSum]:
    """Returns a part per head, over the questions it answers, and one over the CheXpert labels that are known."""
    target, logits = batch["target"], model(batch["image"], batch["words"])
    dtype = at_least_float32(logits[CHEXPERT])
    parts = {}
    for number, head in enumerate(HEADS):
        answers = torch.where(target[:, 0] == number, target[:, 1], _IGNORED)
        total = functional.cross_entropy(logits[head].to(dtype), answers, ignore_index=_IGNORED, reduction="sum")
        parts[head] = LossSum(total, (answers != _IGNORED).sum())
    labels, is_known = target[:, 2:], target[:, 2:] >= 0
    each = functional.binary_cross_entropy_with_logits(
        logits[CHEXPERT].to(dtype), labels.clamp(min=0).to(dtype), reduction="none"
    )
    return {**parts, CHEXPERT: LossSum((each * is_known).sum(), is_known.sum())}


def counts(batch: Any) -> dict[str, Tensor]:
    """Returns what each part of the loss is divided by over a whole step."""
    target = batch["target"]
    asked = {head: (target[:, 0] == number).sum() for number, head in enumerate(HEADS)}
    return {**asked, CHEXPERT: (target[:, 2:] >= 0).sum()}


def metrics() -> dict[str, Any]:
    """Returns accuracy and macro F1 of each head, accuracy and AUROC of the labels that are known."""
    heads = {f"accuracy_{head}": partial(_accuracy, head, number) for number, head in enumerate(HEADS)}
    return {**heads, f"accuracy_{CHEXPERT}": _label_accuracy, "f1": MacroF1(), f"auroc_{CHEXPERT}": LabelAUROC()}


def _accuracy(head: str, number: int, logits: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> LossSum:
    is_asked = batch["target"][:, 0] == number
    is_right = logits[head].argmax(1) == batch["target"][:, 1]
    return LossSum((is_right & is_asked).sum(), is_asked.sum())


def _label_accuracy(logits: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> LossSum:
    labels = batch["target"][:, 2:]
    is_right = (logits[CHEXPERT] > 0) == (labels == 1)
    return LossSum((is_right & (labels >= 0)).sum(), (labels >= 0).sum())


@dataclass(frozen=True)
class Sets:
    """The training and held-out sets, with the words that are known."""

    train: XrayDataset
    valid: XrayDataset | None
    words: list[str]
    lines: list[str]  # for the terminal
    known: dict[str, Any]  # for the record


def _generated(config: Config, size: VqaSize, image: int) -> Sets:
    """Writes the generated set to a temporary folder and reads it as any other."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-xrays-") as folder:
        generated_xrays.generate(Path(folder), size.num_train, size.num_valid)
        sets = _read(config, size, image, Path(folder))
    sets.known["ceilings"] = generated_xrays.ceilings()
    for blind in BASELINES:
        sets.known[f"ceilings_{blind.replace('-', '_')}"] = generated_xrays.blind_ceilings(blind.removesuffix("-blind"))
    return sets


def _read(config: Config, size: VqaSize, image: int, folder: Path | None = None) -> Sets:
    folder = folder or config.data.path
    assert folder is not None
    found, phase = read_questions(folder), config.recipe.phase
    words, lines = _words(config, found, size), list(found.lines)
    train = [each for each in found.train if phase == "all" or (phase == "finetune") == (each.grade in BEST_GRADES)]
    valid = [each for each in found.valid if each.grade in BEST_GRADES]
    if not train:
        grades = "A or B, or without a grade" if phase == "finetune" else "C or D"
        remedy = "give questions of these grades, or --phase all"
        raise ConfigError([Problem("--phase", f"no question to train on has the grade {grades}", phase, remedy=remedy)])
    lines.append(
        f"data: {len(train):,} questions to learn from (phase {phase}), {len(valid):,} held out, of grades A and B"
    )
    if phase == "finetune" and config.checkpoint.init_from is None:
        lines.append(
            "phase finetune: it starts with random weights; --init-from RUN starts with those of a pre-training"
        )
    num_cut = sum(len(words_of(each.text)) > size.length for each in (*train, *valid))
    if num_cut:
        lines.append(f"data: {num_cut:,} questions are longer than {size.length} words; the rest of each is not read")
    samples = XrayDataset(train, encode([each.text for each in train], words, size.length), image)
    if not samples.is_kept:
        lines.append("data: the images do not fit in memory together and are decoded when needed (--num-workers)")
    held_out = encode([each.text for each in valid], words, size.length)
    known = {**found.counts, "train_questions": len(train), "valid_questions": len(valid)}
    return Sets(samples, XrayDataset(valid, held_out, image, once=True) if valid else None, words, lines, known)


def _words(config: Config, found: XraySet, size: VqaSize) -> list[str]:
    """Returns the words that are known: those of the run whose weights are taken, so that they mean the same."""
    earlier = config.checkpoint.init_from
    if earlier is not None and (earlier / VOCABULARY).is_file():
        words: list[str] = json.loads((earlier / VOCABULARY).read_text(encoding="utf-8"))["words"]
        return words
    return vocabulary_of([each.text for each in found.train], size.vocabulary)  # of all grades: alike in every phase


def encode(texts: Sequence[str], words: Sequence[str], length: int) -> Tensor:
    """Returns numbers of words, a row of `length` for each text, padded at its end."""
    numbers = {word: number for number, word in enumerate(words, start=2)}
    table = torch.full((len(texts), length), PADDING)
    for row, text in zip(table, texts, strict=True):
        found = torch.tensor([numbers.get(word, UNKNOWN) for word in words_of(text)[:length]], dtype=torch.long)
        row[: len(found)] = found
    return table


def show(result: Result) -> None:
    """Prints the figures of each head beside what can be reached, and exports the weights."""
    facts, found = facts_of(result.folder), result.metrics
    export(result)
    ceilings = facts.get("ceilings", {})
    if found:
        print("\nheld out    accuracy  macro F1" + ("  at most" if ceilings else ""))
    for head in HEADS if found else ():
        most = f"  {ceilings[head]:7.1%}" if head in ceilings else ""
        print(f"{head:<10}  {found[f'valid_accuracy_{head}']:8.1%}  {found[f'valid_f1_{head}']:8.3f}{most}")
    if found:
        most = f" (at most {ceilings[CHEXPERT]:.3f})" if ceilings else ""
        accuracy, area = found[f"valid_accuracy_{CHEXPERT}"], found[f"valid_auroc_{CHEXPERT}_macro"]
        print(f"{CHEXPERT:<10}  {accuracy:8.1%}  AUROC {area:.3f}{most}")
    print(f"Weights (model.safetensors) and {VOCABULARY} are in {result.folder}.")


RECIPE = Recipe(
    make=job,
    about="answers questions about chest X-rays",
    show=show,
    reads=(
        "data.path",
        "recipe.size",
        "recipe.baseline",
        "recipe.backbone",
        "recipe.phase",
    ),
)
