"""A process of a contest: measures the competitors it is told to, one after the other, and reports each at once."""

import gc
import importlib
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.contest import Circumstances, Competitor, as_json
from drivetrain.core.processes import die_with_parent


def main(task: dict[str, Any]) -> None:
    contest = importlib.import_module(task["module"]).contest(task["contest"], task["smoke"])
    report = Path(task["report"])
    known = dict(task["known"])
    for name in task["names"]:
        row = _measured(contest.competitor(name), Circumstances(task["smoke"], task["warming"], known))
        with report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if row.get("result", {}).get("seconds"):
            known[name] = contest.units_per_step / min(row["result"]["seconds"])


def _measured(competitor: Competitor, circumstances: Circumstances) -> dict[str, Any]:
    missing = [package for package in competitor.needs if importlib.util.find_spec(package) is None]
    if missing:
        return {"problem": f"left out: {', '.join(missing)} is not installed here"}
    if competitor.why_not:
        return {"problem": f"left out: {competitor.why_not}"}
    if "torch" in sys.modules:
        as_torch_starts()
    try:
        return {"result": as_json(competitor.measure(circumstances))}
    except Exception as error:  # noqa: BLE001  (whatever it is, the others have their turn)
        traceback.print_exc()
        return {"problem": f"{type(error).__name__}: {error}"[:600]}


def as_torch_starts() -> None:
    """Set torch's switches back to those of a fresh process, and free the memory of the competitor before."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    die_with_parent()  # it would be in the way of whatever is measured next
    main(json.loads(sys.argv[1]))
