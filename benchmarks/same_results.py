"""Compares what two versions of the code train, bit by bit: `python -m benchmarks.same_results COMMIT`.

Each of a fixed set of jobs is trained by the code of the commit and by the working tree: losses and the other fields of
`steps.jsonl`, every tensor of the last checkpoint, what its manifest says of the run, the order of samples and the plan
have to be the same, times aside. A run that the commit has begun and that was killed is resumed by the working tree,
and has to come to the same as a run of the commit that was never interrupted. To be run before and after a change of
structure that must not change results. The jobs use nothing but the public interface.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
JOBS = REPOSITORY / "benchmarks" / "same_results_jobs.py"
RESUMED = ("steps.jsonl", "checkpoint files")  # what a resumed run has in common with one at a stretch
TIMES = ("seconds", "time", "samples_per_second", "mfu")  # fields whose names contain one of these are left out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit", help="what the working tree is compared with")
    parser.add_argument("--only", help="one job by name")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = folder / "before"
        subprocess.run(
            ["git", "-C", str(REPOSITORY), "worktree", "add", "--detach", str(before), arguments.commit],
            check=True,
            capture_output=True,
        )
        try:
            differences = list(compare(before, folder, arguments.only))
        finally:
            subprocess.run(["git", "-C", str(REPOSITORY), "worktree", "remove", "--force", str(before)], check=True)
    print("\n".join(differences) if differences else "everything is the same")
    sys.exit(bool(differences))


def compare(before: Path, folder: Path, only: str | None) -> list[str]:
    """Return what differs, in words."""
    names = [only] if only else _run(REPOSITORY, "names", folder, "").split()
    found = []
    for name in names:
        old, new, both = (folder / kind / name for kind in ("old", "new", "both"))
        _run(before, name, old, "")
        _run(REPOSITORY, name, new, "")
        _run(before, name, both, "interrupted")
        _run(REPOSITORY, name, both, "")
        expected, resumed = _facts(old), _facts(both)
        own = [f"{name}, trained: {text}" for text in _differences(expected, _facts(new))]
        for kind in RESUMED:
            own += [f"{name}, resumed: {text}" for text in _differences(expected[kind], resumed[kind], f"{kind}: ")]
        print(f"{name}: {'; '.join(own) or 'the same'}", flush=True)
        found += own
    return found


def _run(tree: Path, name: str, folder: Path, how: str) -> str:
    path = os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(JOBS), name, str(folder), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != (9 if how else 0):
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def _facts(folder: Path) -> dict[str, Any]:
    """Return everything of a run that must not change."""
    import yaml

    run = folder / "run"
    newest = max((run / "checkpoints").glob("step-*/manifest.json"))
    manifest = json.loads(newest.read_text())["manifest"]
    rows = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    return {
        "steps.jsonl": [_without_times(row) for row in rows],
        "checkpoint files": {name: file["sha256"] for name, file in manifest["files"].items()},
        "manifest": _without_times({key: value for key, value in manifest.items() if key != "files"}),
        "plan.yaml": _without_times(yaml.safe_load((run / "plan.yaml").read_text())),
        "samples": (folder / "samples.txt").read_text().split(),
    }


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if not any(word in str(key) for word in TIMES)}
        return {key: _without_times(each) for key, each in kept.items()}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


def _differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Return where two values differ: at most three places."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = [f"{where}{key} is gone" for key in old if key not in new]
        for key in old:
            if key in new:
                found += _differences(old[key], new[key], f"{where}{key}: ")
        return found[:3]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        found = []
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            found += _differences(one, other, f"{where}{number}: ")
        return found[:3]
    return [] if old == new else [f"{where}{str(old)[:80]} before, {str(new)[:80]} now"]


if __name__ == "__main__":
    main()
