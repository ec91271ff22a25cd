"""Random kills: whatever is killed, whenever, the run comes to the bits of one that was never killed.

A small job with dropout, augmented samples from a loader process and a checkpoint every three steps is trained by
`drivetrain launch` with 1, 2 and 4 processes. At random moments one of these is killed with SIGKILL:

- worker: one rank; all: all ranks; launcher: the supervisor, after which the same command is started again;
- writer: rank 0 while a checkpoint is being written; loader: a process that makes samples.

Of the others, too, a third are killed while a checkpoint is being written. When a run has ended, every tensor of its
last checkpoint and every row of steps.jsonl (times aside) is compared with those of an undisturbed run.

    python -m benchmarks.random_kills --kills 300
"""

import argparse
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import drivetrain as dt
from benchmarks.contest import label
from drivetrain.checkpoint import Checkpoint
from drivetrain.hardware import detect

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
TARGETS = ("worker", "all", "launcher", "writer", "loader")
WORLDS = (1, 2, 4)
NUM_STEPS, KILLS_PER_RUN = 60, 8
START_SECONDS, SAVE_SECONDS = 240.0, 5.0


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Vectors with noise that is drawn anew whenever one is read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(512, 64, generator=generator)
        self.labels = self.inputs[:, :4].argmax(1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(64), self.labels[index]


def make_model() -> nn.Module:
    inner = (nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    return nn.Sequential(*inner)


def train(folder: Path) -> None:
    def announce(context: dt.StepContext) -> None:
        if context.world.is_main:
            (folder / "step").write_text(str(context.step))
        time.sleep(0.02)

    job = dt.Job(
        name="killed",
        model=make_model,
        data=Samples(),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
        global_batch=32,
        max_steps=NUM_STEPS,
        checkpoint_every=3,
        hooks=[dt.every(1, announce)],
    )
    dt.train(job, dt.configure(output_dir=folder / "runs", num_workers=1, report=False, gpu_mode="auto"), quiet=True)


class Run:
    """One run in a folder, killed and started again until it is finished."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self._world = folder, world
        self._start()

    def _start(self) -> None:
        words = ["launch", "--num-processes", str(self._world), "--max-restarts", "1000", *_device()]
        command = [sys.executable, "-m", "drivetrain", *words, __file__, "train", str(self.folder)]
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with (self.folder / "log.txt").open("a") as log:
            self.launcher = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def step(self) -> int:
        try:
            return int((self.folder / "step").read_text() or 0)
        except (OSError, ValueError):
            return 0

    def is_saving(self) -> bool:
        checkpoints = self.folder / "runs" / "killed" / "checkpoints"
        with suppress(OSError):
            return any(path.name.startswith(".") for path in checkpoints.iterdir())
        return False

    def kill(self, target: str, chance: random.Random) -> bool:
        """Kill something. Returns whether there was such a process."""
        if target == "launcher":
            self.launcher.kill()
            self.launcher.wait()
            self._start()
            return True
        workers = self.workers()
        if target == "loader":
            victims = [child for worker in workers for child in _children(worker)][:1]
        else:
            chosen = {"all": workers, "writer": workers[:1]}.get(target)
            victims = [chance.choice(workers)] if chosen is None and workers else chosen or []
        for victim in victims:
            with suppress(psutil.Error):
                victim.send_signal(signal.SIGKILL)
        return bool(victims)

    def workers(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            children = psutil.Process(self.launcher.pid).children()
            return sorted((each for each in children if _is_worker(each)), key=lambda each: each.pid)
        return []


def _device() -> list[str]:
    return [] if torch.cuda.is_available() else ["--cpu"]


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("drivetrain.launch.worker" in word for word in process.cmdline())
    return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]
    return []


def result_of(folder: Path) -> str:
    """Return the hash of the last checkpoint's tensors and of all steps, times aside."""
    run = folder / "runs" / "killed"
    found = hashlib.sha256()
    checkpoint = Checkpoint.latest_in(run / "checkpoints")
    assert checkpoint is not None
    for name in sorted(checkpoint.manifest.tensors):
        found.update(name.encode() + checkpoint.read(name).contiguous().numpy().tobytes())
    for line in (run / "steps.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.update(json.dumps({key: value for key, value in row.items() if key != "seconds"}).encode())
    return found.hexdigest()


def undisturbed(world: int) -> str:
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), world)
        assert run.launcher.wait(START_SECONDS) == 0, (Path(name) / "log.txt").read_text()[-3000:]
        return result_of(Path(name))


def killed(world: int, num_kills: int, chance: random.Random, book: Counter[str]) -> str:
    """Train once with so many kills; return its result."""
    with tempfile.TemporaryDirectory() as name:
        run, done = Run(Path(name), world), 0
        while done < num_kills and run.launcher.poll() is None:
            aim = run.step() + chance.randint(1, 6)
            deadline = time.monotonic() + START_SECONDS
            while run.step() < aim and run.launcher.poll() is None and time.monotonic() < deadline:
                time.sleep(0.003)
            target = chance.choice(TARGETS)
            if target == "writer" or chance.random() < 1 / 3:
                deadline = time.monotonic() + SAVE_SECONDS
                while not run.is_saving() and time.monotonic() < deadline:
                    time.sleep(0.0005)
            else:
                time.sleep(chance.random() * 0.03)
            in_save = run.is_saving()
            if run.launcher.poll() is None and run.kill(target, chance):
                done += 1
                book[target] += 1
                book[f"world {world}"] += 1
                book["inside a save"] += in_save
        run.launcher.wait(START_SECONDS)
        assert run.launcher.returncode == 0, (Path(name) / "log.txt").read_text()[-3000:]
        return result_of(Path(name))


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=300, help="how many (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and targets")
    parser.add_argument("--worlds", default="1,2,4", help="how many processes, in turn")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so long")
    arguments = parser.parse_args()
    worlds = [int(each) for each in arguments.worlds.split(",")]
    chance, book, began = random.Random(arguments.seed), Counter[str](), time.monotonic()
    expected = {world: undisturbed(world) for world in worlds}
    differences, runs = list[Any](), 0
    while sum(book[target] for target in TARGETS) < arguments.kills:
        if time.monotonic() - began > 60 * arguments.minutes:
            break
        world = worlds[runs % len(worlds)]
        if killed(world, KILLS_PER_RUN, chance, book) != expected[world]:
            differences.append({"run": runs, "world": world})
        runs += 1
        print(f"{runs} runs, {dict(book)}, differences: {differences}", flush=True)
    hardware = detect()
    document = {
        "benchmark": "random-kills",
        "command": "python -m " + " ".join(["benchmarks.random_kills", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpu": hardware.cpu.model, "cores": hardware.cpu.num_usable, "python": platform.python_version(),
                    "torch": torch.__version__},
        "seconds": round(time.monotonic() - began, 1),
        "kills": sum(book[target] for target in TARGETS),
        "runs": runs,
        "by": dict(book),
        "differences": differences,
    }  # fmt: skip
    path = RESULTS / f"random-kills-{label(hardware)}.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"kept in {path}")


if __name__ == "__main__":
    main()
