"""chest-xray-vqa: one tiny run that many checks share; parts with counts of their own, scores, baselines, phases."""

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.nn import functional

from drivetrain.cli import main
from drivetrain.config import configure
from drivetrain.recipes import chest_xray_data as data
from drivetrain.recipes import chest_xray_vqa as recipe
from drivetrain.recipes import generated_xrays as generator
from drivetrain.recipes.chest_xray_model import Backbone, XrayVQA, find_backbone
from drivetrain.recipes.chest_xray_scores import LabelAUROC, MacroF1, auroc

ROOT = Path(__file__).parents[2]


def train(folder: Path, *flags: str) -> int:
    ours = ["--gpu-mode", "cpu", "--output-dir", str(folder), "--no-report", "--no-auto-optimize"]
    return main(["train", "chest-xray-vqa", *ours, *flags])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mimic")
    generator.generate(root, 60, 20)
    return root


@pytest.fixture(scope="module")
def runs(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-training, and a fine-tuning that starts with its weights."""
    folder = tmp_path_factory.mktemp("runs")
    given = ["--data", str(written), "--max-steps", "3"]
    assert train(folder, *given, "--phase", "pretrain", "--trackers", "tensorboard") == 0
    earlier = folder / "chest-xray-vqa-pretrain"
    assert train(folder, *given, "--phase", "finetune", "--init-from", str(earlier), "--quiet") == 0
    return folder


def small_model(**changes: Any) -> XrayVQA:
    torch.manual_seed(0)
    return XrayVQA(Backbone(32, 16, 16), 20, 10, 16, 1, **changes)


def batch_of(size: int = 12) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)

    def below(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(limit, shape, generator=draw)

    heads = below(4, size)
    answers = torch.stack([below(len(data.HEADS[name]), 1)[0] for name in [list(data.HEADS)[head] for head in heads]])
    target = torch.cat([heads[:, None], answers[:, None], below(3, size, 14) - 1], dim=1)
    words = below(18, size, 10) + 2
    words[:, 6:] = 0
    return {"image": below(256, size, 1, 32, 32).byte(), "words": words, "target": target}


def test_each_head_is_a_part_with_its_own_count_and_curve(runs: Path) -> None:
    steps = rows(runs / "chest-xray-vqa-pretrain" / "steps.jsonl")
    parts = [*data.HEADS, "chexpert"]
    for step in steps:
        assert all(f"loss_{part}" in step and step[f"num_items_{part}"] > 0 for part in parts)
        # Every question has one head.
        assert sum(step[f"num_items_{head}"] for head in data.HEADS) == recipe.SIZES["small"].batch
        expected = sum(recipe.WEIGHTS[part] * step[f"loss_{part}"] for part in parts)
        assert step["loss"] == pytest.approx(expected, rel=1e-5)
    measured = rows(runs / "chest-xray-vqa-pretrain" / "metrics.jsonl")[-1]
    assert {f"valid_accuracy_{part}" for part in parts} | {f"valid_f1_{head}" for head in data.HEADS} <= set(measured)
    assert 0 <= measured["valid_auroc_chexpert_macro"] <= 1
    assert list((runs / "chest-xray-vqa-pretrain").rglob("events.out.tfevents*"))


def test_the_loss_is_that_of_single_questions() -> None:
    """Against a loop over the questions one by one, each asked of its own head only."""
    model, batch = small_model(), batch_of()
    found = recipe.loss(model, batch)
    totals = dict.fromkeys((*data.HEADS, "chexpert"), 0.0)
    numbers = dict.fromkeys(totals, 0)
    for image, words, target in zip(batch["image"], batch["words"], batch["target"], strict=True):
        logits = model(image[None], words[None])
        head = list(data.HEADS)[target[0]]
        totals[head] += functional.cross_entropy(logits[head], target[1:2]).item()
        numbers[head] += 1
        for place, label in enumerate(target[2:].tolist()):
            if label >= 0:
                chance = logits["chexpert"][0, place].sigmoid()
                totals["chexpert"] -= (chance if label else 1 - chance).log().item()
                numbers["chexpert"] += 1
    assert numbers == {name: int(count) for name, count in recipe.counts(batch).items()}
    for name, part in found.items():
        assert int(part.count) == numbers[name]
        assert part.total.item() == pytest.approx(totals[name], rel=1e-4)


def test_scores_are_those_of_torchmetrics() -> None:
    # Imports matplotlib, scipy and transformers: seconds that every worker of the suite would spend on its collection.
    from torchmetrics.functional.classification import binary_auroc, multiclass_f1_score

    batch = batch_of(200)
    torch.manual_seed(2)
    logits = {head: torch.randn(200, len(answers)) for head, answers in data.HEADS.items()}
    logits["chexpert"] = torch.randn(200, 14).mul(4).round()  # with many ties
    area, scores = LabelAUROC(), MacroF1()
    for part in torch.arange(200).split(64):
        for found in (area, scores):
            found.update({name: value[part] for name, value in logits.items()}, batch["target"][part])
    expected = []
    for place in range(14):
        labels = batch["target"][:, 2 + place]
        expected.append(float(binary_auroc(logits["chexpert"][labels >= 0, place].sigmoid(), labels[labels >= 0])))
    assert area.compute()["macro"] == pytest.approx(sum(expected) / 14)
    assert area.compute()["edema"] == pytest.approx(expected[data.FINDINGS.index("Edema")])
    for number, (head, answers) in enumerate(data.HEADS.items()):
        asked = batch["target"][:, 0] == number
        right = batch["target"][asked, 1]
        macro = multiclass_f1_score(logits[head][asked].argmax(1), right, num_classes=len(answers), average="macro")
        assert scores.compute()[head] == pytest.approx(float(macro))
    assert str(auroc(torch.ones(3), torch.ones(3, dtype=torch.bool))) == "nan"
    area.reset()
    assert str(area.compute()["macro"]) == "nan"


def scores_of_a_rank() -> tuple[float, float]:
    """Ranks get slices of different lengths."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    batch = batch_of(40)
    torch.manual_seed(3)
    logits = {head: torch.randn(40, len(answers)) for head, answers in data.HEADS.items()}
    logits["chexpert"] = torch.randn(40, 14)
    area, scores = LabelAUROC(), MacroF1()
    mine = slice(None) if size == 1 else slice(0, 29) if rank == 0 else slice(29, 40)
    for found in (area, scores):
        found.update({name: value[mine] for name, value in logits.items()}, batch["target"][mine])
    return area.compute()["macro"], scores.compute()["region"]


def test_scores_do_not_depend_on_the_number_of_ranks(gloo_pool: Any) -> None:
    alone = scores_of_a_rank()
    for together in gloo_pool.run(scores_of_a_rank, world=2):
        assert together == pytest.approx(alone)


def test_padding_does_not_change_the_answer() -> None:
    """A model made for six words answers as one that pads them to ten."""
    model, batch = small_model(), batch_of()
    short = XrayVQA(Backbone(32, 16, 16), 20, 6, 16, 1)
    weights = model.state_dict()
    short.load_state_dict({**weights, "positions": weights["positions"][:6]})
    torch.testing.assert_close(short(batch["image"], batch["words"][:, :6]), model(batch["image"], batch["words"]))


def test_blind_models_do_not_see() -> None:
    batch = batch_of()
    other = {**batch, "image": batch["image"].flip(0), "words": batch["words"].flip(0)}

    def answers(model: XrayVQA, image: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(model(image, words).values()), dim=1)

    for blind, image, words in (
        ("image-blind", other["image"], batch["words"]),
        ("question-blind", batch["image"], other["words"]),
    ):
        model = small_model(blind=blind)
        torch.testing.assert_close(answers(model, image, words), answers(model, batch["image"], batch["words"]))
        sees = small_model()
        assert not torch.allclose(answers(sees, image, words), answers(sees, batch["image"], batch["words"]))


def test_phases_take_the_grades_they_are_for(written: Path, runs: Path) -> None:
    grades = [each["grade"] for each in json.loads((written / data.QUESTIONS).read_text())]
    assert {"A", "B", "C", "D"} == set(grades)
    found = data.read_questions(written)
    told = {
        phase: next(row for row in rows(runs / f"chest-xray-vqa-{phase}" / "events.jsonl") if row["event"] == "recipe")
        for phase in ("pretrain", "finetune")
    }
    assert told["pretrain"]["train_questions"] == sum(each.grade in "CD" for each in found.train)
    assert told["finetune"]["train_questions"] == sum(each.grade in "AB" for each in found.train)
    assert told["pretrain"]["valid_questions"] == told["finetune"]["valid_questions"] == len(found.valid)
    words = [json.loads((runs / f"chest-xray-vqa-{phase}" / "vocabulary.json").read_text()) for phase in told]
    assert words[0] == words[1]
    taken = [row for row in rows(runs / "chest-xray-vqa-finetune" / "events.jsonl") if row["event"] == "weights taken"]
    assert taken[0]["path"].startswith(str(runs / "chest-xray-vqa-pretrain"))
    assert not taken[0]["missing"]
    assert not taken[0]["other_shape"]


def test_what_is_left_out_is_said_and_the_figures_are_shown(written: Path, tmp_path: Path, capsys) -> None:
    assert train(tmp_path, "--data", str(written), "--max-steps", "1", "--baseline", "image-blind") == 0
    said = capsys.readouterr().out
    for words in ("CheXpert labels are masked", "questions of types that no head answers", "held out    accuracy"):
        assert said.count(words) == 1
    assert (tmp_path / "chest-xray-vqa-image-blind" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "."], "there is no such folder"),
        (["--baseline", "none-such"], "allowed: image-blind, question-blind"),
        (["--backbone", "."], "allowed: a local folder of Hugging Face's"),
        (["--phase", "third"], "--phase"),
        (["--fold", "1"], "the recipe chest-xray-vqa does not use it"),
    ],
)
def test_wrong_settings_write_nothing(tmp_path: Path, capsys, monkeypatch, flags: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path / "runs", *flags) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_backbone_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(tmp_path)
    backbone = find_backbone(tmp_path, 32, 64)
    assert (backbone.image, backbone.width) == (16, 8)
    model = XrayVQA(backbone, 20, 10, 16, 1)
    batch = batch_of(3)
    logits = model(batch["image"][:, :, :16, :16], batch["words"])
    assert {name: value.shape[1] for name, value in logits.items()} == {
        "binary": 2, "category": 14, "region": 26, "severity": 4, "chexpert": 14,
    }  # fmt: skip
    sum(value.sum() for value in logits.values()).backward()
    assert any(parameter.grad is not None for parameter in model.backbone.parameters())


def test_the_script_hands_its_flags_on(tmp_path: Path) -> None:
    ours = tmp_path / "drivetrain"
    ours.write_text('#!/bin/sh\necho "$@"\n')
    ours.chmod(ours.stat().st_mode | stat.S_IXUSR)
    script = ROOT / "scripts" / "launch_distributed_training.sh"
    flags = ["--config", "x.yaml", "--num_gpus", "4", "--deepspeed", "--debug", "--torchrun", "--no_auto"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run([script, *flags], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split() == [
        "train", "chest-xray-vqa", "--config", "x.yaml", "--num_gpus", "4", "--deepspeed", "--debug",
        "--use-ddp", "--no-auto-optimize",
    ]  # fmt: skip


def test_the_configuration_file_is_the_full_size() -> None:
    path = ROOT / "examples" / "chest-xray-vqa.yaml"
    assert configure(path).recipe.size == "full"
    assert set(yaml.safe_load(path.read_text())) == {"recipe", "budget", "watch"}
