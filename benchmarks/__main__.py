"""`make bench`, or `python -m benchmarks [NAME ...]`: run the benchmarks, print and keep their results."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import drivetrain
from benchmarks import correctness, feed, gpt2, overhead, saving, startup, watching
from drivetrain.hardware import Hardware, detect

RESULTS = Path(__file__).parent / "results"
BENCHMARKS: dict[str, Callable[[], dict[str, list[float]]]] = {
    "startup": startup.measure,
    "overhead": overhead.measure,
    "gpt2": gpt2.measure,
    "feed": feed.measure,
    "saving": saving.measure,
    "saving-cpu": saving.measure_on_cpu,
    "watching": watching.measure,
    "correctness": correctness.measure,
}
NEEDS_A_GPU = {"feed", "gpt2", "saving"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones (default: all): {', '.join(BENCHMARKS)}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON (default: benchmarks/results)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there is {', '.join(BENCHMARKS)}")
    hardware = detect()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or [name for name in BENCHMARKS if hardware.gpus or name not in NEEDS_A_GPU]:
        begin = time.monotonic()
        samples = BENCHMARKS[name]()
        document = {
            "benchmark": name,
            "command": f"python -m benchmarks {name}",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine(hardware),
            "seconds": round(time.monotonic() - begin, 1),
            "results": {key: summary(values) for key, values in samples.items()},
        }
        path = arguments.out / f"{name}-{label(hardware)}.json"
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(json.dumps(document["results"], indent=2, ensure_ascii=False))
        print(f"kept in {path}")


def summary(values: list[float]) -> dict[str, Any]:
    return {
        "median": float(f"{statistics.median(values):.5g}"),
        "least": float(f"{min(values):.5g}"),
        "most": float(f"{max(values):.5g}"),
        "samples": len(values),
    }


def machine(hardware: Hardware) -> dict[str, Any]:
    software = hardware.software
    return {
        "cpu": hardware.cpu.model,
        "usable_cores": hardware.cpu.num_usable,
        "gpus": [gpu.name for gpu in hardware.gpus],
        "python": software.python,
        "torch": software.torch,
        "driver": software.driver,
        "drivetrain": drivetrain.__version__,
    }


def label(hardware: Hardware) -> str:
    """A short name for the kind of machine, for the file."""
    device = hardware.gpus[0].name if hardware.gpus else hardware.cpu.model
    words = "".join(letter.lower() if letter.isalnum() else "-" for letter in device)
    return "-".join(part for part in words.split("-") if part and part != "nvidia")


if __name__ == "__main__":
    main()
