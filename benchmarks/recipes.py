"""What recipes reach on generated data beside their baselines and ceilings, over three seeds, with a picture each."""

import time
from pathlib import Path
from typing import Any

from drivetrain.cli import main
from drivetrain.core.run_folder import read_rows
from drivetrain.recipes import generated_emails, generated_xrays
from drivetrain.recipes.chest_xray_data import HEADS

SEEDS = 3
FOLDER = Path("runs") / "benchmarks" / "recipes"
PICTURES = Path(__file__).parents[1] / "docs" / "images"
ANSWERS = {f"valid_accuracy_{head}": f"{head} accuracy" for head in HEADS} | {
    "valid_auroc_chexpert_macro": "chexpert AUROC"
}


def measure_email_sequence() -> dict[str, list[float]]:
    curves = {
        name: [_trained("email-sequence", f"{name}-{seed}", seed, *flags) for seed in range(SEEDS)]
        for name, flags in {"bilstm": (), "bag-of-words": ("--baseline", "bag-of-words")}.items()
    }
    ceilings = {"ceiling": generated_emails.ceiling(), "bag-of-words ceiling": generated_emails.bag_of_words_ceiling()}
    _draw(
        PICTURES / "email_sequence.png",
        {name: [[100 * row["valid_accuracy"] for row in rows] for rows, _ in runs] for name, runs in curves.items()},
        {name: 100 * value for name, value in ceilings.items()},
        "held-out emails classified correctly (%)",
    )
    samples = {
        f"{name}: accuracy (%)": [100 * rows[-1]["valid_accuracy"] for rows, _ in runs] for name, runs in curves.items()
    }
    samples["bilstm: seconds of the whole command"] = [seconds for _, seconds in curves["bilstm"]]
    return samples | {f"{name} (%)": [100 * value] for name, value in ceilings.items()}


def measure_image_pairs() -> dict[str, list[float]]:
    """Go on where it was cut short: runs that are finished under `runs/benchmarks/recipes` are not trained again."""
    fixed = ("--no-auto-optimize", "--num-threads", "1")  # so that runs repeat
    variants = {"swap-loss": (), **{name: ("--baseline", name) for name in ("no-swap-loss", "both-orders")}}
    folder = FOLDER / "image-pairs"
    curves = {
        name: [
            _trained("image-pairs", f"{name}-{seed}", seed, *fixed, *flags, folder=folder)[0] for seed in range(SEEDS)
        ]
        for name, flags in variants.items()
    }
    told, _ = read_rows(folder / "swap-loss-0" / "events.jsonl")
    limit = 100 * next(row["ceiling"] for row in told if row["event"] == "recipe")
    samples = {"ceiling of the accuracy (%)": [limit]}
    for key, words in (("swap_consistency", "same answer in both orders (%)"), ("accuracy", "accuracy (%)")):
        values = {name: [[100 * row[f"valid_{key}"] for row in rows] for rows in runs] for name, runs in curves.items()}
        limits = {"ceiling": limit} if key == "accuracy" else {}
        _draw(PICTURES / f"image_pairs_{key}.png", values, limits, f"held-out pairs: {words}")
        samples |= {f"{name}: {words}": [run[-1] for run in runs] for name, runs in values.items()}
    return samples


def measure_chest_xray_vqa() -> dict[str, list[float]]:
    """Train one seed; the blind baselines for 2 epochs. Runs that are finished are not trained again."""
    variants = {
        "sees-both": (),
        "image-blind": ("--baseline", "image-blind", "--epochs", "2"),
        "question-blind": ("--baseline", "question-blind", "--epochs", "2"),
    }
    ceilings = {
        "sees-both": generated_xrays.ceilings(),
        "image-blind": generated_xrays.blind_ceilings("image"),
        "question-blind": generated_xrays.blind_ceilings("question"),
    }
    keys = {head: f"valid_accuracy_{head}" for head in HEADS} | {"chexpert": "valid_auroc_chexpert_macro"}
    names = {head: f"{head} accuracy" for head in HEADS} | {"chexpert": "chexpert AUROC"}
    folder, fixed = FOLDER / "chest-xray-vqa", ("--no-auto-optimize", "--num-threads", "1")
    samples = {}
    for name, flags in variants.items():
        rows, _ = _trained("chest-xray-vqa", f"{name}-0", 0, *fixed, *flags, folder=folder)
        for head, key in keys.items():
            samples[f"{name}: {names[head]} (%)"] = [100 * rows[-1][key]]
            samples[f"{name}: {names[head]}, at most (%)"] = [100 * ceilings[name][head]]
        if name == "sees-both":
            curves = {names[head]: [[100 * row[key] for row in rows]] for head, key in keys.items()}
            limit = {"ceiling of the accuracy": 100 * ceilings[name]["binary"]}
            _draw(PICTURES / "chest_xray_vqa.png", curves, limit, "held-out questions and labels (%)")
    return samples


