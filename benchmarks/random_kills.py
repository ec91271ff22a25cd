"""Random kills: whatever is killed, whenever, the run comes to the bits of one that was never killed.

A small job with dropout, augmented samples from a loader process and a checkpoint every three steps is trained by
`drivetrain launch` with 1, 2 and 4 processes. At random moments one of these is killed with SIGKILL:

- worker: one rank; all: all ranks; launcher: the supervisor, after which the same command is started again;
- writer: rank 0 while a checkpoint is being written; loader: a process that makes samples.

Of the others, too, a third are killed while a checkpoint is being written. When a run has ended, every tensor of its
last checkpoint and every row of steps.jsonl (times aside) is compared with those of an undisturbed run.

    python -m benchmarks.random_kills --kills 300 --parallel 4
    python -m benchmarks.random_kills --kills 30 --device cuda     worlds of 1, and of 2 that share the GPU over gloo

The result also has what a restart took, by bucket of the goodput account: `--width` makes the model, and so the
checkpoint that is read, larger. With `--parallel`, so many lanes of runs go on at once, each in a process of its own
with a seed of its own.
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
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import drivetrain as dt
from benchmarks.contest import label
from drivetrain.checkpoint import Checkpoint
from drivetrain.core.goodput import read_account
from drivetrain.hardware import detect

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
TARGETS = ("worker", "all", "launcher", "writer", "loader")
WORLDS = (1, 2, 4)
NUM_STEPS, KILLS_PER_RUN = 60, 8
OF_RESTARTS = ("recovery", "launch", "init", "restore", "step_lost")  # buckets of the goodput account
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
    width = int(os.environ.get("WIDTH", "512"))
    inner = (nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
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
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    (folder / "device").write_text(device)


class Run:
    """One run in a folder, killed and started again until it is finished."""

    def __init__(self, folder: Path, world: int, device: str) -> None:
        self.folder, self._world, self._device = folder, world, device
        self._start()

    def _start(self) -> None:
        words = ["launch", "--num-processes", str(self._world), "--max-restarts", "1000"]
        words += ["--cpu"] if self._device == "cpu" else ["--share-gpus"]
        command = [sys.executable, "-m", "drivetrain", *words, __file__, "train", str(self.folder)]
        paths = [str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, paths))
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

    def end(self) -> int | None:
        """Wait for the end; return the exit code, None where there is no end."""
        with suppress(subprocess.TimeoutExpired):
            return self.launcher.wait(START_SECONDS)
        for process in (*self.workers(), self.launcher):
            with suppress(psutil.Error):
                process.kill()
        self.launcher.wait()
        return None

    def workers(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            children = psutil.Process(self.launcher.pid).children()
            return sorted((each for each in children if _is_worker(each)), key=lambda each: each.pid)
        return []


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("drivetrain.launch.worker" in word for word in process.cmdline())
    return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]
    return []


class Outcome(NamedTuple):
    """The outcome of a run: the hash of each tensor of its last checkpoint, and its steps, times aside."""

    tensors: dict[str, str]
    steps: list[dict[str, Any]]

    def differences(self, other: "Outcome") -> list[str]:
        """Return the tensors that differ, and the values of steps, each with the first step where they do.

        Which steps have a gradient norm depends on how long that takes; where both have one, it is the same.
        """
        names = sorted({*self.tensors, *other.tensors})
        found = [name for name in names if self.tensors.get(name) != other.tensors.get(name)]
        if len(self.steps) != len(other.steps):
            found.append(f"{len(self.steps)} steps, and {len(other.steps)}")
        first: dict[str, str] = {}
        for one, two in zip(self.steps, other.steps, strict=False):
            for name in {*one, *two}:
                is_left_out = name == "grad_norm" and None in (one.get(name), two.get(name))
                if one.get(name) != two.get(name) and not is_left_out:
                    first.setdefault(name, f"{name} of step {one['step']}: {one.get(name)}, and {two.get(name)}")
        return [*found, *first.values()]


def result_of(folder: Path) -> Outcome:
    run = folder / "runs" / "killed"
    checkpoint = Checkpoint.latest_in(run / "checkpoints")
    assert checkpoint is not None
    tensors = {
        name: hashlib.sha256(checkpoint.read(name).contiguous().numpy().tobytes()).hexdigest()
        for name in sorted(checkpoint.manifest.tensors)
    }
    rows = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    return Outcome(tensors, [{name: row[name] for name in row if name != "seconds"} for row in rows])


def undisturbed(world: int, device: str) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), world, device)
        assert run.launcher.wait(START_SECONDS) == 0, (Path(name) / "log.txt").read_text()[-3000:]
        assert ((Path(name) / "device").read_text() == "cpu") == (device == "cpu")
        return result_of(Path(name))


class FailedRunError(Exception):
    """A run that was killed did not come to its end, and no more was done to it than that."""


def killed(
    world: int, num_kills: int, chance: random.Random, book: Counter[str], device: str
) -> tuple[Outcome, dict[str, float]]:
    """Train once with so many kills; return its result, and how long its restarts took, by bucket."""
    with tempfile.TemporaryDirectory() as name:
        run, done = Run(Path(name), world, device), 0
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
        code = run.end()
        if code != 0:
            raise FailedRunError(f"exit code {code}: {(Path(name) / 'log.txt').read_text()[-3000:]}")
        account = read_account(Path(name) / "runs" / "killed")
        assert account is not None
        # All of these, and so those of the first start too, which is as long as another.
        restarts = {bucket: account.seconds[bucket] for bucket in OF_RESTARTS}
        return result_of(Path(name)), restarts | {"starts": 1.0 + len(account.repair_seconds)}


def run_lane(arguments: argparse.Namespace) -> dict[str, Any]:
    """Kill and compare in this process, run after run, and return the counts."""
    worlds = [int(each) for each in arguments.worlds.split(",")]
    chance, book, began = random.Random(arguments.seed), Counter[str](), time.monotonic()
    expected = {world: undisturbed(world, arguments.device) for world in worlds}
    differences, runs, restarts = list[Any](), 0, Counter[str]()
    while (left := arguments.kills - sum(book[target] for target in TARGETS)) > 0:
        if time.monotonic() - began > 60 * arguments.minutes:
            break
        world = worlds[(runs + arguments.seed) % len(worlds)]  # lanes begin with different ones
        try:
            result, seconds = killed(world, min(KILLS_PER_RUN, left), chance, book, arguments.device)
        except FailedRunError as error:
            what = [str(error)]
        else:
            restarts.update(seconds)
            what = expected[world].differences(result)
        if what:
            differences.append({"seed": arguments.seed, "run": runs, "world": world, "what": what[:20]})
        runs += 1
        print(f"seed {arguments.seed}: {runs} runs, {dict(book)}, differences: {differences}", flush=True)
    return {"runs": runs, "by": dict(book), "differences": differences, "restarts": dict(restarts)}


def run_lanes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Divide the kills among lanes, each with a seed and a process of its own, and return what each found."""
    with tempfile.TemporaryDirectory() as folder:
        lanes = []
        for lane in range(arguments.parallel):
            kills = arguments.kills // arguments.parallel + (lane < arguments.kills % arguments.parallel)
            words = ["--kills", kills, "--seed", 1000 * arguments.seed + lane, "--worlds", arguments.worlds]
            words += ["--minutes", arguments.minutes, "--device", arguments.device, "--into", f"{folder}/{lane}"]
            command = [sys.executable, "-m", "benchmarks.random_kills", *map(str, words)]
            lanes.append(subprocess.Popen(command, cwd=REPOSITORY))
        try:
            codes = [process.wait() for process in lanes]
        finally:
            for process in lanes:
                process.kill()
                process.wait()
        if any(codes):
            print(f"lanes ended with the exit codes {codes}: what they said stands above, and the others count")
        paths = [Path(folder, str(lane)) for lane in range(arguments.parallel)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.random_kills", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--kills", type=int, default=300, help="how many (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and targets")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what they train on (default: cpu)")
    parser.add_argument("--worlds", help="how many processes, in turn (default: 1,2,4; with cuda 1,2)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so long")
    parser.add_argument("--parallel", type=int, default=1, help="so many runs at the same time (default: 1)")
    parser.add_argument("--width", type=int, default=512, help="of the model's layers (default: 512)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.worlds = arguments.worlds or ("1,2,4" if arguments.device == "cpu" else "1,2")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here that torch can use: leave --device cuda out")
    if arguments.into:
        arguments.into.write_text(json.dumps(run_lane(arguments)))
        return
    began = time.monotonic()
    os.environ["WIDTH"] = str(arguments.width)
    found = run_lanes(arguments) if arguments.parallel > 1 else [run_lane(arguments)]
    book = sum((Counter(lane["by"]) for lane in found), Counter[str]())
    restarts = Counter[str]()
    for lane in found:
        restarts.update(lane["restarts"])
    hardware = detect()
    document = {
        "benchmark": "random-kills",
        "command": "python -m " + " ".join(["benchmarks.random_kills", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpu": hardware.cpu.model, "cores": hardware.cpu.num_usable, "python": platform.python_version(),
                    "torch": torch.__version__, "gpus": [gpu.name for gpu in hardware.gpus]},
        "device": arguments.device,
        "seconds": round(time.monotonic() - began, 1),
        "kills": sum(book[target] for target in TARGETS),
        "runs": sum(lane["runs"] for lane in found),
        "by": dict(book),
        "width": arguments.width,
        "seconds_of_a_start": {name: round(restarts[name] / restarts["starts"], 3) for name in OF_RESTARTS},
        "differences": [difference for lane in found for difference in lane["differences"]],
    }  # fmt: skip
    path = arguments.out / f"random-kills-{arguments.device}-{label(hardware)}.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"{document['kills']} kills, {len(document['differences'])} runs that differ; kept in {path}")


if __name__ == "__main__":
    main()
