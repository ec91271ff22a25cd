"""What `drivetrain cache` carries: a first start of GPT-2 124M, and the same where its packed caches were unpacked.

Each start is a process of its own, timed from its beginning until the first step is done. Between the two nothing is
left of what was planned and compiled but the packed file, as on a second machine of the same kind. Rates of the last
steps show that what was unpacked is what was compiled.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.contest import Measured
from benchmarks.rivals import Pace, ours
from drivetrain.core.processes import die_with_parent

CACHES = {"DRIVETRAIN_CACHE": "plans", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
PACE = Pace(5, 5, 3)
BEGAN = "BENCHMARK_BEGAN"


def measure() -> dict[str, list[float]]:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("cache needs a GPU")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        caches = {name: str(root / place) for name, place in CACHES.items()}
        first = _started(caches)
        packed = root / "warm.tar.gz"
        pack = _command(caches, "pack", packed)
        for place in caches.values():
            shutil.rmtree(place)
        unpack = _command(caches, "unpack", packed)
        second = _started(caches)
        size = packed.stat().st_size
    found = {"packing (s)": [pack], "unpacking (s)": [unpack], "packed file (MB)": [size * 1e-6]}
    for name, start in (("first start", first), ("start after unpacking", second)):
        found[f"{name}: until the first step is done (s)"] = [start["until_trained"]]
        found[f"{name}: planning (s)"] = [start["planning"]]
        found[f"{name}: of it compiling (s)"] = [start["compiling"]]
        found[f"{name}: thousand tokens/s"] = [start["rate"]]
    return found


def _started(caches: dict[str, str]) -> dict[str, float]:
    environment = {**os.environ, **caches, BEGAN: str(time.time())}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cache"], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _command(caches: dict[str, str], action: str, file: Path) -> float:
    began = time.perf_counter()
    words = [sys.executable, "-m", "drivetrain", "cache", action, str(file)]
    subprocess.run(words, env={**os.environ, **caches}, check=True)
    return time.perf_counter() - began


def main() -> None:
    """Train some steps in this process, and print what the start took."""
    from benchmarks import gpt2
    from benchmarks.plan_gpt2 import workload

    began = time.time()
    work = replace(workload(smoke=False), pace=PACE)
    found: Measured = ours(work)
    facts, step = found.facts, sorted(found.seconds)[len(found.seconds) // 2]
    before = began - float(os.environ[BEGAN])  # importing
    print(
        json.dumps({
            "until_trained": before + facts["seconds_until_trained"],
            "planning": facts["planning_seconds"],
            "compiling": facts["compile_seconds"],
            "rate": work.global_batch * gpt2.CONTEXT / step / 1e3,
        })
    )  # fmt: skip


if __name__ == "__main__":
    die_with_parent()
    main()
