"""The recipe end to end: it trains, plays for held-out goals with the weights it wrote, and gets better in context."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from drivetrain.cli import main
from drivetrain.config import configure
from drivetrain.recipes.darkroom import recipe
from drivetrain.recipes.darkroom.contexts import Context
from drivetrain.recipes.darkroom.environment import Darkroom
from drivetrain.recipes.darkroom.play import play
from drivetrain.recipes.darkroom.scores import DarkroomScores, read_scores

ROOT = Path(__file__).parents[3]


def train(folder: Path, *flags: str) -> int:
    ours = ["--gpu-mode", "cpu", "--output-dir", str(folder), "--no-report", "--no-auto-optimize", "--quiet"]
    return main(["train", "darkroom", *ours, *flags])


def test_returns_rise_in_context_on_goals_it_never_saw(tmp_path: Path, monkeypatch) -> None:
    tiny = replace(recipe.SIZES["small"], num_learners=4, max_steps=150, learning_rate=4e-3, batch=24)
    tiny = replace(tiny, episodes=48, walkers=6)
    monkeypatch.setitem(recipe.SIZES, "small", tiny)
    assert train(tmp_path) == 0
    run = tmp_path / "darkroom"
    scores = read_scores(run / "in_context.json")
    assert len(scores.transformer) == len(scores.source) == 48
    assert scores.last > 1.3 * scores.first
    assert scores.last > 2 * scores.random
    assert scores.last < scores.optimum
    assert (run / "return_by_episode.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["valid_accuracy"] > 0.5  # a guess is right in a fifth of all cases
    facts = next(row for row in map(json.loads, (run / "events.jsonl").open()) if row["event"] == "recipe")
    goals, held_out = Darkroom(5, 10).split(5)
    assert facts["held_out_goals"] == held_out.tolist() == [row["cell"] for row in scores.goals]
    assert not {*goals.tolist()} & {*held_out.tolist()}

    # The file of weights and the settings beside it are enough to play again, and play the same.
    kept = json.loads((run / "darkroom.json").read_text())
    model = recipe.make_model(recipe.DarkroomSize(**kept["size"])).eval()
    model.load_state_dict(load_file(run / "model.safetensors"))
    again = play(model, Darkroom(5, 10), Context("plain", 4, 10), held_out.repeat_interleave(6), 12, kept["seed"])
    assert again.mean(0).tolist() == pytest.approx(scores.transformer[:12])


def test_two_regions_train_and_play(tmp_path: Path, monkeypatch) -> None:
    tiny = replace(recipe.SIZES["small"], num_learners=1, source_episodes=48, episodes=12, walkers=1)
    monkeypatch.setitem(recipe.SIZES, "small", tiny)
    flags = ["--context", "two-region", "--n-transit", "80", "--tf-n-embd", "16", "--tf-n-layer", "1"]
    assert train(tmp_path, *flags, "--max-steps", "2") == 0
    weights = load_file(tmp_path / "darkroom-two-region" / "model.safetensors")
    assert weights["positions.weight"].shape == (80, 16)
    assert max(int(name.split(".")[1]) for name in weights if name.startswith("blocks.")) == 0
    assert len(read_scores(tmp_path / "darkroom-two-region" / "in_context.json").transformer) == 12


@pytest.mark.gpu
@pytest.mark.parametrize("context", ["plain", "two-region"])
def test_trains_and_plays_on_a_gpu(tmp_path: Path, monkeypatch, context: str) -> None:
    tiny = replace(recipe.SIZES["full"], num_learners=1, source_episodes=160, batch=32, episodes=12, walkers=2)
    monkeypatch.setitem(recipe.SIZES, "full", tiny)
    flags = ["--size", "full", "--context", context, "--name", "run", "--max-steps", "5", "--gpu-mode", "single_gpu"]
    ours = ["--output-dir", str(tmp_path), "--no-report", "--no-auto-optimize", "--quiet"]
    assert main(["train", "darkroom", *flags, *ours]) == 0
    assert json.loads((tmp_path / "run" / "darkroom.json").read_text())["device"] == "cuda:0"
    assert len(read_scores(tmp_path / "run" / "in_context.json").transformer) == 12


def test_what_the_figures_mean() -> None:
    scores = DarkroomScores(0.5, 8.0, source=[1.0] * 5 + [7.0], transformer=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], goals=[])
    assert scores.summary() == {
        "first": 1.0, "last": 6.0, "part_of_optimum": 0.75, "times_random": 12.0, "source_last": 7.0, "random": 0.5,
        "optimum": 8.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--n-transit", "30"], ("an even number of whole episodes of 10 steps", "--n-transit 40")),
        (["--n-transit", "70"], ("allowed: 40, 60, 80", "--n-transit")),
        (["--n-transit", "800"], ("a history has 40 episodes of 10 steps", "at most 400")),
        (["--tf-n-embd", "33"], ("a multiple of 2", "--tf-n-embd 32")),
    ],
)
def test_wrong_settings(tmp_path: Path, capsys, flags: list[str], words: tuple[str, ...]) -> None:
    assert train(tmp_path / "runs", *flags) == 2
    said = capsys.readouterr().err
    assert all(each in said for each in words), said
    assert not (tmp_path / "runs").exists()


def test_the_configuration_file_is_the_full_size() -> None:
    path = ROOT / "examples" / "darkroom.yaml"
    full = recipe.SIZES["full"]
    said = configure(path).recipe
    assert (said.size, said.n_transit, said.tf_n_embd) == ("full", full.n_transit, full.n_embd)
    assert said.tf_n_layer == full.n_layer
    assert yaml.safe_load(path.read_text())["budget"]["max_steps"] == full.max_steps
    assert full.n_transit >= recipe.LEAST_EPISODES * full.horizon


def test_keys_of_a_file_for_accelerate_reach_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("train_batch_size: 512\ntf_n_embd: 32\ntf_n_layer: 2\nn_transit: 160\n")
    config = configure(path)
    assert (config.recipe.tf_n_embd, config.recipe.tf_n_layer, config.recipe.n_transit) == (32, 2, 160)
    assert config.batch.size == 512
