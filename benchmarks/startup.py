"""What it costs to start: imports against torch's own, hardware detection, `drivetrain check`.

Each sample is a fresh interpreter; the kinds are interleaved, so that a busy machine slows all of them alike.
"""

import subprocess
import sys

ROUNDS = 7
SNIPPETS = {
    "import torch (s)": "import torch",
    "import torch and every public name of drivetrain (s)": (
        "import torch, drivetrain; [getattr(drivetrain, name) for name in drivetrain.__all__]"
    ),
    "import drivetrain alone (s)": "import drivetrain",
}
AFTER_IMPORT = {
    "detect() after import (s)": ("from drivetrain.hardware import detect", "detect()"),
    "drivetrain check after import (s)": (
        "import io, contextlib; from drivetrain.cli import main",
        "contextlib.redirect_stdout(io.StringIO()).__enter__(); main(['check'])",
    ),
}


def measure() -> dict[str, list[float]]:
    programs = {name: timed("pass", code) for name, code in SNIPPETS.items()}
    programs |= {name: timed(setup, code) for name, (setup, code) in AFTER_IMPORT.items()}
    for program in programs.values():
        seconds(program)  # once for the disk's sake
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            samples[name].append(seconds(program))
    torch, ours = samples["import torch (s)"], samples["import torch and every public name of drivetrain (s)"]
    samples["ratio of the two imports"] = [mine / theirs for theirs, mine in zip(torch, ours, strict=True)]
    return samples


def timed(setup: str, code: str) -> str:
    lines = [setup, "import sys, time", "begin = time.perf_counter()", code]
    return "\n".join([*lines, "sys.stderr.write(str(time.perf_counter() - begin))"])


def seconds(program: str) -> float:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stderr.splitlines()[-1])
