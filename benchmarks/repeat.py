"""What makes steps repeat to the bit on a GPU, and what it costs; and whether whole runs then do, killed and resumed.

`repeat`: for each job of `repeat_jobs` the plan, measured with no flags, says whether the fastest way repeats and what
the cheapest that does costs. `repeat-runs`: the job is trained with `--deterministic` twice, each time with empty
compile caches: once at a stretch, once killed with SIGKILL and resumed; weights, optimizer and losses are compared.
`repeat-attention`: steps of GPT-2 124M in one process, interleaved: the fastest kernels, and kernels that repeat with
torch's own blocks and with ours in the backward of flex attention.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from benchmarks.gpt2 import CONTEXT, VOCABULARY, Gpt2, loss_of
from drivetrain.core import precision

PLANNED_STEPS, STEPS = 20_000, 200  # of a job that is long enough to be compiled; of those that are run
JOBS = tuple(os.environ.get("REPEAT_JOBS", "gpt2,lstm,transformer,cnn").split(","))
FLAGS = ("--deterministic", "--compile", "--no-auto-optimize", "--no-report")
ATTENTION_BATCH, ATTENTION_ROUNDS, ATTENTION_STEPS = 64, 12, 8
KILL_AFTER = STEPS // 2  # steps; a checkpoint is saved every 50


def measure() -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job in JOBS:
            found |= _of_plan(job, planned(job, Path(folder) / f"{job}-plan"))
    return found


def measure_runs() -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        return whole_runs(Path(folder))


def measure_attention() -> dict[str, list[float]]:
    """Return milliseconds per step by round, and what repeating costs against the fastest kernels of each round."""
    if not torch.cuda.is_available():
        raise SystemExit("repeat-attention needs a GPU")
    text = torch.randint(0, VOCABULARY, (ATTENTION_BATCH, CONTEXT + 1), device="cuda")
    batch = [text[:, :-1].contiguous(), text[:, 1:].contiguous()]
    torch.manual_seed(0)
    model = Gpt2().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    torchs_own = dict.fromkeys(precision._OPTIONS)
    variants = {
        "the fastest kernels": (False, precision._OPTIONS),
        "repeating, torch's blocks": (True, torchs_own),
        "repeating, our blocks": (True, precision._OPTIONS),
    }
    compiled: dict[str, Any] = {}

    def step(name: str) -> None:
        repeats, blocks = variants[name]
        switches = precision.numerics(precision.Precision("bf16", "cuda"), deterministic=repeats, cudnn_benchmark=False)
        with mock.patch.object(precision, "_OPTIONS", blocks), switches:
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled[name](model, batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for name, (repeats, _) in variants.items():
        options = {"deterministic": True, "fallback_random": True} if repeats else {}
        compiled[name] = torch.compile(lambda model, batch: loss_of(model, batch), options=options or None)
        for _ in range(3):
            step(name)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ATTENTION_ROUNDS):
        for name in variants:
            step(name)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(ATTENTION_STEPS):
                step(name)
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - began) / ATTENTION_STEPS * 1e3)
    fastest, *others = times.items()
    found = {f"{name} (ms per step)": values for name, values in times.items()}
    for name, values in others:
        found[f"{name}: cost (%)"] = [100 * (a / b - 1) for a, b in zip(values, fastest[1], strict=True)]
    return found


def planned(job: str, folder: Path) -> dict[str, Any]:
    """Return the plan with no flags."""
    folder.mkdir()
    command = _command("plan", job, folder, "--measure", "--out", str(folder / "plan.yaml"))
    done = subprocess.run(command, env=_environment(folder, PLANNED_STEPS), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    plan: dict[str, Any] = yaml.safe_load((folder / "plan.yaml").read_text())
    print(f"{job}: {json.dumps(plan['repeatable'], indent=1, ensure_ascii=False)}", flush=True)
    print(f"  planned in {plan['planning_seconds']} s: {[row['way'] for row in plan['tried']][-1]}", flush=True)
    return plan


def _of_plan(job: str, plan: dict[str, Any]) -> dict[str, list[float]]:
    row = plan["repeatable"]
    if "tried" not in row:
        return {f"{job}: tried whether it repeats (1: yes)": [0.0]}
    fastest, *others = row["tried"]
    repeating = [trial for trial in row["tried"] if trial["repeats"] == "yes"]
    costs = [float(trial["cost"].split()[0]) for trial in others if "cost" in trial]
    found = {
        f"{job}: the fastest way repeats (1: yes)": [float(fastest["repeats"] == "yes")],
        f"{job}: the plan follows a way that repeats (1: yes)": [float(row["value"] == "yes")],
        f"{job}: planning (s)": [plan["planning_seconds"]],
        f"{job}: fastest way (ms per step)": [1e3 * plan["forecast"]["step_seconds"] / (1 + _percent(row) / 100)],
    }
    if repeating and costs:
        found[f"{job}: cost of the cheapest way that repeats (%)"] = [min(costs)]
    return found


def _percent(row: dict[str, Any]) -> float:
    return float(row["cost"].split()[0]) if "cost" in row else 0.0


def whole_runs(folder: Path) -> dict[str, list[float]]:
    """Run all at the same time: bits do not depend on how long a step takes, and if they did, it would be seen here."""
    runs = {(job, kind): _Run(job, folder / f"{job}-{kind}") for job in JOBS for kind in ("whole", "killed")}
    while any(not run.is_done for run in runs.values()):
        for (_, kind), run in runs.items():
            run.look(kills=kind == "killed")
        time.sleep(0.1)
    found = {}
    for job in JOBS:
        whole, killed = (runs[job, kind].bits() for kind in ("whole", "killed"))
        print(f"{job}: {len(whole[0])} losses, killed at step {runs[job, 'killed'].killed_at}")
        found[f"{job}: --deterministic, {STEPS} steps, killed and resumed: same bits (1: yes)"] = [
            float(whole == killed and len(whole[0]) == STEPS)
        ]
    return found


class _Run:
    """A run with --deterministic, which is killed once and started again where `look` is told to."""

    def __init__(self, job: str, folder: Path) -> None:
        folder.mkdir()
        self._job, self._folder = job, folder
        self.killed_at: int | None = None
        self._start("a")

    def _start(self, caches: str) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                _command("train", self._job, self._folder, *FLAGS),
                env=_environment(self._folder / caches, STEPS),
                stdout=log,
                stderr=log,
            )

    @property
    def is_done(self) -> bool:
        return self._process.poll() is not None

    def look(self, *, kills: bool) -> None:
        if kills and self.killed_at is None and len(self._losses()) >= KILL_AFTER:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self.killed_at = len(self._losses())
            self._start("b")

    def _losses(self) -> dict[int, float]:
        try:
            lines = (self._folder / self._job / "steps.jsonl").read_text().splitlines()
        except OSError:
            return {}
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return {row["step"]: row["loss"] for row in rows}

    def bits(self) -> tuple[dict[int, float], dict[str, str]]:
        """Return every loss, and the hash of the last checkpoint: weights, buffers and optimizer state."""
        if self._process.returncode:
            raise SystemExit((self._folder / "log").read_text()[-3000:])
        newest = max((self._folder / self._job / "checkpoints").glob("*/manifest.json"))
        files = json.loads(newest.read_text())["manifest"]["files"]
        return self._losses(), {name: file["sha256"] for name, file in files.items()}


def _command(verb: str, job: str, folder: Path, *words: str) -> list[str]:
    target = f"benchmarks.repeat_jobs:{job}"
    return [sys.executable, "-m", "drivetrain", verb, target, "--output-dir", str(folder), *words]


def _environment(folder: Path, steps: int) -> dict[str, str]:
    """Return an environment with empty caches of compilers and plans."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "DRIVETRAIN_CACHE": "drivetrain"}
    places = {name: str(folder / cache) for name, cache in caches.items()}
    return {**os.environ, **places, "REPEAT_STEPS": str(steps)}
