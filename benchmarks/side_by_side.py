"""The same job by several trainers, side by side: the scripts `benchmarks/peers/text_*.py`, as their users write them.

Every run is a fresh process, started here, in a folder of its own; trainers take turns, round after round. A trainer
has up to four competitors:

- NAME: the whole job with a checkpoint every so many steps, and the flags that its documentation recommends for speed;
- NAME-default: the same without these flags;
- NAME-tiny: a network so small that what is left of a step is the trainer;
- NAME-killed: a shorter job three times: undisturbed; killed with SIGKILL between two checkpoints; started again
  with the same command. The weights at the end are compared bit by bit with those of the undisturbed one.

Nothing here imports torch: how long a process takes to its first step counts from its start.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.contest import Circumstances, Competitor, Contest, Measured

PEERS = Path(__file__).parent / "peers"
NAMES = ("side-by-side", "side-by-side-gpu")
TRAINERS = {  # in the order of the tables: the script, the packages it needs
    "ours": ("drivetrain", ()),
    "plain": ("plain", ()),
    "tuned": ("tuned", ()),
    "accelerate": ("accelerate", ("accelerate",)),
    "fabric": ("fabric", ("lightning",)),
    "lightning": ("lightning", ("lightning",)),
    "hf": ("hf_trainer", ("transformers", "accelerate")),
}
HAVE_DEFAULTS = ("accelerate", "fabric", "lightning", "hf")
SMOOTHED = 10  # steps that a loss is averaged over


@dataclass(frozen=True)
class Setting:
    """A setting: sizes of `benchmarks.peers.text`, and where they run."""

    size: str
    batch: int
    context: int
    target_loss: float
    steps: int
    save_every: int
    warm_steps: int
    kill: tuple[int, int, int]  # steps of the job that is killed, steps between its checkpoints, the step it dies after
    tiny_steps: int
    declared_steps: int  # how long ours is told that the job is: what a plan may spend depends on it
    on_gpu: bool
    rounds: int
    cap_seconds: float


CPU = Setting("small", 8, 32, 4.5, 240, 60, 20, (120, 40, 60), 400, 240, False, 3, 300)
GPU = Setting("large", 16, 1024, 7.5, 100, 40, 10, (40, 10, 15), 400, 4000, True, 2, 150)
SMOKE = Setting("tiny", 4, 8, 2.8, 60, 20, 10, (12, 4, 6), 60, 60, False, 1, 120)


def run_python(words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> int:
    """Run a fresh interpreter in a folder until it ends, and return its exit code."""
    with log.open("ab") as file:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=file, check=False).returncode


class Runner:
    """Starts the script of a trainer in a folder, and reads what was reported of it."""

    def __init__(self, trainer: str, setting: Setting, folder: Path, sizes: Mapping[str, Any]) -> None:
        self._script = PEERS / f"text_{TRAINERS[trainer][0]}.py"
        self.is_ours = trainer == "ours"
        self._setting, self._folder, self._sizes = setting, folder, dict(sizes)
        folder.mkdir()

    def run(self, **task: Any) -> dict[str, Any]:
        """Train once. With `kill_at` the process has to end by SIGKILL, otherwise by itself.

        Args:
            **task: What `benchmarks.peers.watched` is told besides.
        """
        report, began = self._folder / "report.json", time.time()
        report.unlink(missing_ok=True)
        told = {"script": str(self._script), "report": str(report), "began": began, **task}
        sizes = self._sizes
        if self.is_ours and self._setting.on_gpu and "end_after" in task:
            sizes = {**sizes, "steps": self._setting.declared_steps}
        root = str(PEERS.parents[1])
        paths = [f"{root}/src", root, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "SIDE_BY_SIDE": json.dumps(sizes),
            "TOKENIZERS_PARALLELISM": "false",
            **({} if self._setting.on_gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}),
            **({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if task.get("deterministic") else {}),
        }
        log = self._folder / "log.txt"
        code = run_python(["-m", "benchmarks.peers.watched", json.dumps(told)], self._folder, environment, log)
        if code != (-signal.SIGKILL if task.get("kill_at") else 0) or not report.exists():
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            raise RuntimeError(f"its process ended with {code}: {' | '.join(last)[-500:]}")
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        found["began"] = began
        return found


def ends_of_steps(found: Mapping[str, Any]) -> list[float]:
    """Return when each step ended, in seconds from the start of the process."""
    if "step_seconds" not in found:
        return [moment - found["began"] for moment in found["times"]]
    ends, now = [], found["plan"]["seconds_until_start"]
    for seconds in found["step_seconds"]:
        now += seconds
        ends.append(now)
    return ends


def points(setting: Setting, steps: int) -> list[int]:
    """Return the steps between which time is taken: every tenth, and those before and after a save."""
    saves = range(setting.save_every, steps, setting.save_every)
    found = {1, *range(setting.warm_steps, steps + 1, 10), *saves, *(save + 1 for save in saves), steps}
    return sorted(found)


def windows(ends: Sequence[float], setting: Setting) -> list[float]:
    """Return seconds per step between points that are five steps apart and more, and have no save between them."""
    places = [point for point in points(setting, len(ends)) if point >= setting.warm_steps]
    return [
        (ends[last - 1] - ends[first - 1]) / (last - first) for first, last in pairwise(places) if last - first >= 5
    ]


def stalls(ends: Sequence[float], setting: Setting, usual: float, is_ours: bool) -> tuple[list[float], list[float]]:
    """Return by how many milliseconds each save prolongs the longest step around it, and all steps up to the next.

    Others save after a step, which the next one waits for. When a step of ours is done is read from its folder, and
    what goes on beside training may hold up any of the next steps.
    """
    longest, everything = [], []
    tail = min(setting.save_every - 1, 20)
    for save in range(setting.save_every, len(ends) - tail + 1, setting.save_every):
        first = save - 1 if is_ours else save
        last = first + 1 if setting.on_gpu and not is_ours else save + 5
        steps = [ends[place] - ends[place - 1] for place in range(first, last)]
        longest.append(1e3 * max(0.0, max(steps) - usual))
        everything.append(1e3 * (ends[save + tail - 1] - ends[first - 1] - (save + tail - first) * usual))
    return longest, everything


def reached(losses: Sequence[float], ends: Sequence[float], target: float) -> float | None:
    """Return after how many seconds the mean loss of the last ten steps was at the target; None: never."""
    for last in range(SMOOTHED, min(len(losses), len(ends)) + 1):
        if statistics.fmean(losses[last - SMOOTHED : last]) <= target:
            return ends[last - 1]
    return None


def speed(trainer: str, setting: Setting, tuned: bool, told: Circumstances) -> Measured:
    """Train the whole job once, with its saves."""
    task: dict[str, Any] = {"wait_at": points(setting, setting.steps)}
    if trainer == "ours":
        task |= {"end_after": setting.steps} if setting.on_gpu else {"notes_cpu": True}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"size": setting.size, "steps": setting.steps, "save_every": setting.save_every, "tuned": tuned}
        found = Runner(trainer, setting, Path(folder) / "run", sizes).run(**task)
    ends = ends_of_steps(found)
    seconds = windows(ends, setting)
    longest, everything = stalls(ends, setting, statistics.median(seconds), trainer == "ours")
    facts: dict[str, Any] = {
        "first_step_seconds": round(ends[0], 2),
        "target_seconds": _rounded(reached(found["losses"], ends, setting.target_loss)),
        "last_loss": _rounded(statistics.fmean(found["losses"][-SMOOTHED:]), 4),
        "peak_bytes": found["peak_bytes"],
        "save_stall_ms": [_rounded(value) for value in longest],
        "save_extra_ms": [_rounded(value) for value in everything],
        "weights": found["weights"][:16],
        "losses": [_rounded(value, 4) for value in found["losses"][::10]],
    }
    cpu = found["cpu_seconds"][-setting.steps :]
    if cpu and not setting.on_gpu:
        timed = cpu[setting.warm_steps :]
        facts["cpu_ms_per_step"] = _rounded(1e3 * (timed[-1] - timed[0]) / (len(timed) - 1))
        facts["first_step_cpu_seconds"] = _rounded(cpu[0])
    if "plan" in found:
        plan = found["plan"]
        facts["peak_bytes"] = plan.get("peak_bytes", found["peak_bytes"])
        facts |= {key: plan[key] for key in ("planning_seconds", "compile_seconds", "from_cache", "plan")}
    return Measured(seconds, facts)


def tiny(trainer: str, setting: Setting, told: Circumstances) -> Measured:
    """Train a network of next to nothing: a step is what the trainer costs, in CPU time where there is no GPU."""
    steps, warm = setting.tiny_steps, setting.tiny_steps // 4
    task: dict[str, Any] = {"wait_at": list(range(warm, steps + 1, 50))}
    if trainer == "ours":
        task["notes_cpu"] = not setting.on_gpu
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"size": "tiny", "steps": steps, "save_every": 10 * steps, "tuned": True, "compiled": False}
        found = Runner(trainer, setting, Path(folder) / "run", sizes).run(**task)
    wall = ends_of_steps(found)[-steps:]
    clock = wall if setting.on_gpu else found["cpu_seconds"][-steps:]
    width = max(1, (steps - warm) // 6)
    cuts = list(range(warm, steps + 1, width))
    micros = [1e6 * (clock[last - 1] - clock[first - 1]) / width for first, last in pairwise(cuts)]
    clock_name = "wall" if setting.on_gpu else "CPU"
    return Measured([], {"step_us": [_rounded(value, 1) for value in micros], "clock": clock_name})


def killed(trainer: str, setting: Setting, told: Circumstances) -> Measured:
    """Train undisturbed, and killed and started again: what was lost, and do the weights agree?"""
    steps, save_every, kill_at = setting.kill
    sizes = {"size": setting.size, "steps": steps, "save_every": save_every}
    task: dict[str, Any] = {"deterministic": setting.on_gpu}
    if trainer == "ours":
        task |= {"notes_steps": True, "settings": {"deterministic": True} if setting.on_gpu else {}}
    with tempfile.TemporaryDirectory() as folder:
        whole = Runner(trainer, setting, Path(folder) / "whole", sizes).run(**task)
        again = Runner(trainer, setting, Path(folder) / "killed", sizes)
        first = again.run(kill_at=kill_at, **task)
        second = again.run(**task)
    done = len(second["times"])
    went_on_after = steps - done
    # Up to the kill both did the same. Where that differs, the job does not even repeat, and nothing can be said.
    before = first["losses"] or second["losses"][:went_on_after]
    repeats = before == whole["losses"][: len(before)]
    differs = None
    if second["weights"] != whole["weights"]:
        pairs = zip(whole["losses"][-done:], second["losses"][-done:], strict=False)
        differs = next((went_on_after + place for place, (a, b) in enumerate(pairs, 1) if a != b), steps)
    back = second["times"][kill_at - went_on_after - 1] if went_on_after < kill_at else second["times"][0]
    return Measured(
        [],
        {
            "steps_lost": kill_at - went_on_after,
            "seconds_lost": round(back - first["times"][-1], 2),
            "repeats": repeats,
            "same_bits": differs is None,
            "differs_from_step": differs,
            "last_losses": [_rounded(each["losses"][-1], 6) for each in (whole, second)],
        },
    )


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


WORDS = {
    "ours": "dt.train(job) with no flags",
    "plain": "a loop as most people write it: DataLoader, AdamW as torch makes it, torch.save of weights, moments and "
    "step",
    "tuned": "a loop with every flag: data on the device, fused AdamW, on a GPU torch.compile and TF32; it saves the "
    "states of the generators and skips to its place in the epoch",
    "accelerate": "Accelerate: fused AdamW, on a GPU its dynamo backend and TF32; save_state, load_state, "
    "skip_first_batches, seedable sampler",
    "fabric": "Fabric: fused AdamW, on a GPU torch.compile and TF32; fabric.save, fabric.load",
    "lightning": "Lightning's Trainer: no logger, bar or summary, on a CPU fused AdamW (with bf16 it refuses to clip "
    "gradients of a fused one), on a GPU torch.compile and TF32; ModelCheckpoint, ckpt_path",
    "hf": "Trainer of transformers: no bar, fused AdamW (its default), on a GPU torch_compile and TF32; save_steps, "
    "resume_from_checkpoint",
}


def _competitors(setting: Setting) -> list[Competitor]:
    found = []
    for trainer, (_, needs) in TRAINERS.items():
        words = WORDS[trainer]
        kinds = {
            "": (words, partial(speed, trainer, setting, trainer != "plain")),
            "-tiny": (f"{words}; a tiny network", partial(tiny, trainer, setting)),
            "-killed": (f"{words}; killed and started again", partial(killed, trainer, setting)),
        }
        if trainer in HAVE_DEFAULTS:
            kinds["-default"] = (f"{trainer}, without the flags for speed", partial(speed, trainer, setting, False))
        for kind, (what, measure) in kinds.items():
            found.append(
                Competitor(f"{trainer}{kind}", what, measure, cap_seconds=setting.cap_seconds, alone=True, needs=needs)
            )
    return found


def _order(setting: Setting) -> list[str]:
    """Return the order: what matters most first, as a budget may cut off the rest; rounds interleave all trainers."""
    tiny_ones, killed_ones = ([f"{name}-{kind}" for name in TRAINERS] for kind in ("tiny", "killed"))
    defaults = [f"{name}-default" for name in HAVE_DEFAULTS]
    if setting.on_gpu:
        return [*TRAINERS, *killed_ones, *defaults, *tiny_ones, *TRAINERS]
    order = [*TRAINERS, *tiny_ones, *killed_ones, *defaults]
    for _ in range(setting.rounds - 1):
        order += [*TRAINERS, *tiny_ones]
    return order


def contest(name: str, smoke: bool = False) -> Contest:
    setting = SMOKE if smoke else GPU if name == "side-by-side-gpu" else CPU
    models = {"large": "GPT of 99 million weights, 12 layers, bf16", "small": "GPT of 0.37 million weights, fp32"}
    steps, save_every, kill_at = setting.kill
    return Contest(
        name=name,
        module=__name__,
        workload={
            "model": models.get(setting.size, "a tiny GPT"),
            "global_batch": setting.batch,
            "sequence": setting.context,
            "dropout": 0.1,
            "steps": setting.steps,
            "checkpoint_every": setting.save_every,
            "target_loss": setting.target_loss,
            "killed": f"after step {kill_at} of {steps}, with a checkpoint every {save_every} steps",
            "threads": "all cores" if setting.on_gpu else 1,
        },
        unit="tokens/s",
        units_per_step=setting.batch * setting.context,
        competitors=tuple(_competitors(setting)),
        order=tuple(_order(setting)),
        shown_as="side by side",
    )
