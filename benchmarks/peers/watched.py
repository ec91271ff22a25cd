"""Runs a script of this folder and reports how it trained: `python -m benchmarks.peers.watched '{"script": …}'`.

The scripts are run as their users write them. A hook that torch has for all optimizers notes when each step ended, and
`Tensor.backward` notes the loss. A run of ours is read from its folder, since steps may be replayed by the device;
it gets a hook of its own where it is to be killed, or to end before the length that the job says it has.
"""

import hashlib
import json
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Watch:
    """Notes the end of every optimizer step, and kills this process after one of them if it is told to."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.report = Path(task["report"])
        self.kill_at = task.get("kill_at")
        self.wait_at = set(task.get("wait_at", ()))  # steps after which the device is awaited
        self.steps: list[int] = []
        self.times: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.models: list[nn.Module] = []

    def step(self, step: int) -> None:
        if step in self.wait_at and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.steps.append(step)
        self.times.append(time.time())
        self.cpu_seconds.append(time.process_time())
        if step == self.kill_at:
            self.write({})
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, more: Mapping[str, Any]) -> None:
        found = {
            "steps": self.steps,
            "times": self.times,
            "cpu_seconds": self.cpu_seconds,
            "losses": [float(loss) for loss in self.losses],
            **more,
        }
        self.report.write_text(json.dumps(found), encoding="utf-8")


def watch_others(watch: Watch) -> None:
    """Notes steps and losses of whatever trains with an optimizer of torch."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from benchmarks.peers import text

    register_optimizer_step_post_hook(lambda *_: watch.step(len(watch.steps) + 1))
    backward, make_model = torch.Tensor.backward, text.make_model

    def noting_backward(loss: torch.Tensor, *words: Any, **named: Any) -> None:
        watch.losses.append(loss.detach())
        backward(loss, *words, **named)

    def noting_model() -> nn.Module:
        watch.models.append(make_model())
        return watch.models[-1]

    torch.Tensor.backward = noting_backward  # type: ignore[method-assign]
    text.make_model = noting_model


class Noting:
    """A hook of ours that is called after every step."""

    every = 1

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, context: Any) -> None:
        self._watch.step(context.step)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def watch_ours(watch: Watch, task: Mapping[str, Any]) -> None:
    """Gives the job the hooks it is watched by, and the run its settings."""
    from dataclasses import replace

    import drivetrain as dt

    train = dt.train
    if task.get("notes_cpu"):  # probes of the plan are noted, too: the last steps are those of the run
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: watch.step(len(watch.steps) + 1))

    def with_hooks(job: Any) -> Any:
        hooks: list[Any] = [Noting(watch)] if task.get("notes_steps") else []
        if task.get("end_after"):
            hooks.append(dt.every(task["end_after"], lambda context: dt.Verdict(stop=True)))
        return train(replace(job, hooks=hooks), dt.configure(**task.get("settings", {})))

    dt.train = with_hooks


def as_bytes(value: torch.Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()


def weights_of(models: list[nn.Module]) -> str:
    """Return a hash of all weights and buffers of the model that was made last."""
    found = hashlib.sha256()
    for name, value in sorted(models[-1].state_dict().items()):
        found.update(name.encode())
        found.update(as_bytes(value.detach().cpu()))
    return found.hexdigest()


def of_a_run(folder: Path, began: float) -> dict[str, Any]:
    """Return what the folder of a run of ours says: steps, plan, and a hash of the last checkpoint's tensors."""
    from benchmarks.rivals import plan_facts, rows
    from drivetrain.checkpoint import Checkpoint

    checkpoint = Checkpoint.latest_in(folder / "checkpoints")
    assert checkpoint is not None
    found = hashlib.sha256()
    for name in sorted(checkpoint.manifest.tensors):
        found.update(name.encode())
        found.update(as_bytes(checkpoint.read(name)))
    steps = rows(folder / "steps.jsonl")
    facts = plan_facts(folder, began)
    return {
        "step_seconds": [row["seconds"] for row in steps],
        "losses": [row["loss"] for row in steps],
        "weights": found.hexdigest(),
        "plan": facts,
    }


def main(task: Mapping[str, Any]) -> None:
    watch = Watch(task)
    is_ours = task["script"].endswith("_drivetrain.py")
    if is_ours:
        watch_ours(watch, task)
    else:
        if task.get("deterministic"):
            torch.use_deterministic_algorithms(True)
        watch_others(watch)
    namespace = runpy.run_path(task["script"], run_name="__main__")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    more: dict[str, Any] = {"peak_bytes": 1024 * used}
    if torch.cuda.is_available():
        more["peak_bytes"] = torch.cuda.max_memory_allocated()
    more |= (
        of_a_run(Path(namespace["result"].folder), task["began"]) if is_ours else {"weights": weights_of(watch.models)}
    )
    watch.write(more)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
