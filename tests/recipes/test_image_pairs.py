"""image-pairs: the swap loss is right, folds do not share images, adapters are whole, bad input is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.distributions import Categorical, kl_divergence

from drivetrain.cli import main
from drivetrain.config import configure
from drivetrain.core.errors import DrivetrainError
from drivetrain.recipes import image_pairs as recipe
from drivetrain.recipes import pair_data
from drivetrain.recipes.lora import LoraLayer, add_lora, load_trained_part, trained_part

ROOT = Path(__file__).parents[2]


def train(folder: Path, *flags: str) -> int:
    ours = ["--gpu-mode", "cpu", "--output-dir", str(folder), "--no-report", "--no-auto-optimize", "--quiet"]
    return main(["train", "image-pairs", *ours, *flags])


def test_the_swap_loss_is_the_symmetric_divergence_of_both_orders() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 2, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    p = Categorical(logits=logits[:, 0].float())
    q = Categorical(logits=logits[:, 1][:, [1, 0, 2]].float())  # first and second exchanged
    expected = (kl_divergence(p, q) + kl_divergence(q, p)) / 2
    torch.testing.assert_close(recipe.symmetric_kl(logits[:, 0], logits[:, 1][:, [1, 0, 2]]), expected)
    plain = nn.functional.cross_entropy(logits[:, 0], labels)
    found = recipe.pair_loss(logits, labels)
    torch.testing.assert_close(found["label"], plain)
    torch.testing.assert_close(found["swap"], expected.mean())
    agreeing = torch.stack([logits[:, 0], logits[:, 0][:, [1, 0, 2]]], dim=1)
    assert float(recipe.pair_loss(agreeing, labels)["swap"]) == pytest.approx(0, abs=1e-7)
    torch.testing.assert_close(recipe.pair_loss(agreeing, labels, both_orders=True)["label"], plain)


def test_consistency_and_accuracy_by_hand() -> None:
    said = torch.tensor([[0, 1], [0, 0], [2, 2], [1, 0], [2, 1]])  # the label in each order
    output = nn.functional.one_hot(said, 3).float()
    labels = torch.tensor([0, 0, 2, 0, 1])
    assert recipe.swap_consistency(output, [labels, labels, labels]).tolist() == [True, False, True, True, False]
    assert recipe.accuracy(output, [labels, labels, labels]).tolist() == [True, True, True, False, False]


def test_the_swap_loss_is_ramped_and_left_out_of_baselines() -> None:
    assert [recipe.ramp(step, 100) for step in (0, 25, 50, 100)] == [0.25, 0.625, 1.0, 1.0]
    for baseline, expected in ((None, [2.0, 5.0, 8.0]), ("no-swap-loss", [0.0] * 3), ("both-orders", [0.0] * 3)):
        config = (
            configure(baseline=baseline, swap_weight=8.0, max_steps=100)
            if baseline
            else configure(swap_weight=8.0, max_steps=100)
        )
        weight = recipe.job(config).loss_weights["swap"]
        assert [weight(step) for step in (0, 25, 99)] == expected


def test_no_image_is_in_two_folds() -> None:
    images, _, ratings = pair_data.generate(60, 8)
    images = torch.cat([images, images[:20]])  # twenty of them under two names
    folds = pair_data.folds_of(images)
    assert torch.equal(folds[60:], folds[:20])
    assert torch.bincount(folds[:60]).tolist() == [12] * 5
    chosen = torch.randint(80, (300, 2), generator=torch.Generator().manual_seed(0))
    pairs = pair_data.Pairs(images, chosen[:, 0], chosen[:, 1], torch.zeros(300, dtype=torch.long))
    learned, held_out, left_out = pair_data.split(pairs, fold=2)
    assert len(learned) + len(held_out) + left_out == 300
    drawn = pair_data.draw_pairs(images, torch.cat([ratings, ratings[:20]]), 0.2, 2, (200, 50))
    for one, other in ((learned, held_out), drawn):
        sides = [{bytes(images[n].numpy()) for n in (*side.first, *side.second)} for side in (one, other)]
        assert sides[0]
        assert sides[1]
        assert sides[0].isdisjoint(sides[1])


def test_the_ceiling_is_that_of_one_who_knows_the_true_scores() -> None:
    _, scores, _ = pair_data.generate(400, 8)
    chosen = torch.randint(400, (4000, 2), generator=torch.Generator().manual_seed(1))
    pairs = pair_data.Pairs(torch.empty(0), chosen[:, 0], chosen[:, 1], torch.empty(4000))
    generator = torch.Generator().manual_seed(2)
    counts = torch.zeros(4000, 3)
    for _ in range(200):  # new ratings of the same images: how often each label comes
        noisy = [scores[side] + pair_data.RATING_NOISE * torch.randn(4000, generator=generator) for side in chosen.T]
        label = pair_data.label_of(torch.cat(noisy), torch.arange(4000), torch.arange(4000, 8000), 0.18)
        counts[torch.arange(4000), label] += 1
    assert pair_data.ceiling(scores, pairs) == pytest.approx(float(counts.max(1).values.mean() / 200), abs=0.01)


def test_better_first_turns_pairs_and_their_labels() -> None:
    images, _, ratings = pair_data.generate(100, 8)
    pairs, _ = pair_data.draw_pairs(images, ratings, 0.18, 0, (3000, 10))
    turned = pair_data.better_first(pairs)
    assert torch.equal(turned.labels, pair_data.label_of(ratings, turned.first, turned.second, 0.18))
    differ = turned.labels != 2
    assert float((turned.labels[differ] == 0).double().mean()) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("layer", [nn.Linear(6, 4), nn.Conv2d(3, 4, 3, stride=2, padding=1)])
def test_an_adapter_starts_at_nothing_and_trains_alone(layer: nn.Linear | nn.Conv2d) -> None:
    inputs = torch.randn(2, 6) if isinstance(layer, nn.Linear) else torch.randn(2, 3, 8, 8)
    expected = layer(inputs)
    adapted = LoraLayer(layer, rank=2)
    assert torch.equal(adapted(inputs), expected)
    adapted(inputs).square().sum().backward()
    assert {name for name, value in adapted.named_parameters() if value.grad is not None} == {
        "lora_down.weight",
        "lora_up.weight",
    }
    with torch.no_grad():
        adapted.lora_up.weight.fill_(0.5)
    assert not torch.equal(adapted(inputs), expected)


def test_an_adapter_on_a_frozen_backbone_holds_all_that_was_trained(tmp_path: Path) -> None:
    """The projector, too: adapter and backbone together give the predictions of the run, to the bit."""
    assert train(tmp_path, "--name", "first", "--max-steps", "2") == 0
    first = tmp_path / "first" / "model.safetensors"
    assert not (tmp_path / "first" / "adapter.safetensors").exists()
    assert train(tmp_path, "--name", "second", "--max-steps", "3", "--backbone", str(tmp_path / "first")) == 0
    before, after = load_file(first), load_file(tmp_path / "second" / "model.safetensors")
    for name in [name for name in before if name.startswith("backbone.")]:
        assert torch.equal(before[name], after[name.replace(".weight", ".base.weight").replace(".bias", ".base.bias")])

    adapter = load_file(tmp_path / "second" / "adapter.safetensors")
    assert "projector.0.weight" in adapter
    assert not any("base" in name for name in adapter)
    torch.manual_seed(9)
    fresh = recipe.PairModel(recipe.find_backbone(first, recipe.SIZES["small"])).eval()
    whole = recipe.PairModel(recipe.find_backbone(first, recipe.SIZES["small"])).eval()
    whole.load_state_dict(after)
    load_trained_part(fresh, adapter, recipe.BACKBONE)
    images, _, _ = pair_data.generate(6, 24)
    assert torch.equal(fresh(images[:3], images[3:]), whole(images[:3], images[3:]))
    del adapter["projector.0.weight"]
    with pytest.raises(DrivetrainError, match=r"missing \['projector.0.weight'\]"):
        load_trained_part(fresh, adapter, recipe.BACKBONE)


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    assert train(tmp_path, "--backbone", str(tmp_path / "vit"), "--max-steps", "2") == 0
    found = load_file(tmp_path / "image-pairs" / "adapter.safetensors")
    assert any("lora_up" in name for name in found)
    assert any(name.startswith("projector") for name in found)
    kept = load_file(tmp_path / "vit" / "model.safetensors")
    weights = load_file(tmp_path / "image-pairs" / "model.safetensors")
    assert torch.equal(weights["backbone.model.embeddings.cls_token"], kept["embeddings.cls_token"])


def test_a_backbone_without_such_layers() -> None:
    with pytest.raises(DrivetrainError, match="no layer whose name matches"):
        add_lora(nn.Sequential(nn.Linear(2, 2)), "attention")
    assert trained_part({"backbone.a": torch.ones(1), "head": torch.ones(1)}, "backbone.").keys() == {"head"}


def write_images(folder: Path, count: int) -> None:
    draw = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(draw.integers(0, 255, (40, 30, 3), dtype=np.uint8)).save(folder / f"{number}.png")


def test_images_of_ones_own(tmp_path: Path, capsys) -> None:
    write_images(tmp_path, 20)
    rows = [f"{a}.png,{b}.png,{pair_data.LABELS[(a + b) % 3]}" for a in range(20) for b in range(20) if a != b]
    (tmp_path / "pairs.csv").write_text("\n".join(["first,second,label", *rows]))
    ours = ["--gpu-mode", "cpu", "--output-dir", str(tmp_path), "--no-report", "--no-auto-optimize", "--max-steps", "1"]
    assert main(["train", "image-pairs", *ours, "--data", str(tmp_path / "pairs.csv")]) == 0
    said = capsys.readouterr().out
    assert "240 pairs to learn from and 12 of fold 0, of 20 images" in said
    assert "128 pairs are left out: one image is in fold 0, and the other is not" in said
    (tmp_path / "scores.jsonl").write_text(
        "".join(json.dumps({"image": f"{number}.png", "score": number / 4}) + "\n" for number in range(20))
    )
    learned, held_out, _ = pair_data.read_pairs(tmp_path / "scores.jsonl", 8, 0.2, 1, (50, 20))
    assert (len(learned), len(held_out)) == (50, 20)
    assert learned.images.shape == (20, 3, 8, 8)
    assert set(learned.labels.tolist()) <= {0, 1}  # all scores differ by more


def test_bad_pairs_are_listed_and_nothing_is_written(tmp_path: Path, capsys) -> None:
    write_images(tmp_path, 3)
    (tmp_path / "torn.png").write_bytes((tmp_path / "0.png").read_bytes()[:500])
    table = tmp_path / "pairs.csv"
    table.write_text(
        "first,second,label\n0.png,1.png,first\n0.png,1.png,third\n1.png,torn.png,second\n2.png,2.png,similar\n"
        + "gone.png,0.png,first\n" * 3
    )
    assert train(tmp_path / "runs", "--data", str(table)) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "drivetrain: 4 problems with the input:"
    assert said[1] == f"  {table} line 3: the label 'third' is none of first, second, similar"
    assert said[2].startswith(f"  {table} line 4: {tmp_path / 'torn.png'}: it does not decode")
    assert said[3] == f"  {table} line 5: both images are 2.png"
    assert said[4] == f"  {table} line 6: {tmp_path / 'gone.png'}: there is no such image"
    scores = tmp_path / "scores.csv"
    scores.write_text("image,score\n0.png,1\n1.png,high\n2.png,nan\n")
    assert train(tmp_path / "runs", "--data", str(scores)) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[1:3] == [
        f"  {scores} line 3: the score 'high' is no finite number",
        f"  {scores} line 4: the score 'nan' is no finite number",
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--baseline", "bag-of-words"], "allowed: no-swap-loss, both-orders"),
        (["--backbone", "nowhere"], "a run of image-pairs"),
        (["--fold", "5"], "--fold"),
        (["--labels", "a,b"], "the recipe image-pairs does not use it"),
    ],
)
def test_wrong_settings(tmp_path: Path, capsys, flags: list[str], words: str) -> None:
    assert train(tmp_path / "runs", *flags) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_configuration_file_is_the_full_size() -> None:
    config = configure(ROOT / "examples" / "image-pairs.yaml")
    assert (config.recipe.size, config.recipe.swap_weight) == ("full", 2.0)


@pytest.mark.soak
def test_answers_agree_in_both_orders_and_accuracy_stays(tmp_path: Path) -> None:
    found = {}
    for name, flags in {"with": (), "without": ("--baseline", "no-swap-loss")}.items():
        assert train(tmp_path, "--name", name, *flags) == 0
        found[name] = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
    gained = found["with"]["valid_swap_consistency"] - found["without"]["valid_swap_consistency"]
    assert gained >= 0.05
    assert found["with"]["valid_accuracy"] >= found["without"]["valid_accuracy"] - 0.01
