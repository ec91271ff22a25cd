"""What darkroom learns in its context, over three seeds: the full size on a GPU, else the small one; with a picture."""

import json
import time
from pathlib import Path

from drivetrain.cli import main
from drivetrain.hardware import detect
from drivetrain.recipes.darkroom.scores import SCORES, DarkroomScores, draw, read_scores

SEEDS = 3
FOLDER = Path("runs") / "benchmarks" / "recipes" / "darkroom"
PICTURES = Path(__file__).parents[1] / "docs" / "images"


def measure_plain() -> dict[str, list[float]]:
    return _measure("plain")


def measure_two_region() -> dict[str, list[float]]:
    return _measure("two-region")


def _measure(context: str) -> dict[str, list[float]]:
    size = "full" if detect().gpus else "small"
    folder = FOLDER / f"{context}-{size}" / time.strftime("%Y%m%d-%H%M%S")  # never goes on with an earlier run
    runs: list[DarkroomScores] = []
    seconds: list[float] = []
    processor_seconds: list[float] = []
    for seed in range(SEEDS):
        begin, busy = time.monotonic(), time.process_time()
        flags = ["--size", size, "--context", context, "--seed", str(seed), "--name", f"seed-{seed}"]
        # The rules' plan: measuring one takes longer than it can save in a minute of training.
        ours = ["--output-dir", str(folder), "--no-report", "--no-auto-optimize", "--quiet"]
        if main(["train", "darkroom", *flags, *ours]):
            raise SystemExit(f"drivetrain train darkroom {' '.join(flags)} failed")
        seconds.append(time.monotonic() - begin)
        processor_seconds.append(time.process_time() - busy)
        runs.append(read_scores(folder / f"seed-{seed}" / SCORES))
        print(f"  seed {seed}: {json.dumps(runs[-1].summary())}, {seconds[-1]:.0f} s", flush=True)
    name = "_".join(
        ["darkroom", *(["two_region"] if context != "plain" else []), *(["full"] if size == "full" else [])]
    )
    draw(PICTURES / f"{name}.png", runs, f"darkroom, {size} size, {context} context, {SEEDS} seeds")
    every = [run.summary() for run in runs]
    return {
        f"{size} size: part of the optimum, last sixth of the episodes (%)": [
            100 * run["part_of_optimum"] for run in every
        ],
        f"{size} size: times random, last sixth of the episodes": [run["times_random"] for run in every],
        f"{size} size: return, first sixth of the episodes": [run["first"] for run in every],
        f"{size} size: return, last sixth of the episodes": [run["last"] for run in every],
        f"{size} size: return of the source, last sixth of the episodes": [run["source_last"] for run in every],
        f"{size} size: return of random actions": [every[0]["random"]],
        f"{size} size: return of the optimum": [every[0]["optimum"]],
        f"{size} size: seconds of the whole command": seconds,
        f"{size} size: processor seconds of the whole command": processor_seconds,
    }
