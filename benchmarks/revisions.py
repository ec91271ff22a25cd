"""The speed of the loop in this revision against an earlier one: the same jobs, two processes, rounds interleaved.

The earlier revision is a folder with its `src`, named by `DRIVETRAIN_BEFORE`:

    mkdir .baseline && git archive REVISION src | tar -x -C .baseline
    DRIVETRAIN_BEFORE=.baseline python -m benchmarks revisions

Measured are small steps on a CPU and, where there is a GPU, the steps of `benchmarks.capture`: replayed and not
replayed, each also with `bad_steps="stop"` where the revision has it (skipping bad steps takes kernels). Both processes
are started anew several times, each of them first in half of the pairs: how fast the host is differs more from process
to process than from round to round.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import drivetrain as dt
from benchmarks import capture

PAIRS, ROUNDS = 4, 2  # pairs of processes, and rounds of each
CPU_STEPS = 1200
PLAIN_STEPS = 1500
BEFORE, AFTER = "before", "after"


def measure() -> dict[str, list[float]]:
    folder = Path(os.environ.get("DRIVETRAIN_BEFORE", ""))
    if not (folder / "src" / "drivetrain").is_dir():
        raise SystemExit("set DRIVETRAIN_BEFORE to a folder that has the earlier revision's src/drivetrain")
    root = Path(__file__).parent.parent
    samples: dict[str, list[float]] = {}
    for pair in range(PAIRS):
        sources = [(BEFORE, folder / "src"), (AFTER, root / "src")]
        for number, found in enumerate(_rounds(dict(sources if pair % 2 else reversed(sources)), root), 1):
            print(f"pair {pair + 1} of {PAIRS}, round {number} of {ROUNDS}: {found}", file=sys.stderr, flush=True)
            for what, value in found[AFTER].items():
                for name in (BEFORE, AFTER):
                    samples.setdefault(f"{name}: {what}", []).append(found[name][what])
                samples.setdefault(f"after / before: {what.partition(' (')[0]} (ratio)", []).append(
                    value / found[BEFORE][what]
                )
    return samples


def _rounds(sources: Mapping[str, Path], root: Path) -> Iterator[dict[str, dict[str, float]]]:
    """Start a process for each revision, in this order, and yield what they measure in each round but the first."""
    with ExitStack() as closing_both:
        children = {name: closing_both.enter_context(closing(_Child(source, root))) for name, source in sources.items()}
        for number in range(ROUNDS + 1):
            names = (BEFORE, AFTER) if number % 2 else (AFTER, BEFORE)
            found = {name: children[name].round(warms=number == 0) for name in names}
            if number:
                yield found


class _Child:
    """A process that has imported one of the two revisions."""

    def __init__(self, source: Path, root: Path) -> None:
        path = os.pathsep.join([str(source.absolute()), str(root), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.revisions", str(source.absolute())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def round(self, *, warms: bool) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("warm up\n" if warms else "measure\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve(source: Path) -> None:
    """Answer each line of standard input with the measurements of one round."""
    if not Path(dt.__file__).is_relative_to(source):
        raise SystemExit(f"{dt.__file__} was imported, not the revision in {source}")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images = TensorDataset(torch.rand(capture.NUM_SAMPLES, 784), torch.randint(0, 10, (capture.NUM_SAMPLES,)))
    for line in sys.stdin:
        share = 4 if line.startswith("warm") else 1
        found = {"a step on the CPU (µs of the main thread)": 1e6 * _on_cpu(images, CPU_STEPS // share)}
        if torch.cuda.is_available():
            steps, plain_steps = capture.STEPS // share, PLAIN_STEPS // share
            stop = {"bad_steps": "stop"} if _may_skip() else {}
            for name, number, mode in (("captured", steps, "on"), ("not captured", plain_steps, "off")):
                found[f"steps {name} (per second)"] = capture.by_drivetrain(images, number, mode)
                found[f"steps {name}, bad ones not skipped (per second)"] = capture.by_drivetrain(
                    images, number, mode, **stop
                )
        print(json.dumps(found), flush=True)


def _may_skip() -> bool:
    """Return whether this revision has the setting that says what follows a bad step."""
    try:
        dt.configure(bad_steps="stop")
    except dt.ConfigError:
        return False
    return True


def _on_cpu(images: TensorDataset, steps: int) -> float:
    """Return the median seconds that a step takes of the main thread, from one loss to the next."""
    begun: list[float] = []

    def loss(network: nn.Module, batch: Any) -> Tensor:
        begun.append(time.thread_time())
        return functional.cross_entropy(network(batch[0][:, :64]), batch[1])

    with tempfile.TemporaryDirectory() as folder:
        job = dt.Job(
            name="revisions",
            model=lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
            data=images,
            loss=loss,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
            global_batch=32,
            max_steps=steps,
            checkpoint_every=steps,
        )
        settings = dt.configure(output_dir=folder, gpu_mode="cpu", report=False, auto_optimize=False)
        dt.train(job, settings, quiet=True)
    return statistics.median(b - a for a, b in pairwise(begun[steps // 4 :]))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
