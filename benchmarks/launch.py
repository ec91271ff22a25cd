"""What `drivetrain launch` adds to the start of a job: from the command to the end of its first step.

Against plain python on one process, and against torchrun on two. Each sample is a fresh job; the kinds are interleaved,
so that a busy machine slows all of them alike. The clock is the monotonic one, which all processes of a machine share.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 7
SCRIPT = """
import sys, time
import torch
import drivetrain as dt
from drivetrain.config import configure

class First:
    every = 1
    def __call__(self, context):
        if context.step == 1 and context.world.is_main:
            print("first step", time.monotonic(), flush=True)
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

inputs = torch.randn(64, 8)
job = dt.Job(
    name="first",
    model=lambda: torch.nn.Linear(8, 2),
    data=torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long()),
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    hooks=[First()],
    global_batch=16,
    max_steps=2,
)
dt.train(job, configure(output_dir=sys.argv[1], num_workers=0, gpu_mode="cpu", report=False))
"""
PLAIN, ONE, TWO, TORCHRUN = (
    "plain python",
    "drivetrain launch, 1 process",
    "drivetrain launch, 2 processes",
    "torchrun, 2",
)


def measure() -> dict[str, list[float]]:
    kinds = {
        PLAIN: [sys.executable],
        ONE: [sys.executable, "-m", "drivetrain", "launch", "--cpu"],
        TWO: [sys.executable, "-m", "drivetrain", "launch", "--cpu", "--num-processes", "2"],
        TORCHRUN: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.py"
        script.write_text(SCRIPT)
        for words in kinds.values():
            seconds_to_first_step(words, script)  # once for the disk's sake
        samples: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind, words in kinds.items():
                samples[kind].append(seconds_to_first_step(words, script))
    named = {f"{kind}, to the first step (s)": values for kind, values in samples.items()}
    added = [ours - plain for plain, ours in zip(samples[PLAIN], samples[ONE], strict=True)]
    second = [ours - theirs for theirs, ours in zip(samples[TORCHRUN], samples[TWO], strict=True)]
    return {
        **named,
        "what launch adds to plain python, 1 process (s)": added,
        "what launch takes more than torchrun, 2 processes (s)": second,
    }


def seconds_to_first_step(words: list[str], script: Path) -> float:
    with tempfile.TemporaryDirectory() as runs:
        began = time.monotonic()
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*words, str(script), runs], capture_output=True, text=True, check=True, env=environ, cwd=runs
        )
        line = next(line for line in done.stdout.splitlines() if line.startswith("first step"))
        return float(line.split()[-1]) - began