def measure_full() -> dict[str, list[float]]:
    """Train the full sizes as their example files have them, one seed each; meant for a GPU."""
    runs = {
        name: _full(recipe, name, *flags)
        for name, recipe, flags in (
            ("email-sequence", "email-sequence", ()),
            ("email-sequence, bag-of-words", "email-sequence", ("--baseline", "bag-of-words")),
            ("image-pairs", "image-pairs", ()),
            ("image-pairs, no-swap-loss", "image-pairs", ("--baseline", "no-swap-loss")),
            ("chest-xray-vqa", "chest-xray-vqa", ()),
        )
    }
    _draw_full(runs)
    words = {"valid_accuracy": "accuracy", "valid_swap_consistency": "same answer in both orders", **ANSWERS}
    return {
        f"{name}: {word} (%)": [100 * rows[-1][key]]
        for name, rows in runs.items()
        for key, word in words.items()
        if key in rows[-1]
    }


def _draw_full(runs: dict[str, list[dict[str, Any]]]) -> None:
    def draw(picture: str, curves: dict[str, tuple[str, str]], limits: dict[str, float], label: str) -> None:
        values = {shown: [[100 * row[key] for row in runs[name]]] for shown, (name, key) in curves.items()}
        shown_limits = {shown: 100 * limit for shown, limit in limits.items()}
        _draw(PICTURES / f"{picture}_full.png", values, shown_limits, label)

    curves = {"bilstm": ("email-sequence", "valid_accuracy")}
    curves["bag-of-words"] = ("email-sequence, bag-of-words", "valid_accuracy")
    limits = {"ceiling": generated_emails.ceiling(), "bag-of-words ceiling": generated_emails.bag_of_words_ceiling()}
    draw("email_sequence", curves, limits, "held-out emails classified correctly (%)")

    told, _ = read_rows(FOLDER / "full" / "image-pairs" / "events.jsonl")
    ceiling = {"ceiling": next(row["ceiling"] for row in told if row["event"] == "recipe")}
    variants = {"swap-loss": "image-pairs", "no-swap-loss": "image-pairs, no-swap-loss"}
    for key, word in (("swap_consistency", "same answer in both orders"), ("accuracy", "accuracy")):
        curves = {shown: (name, f"valid_{key}") for shown, name in variants.items()}
        limits = ceiling if key == "accuracy" else {}
        draw(f"image_pairs_{key}", curves, limits, f"held-out pairs: {word} (%)")

    curves = {word: ("chest-xray-vqa", key) for key, word in ANSWERS.items()}
    limits = {"ceiling of the accuracy": generated_xrays.ceilings()["binary"]}
    draw("chest_xray_vqa", curves, limits, "held-out questions and labels (%)")


def _full(recipe: str, name: str, *flags: str) -> list[dict[str, Any]]:
    """Returns the validations of a run of the full size; a run that is finished is not trained again."""
    config = str(Path(__file__).parents[1] / "examples" / f"{recipe}.yaml")
    folder_name = name.replace(", ", "-")
    return _trained(recipe, folder_name, 0, "--config", config, *flags, folder=FOLDER / "full")[0]


def _trained(
    recipe: str, name: str, seed: int, *flags: str, folder: Path | None = None
) -> tuple[list[dict[str, Any]], float]:
    """Returns the rows of all validations of a run, and how long the command took.

    Without a folder a new one is made, so that the command is timed from the start.
    """
    folder = folder or FOLDER / recipe / time.strftime("%Y%m%d-%H%M%S")
    begin = time.monotonic()
    if not (folder / name / "finished.json").exists():
        common = ["--name", name, "--seed", str(seed), "--output-dir", str(folder), "--no-report", "--quiet"]
        if main(["train", recipe, *common, *flags]):
            raise SystemExit(f"drivetrain train {recipe} {' '.join(flags)} failed")
    seconds = time.monotonic() - begin
    rows, _ = read_rows(folder / name / "metrics.jsonl")
    print(
        f"  {name}: {', '.join(f'{key} {value:.4f}' for key, value in rows[-1].items() if 'valid' in key)}", flush=True
    )
    return rows, seconds


def _draw(path: Path, curves: dict[str, list[list[float]]], limits: dict[str, float], label: str) -> None:
    """Draw one line per run, one color per variant, a dashed line per ceiling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for number, (name, runs) in enumerate(curves.items()):
        for index, values in enumerate(runs):
            axes.plot(
                range(1, len(values) + 1), values, color=f"C{number}", marker="o", markersize=3, alpha=0.8,
                label=None if index else f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name,
            )  # fmt: skip
    for number, (name, value) in enumerate(limits.items()):
        axes.axhline(value, color="0.4", linestyle=("--", ":")[number % 2], label=f"{name} {value:.1f} %")
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
