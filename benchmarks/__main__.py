"""`make bench`, or `python -m benchmarks [NAME ...]`: run the benchmarks, print and keep their results.

`python -m benchmarks table` writes the kept results to the pages of docs/benchmarks.
"""

import argparse
import importlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import drivetrain
from benchmarks import (
    cache,
    capture,
    checkpoint_scale,
    checkpoint_write,
    continual,
    correctness,
    darkroom,
    exchange,
    feed,
    forecast,
    fp8,
    fsdp,
    gpt2,
    launch,
    lifecycle,
    logged_values,
    moe,
    muon_race,
    overhead,
    proofs,
    prove_trainers,
    recipes,
    repeat,
    resident,
    revisions,
    roofline,
    saving,
    short_jobs,
    startup,
    sweep_honesty,
    table,
    watching,
    zoo,
)
from benchmarks.contest import Book, label, run_contest, summary
from drivetrain.hardware import Hardware, detect

RESULTS = Path(__file__).parent / "results"
BENCHMARKS: dict[str, Callable[[], dict[str, list[float]]]] = {
    "startup": startup.measure,
    "launch": launch.measure,
    "forecast-guides": forecast.guides,
    "short-jobs": short_jobs.measure,
    "overhead": overhead.measure,
    "revisions": revisions.measure,
    "logged-values": logged_values.measure,
    "gpt2": gpt2.measure,
    "roofline": roofline.measure,
    "fsdp": fsdp.measure,
    "fp8": fp8.measure,
    "feed": feed.measure,
    "capture": capture.measure,
    "cache": cache.measure,
    "resident": resident.measure,
    "repeat": repeat.measure,
    "repeat-runs": repeat.measure_runs,
    "repeat-attention": repeat.measure_attention,
    "moe": moe.measure,
    "muon-race": muon_race.measure,
    "exchange": exchange.measure,
    "forecast": forecast.measure,
    "lifecycle": lifecycle.measure,
    "saving": saving.measure,
    "saving-explained": saving.measure_explained,
    "saving-cpu": saving.measure_on_cpu,
    "checkpoint-scale": checkpoint_scale.measure,
    "checkpoint-write": checkpoint_write.measure,
    "watching": watching.measure,
    "sweep-honesty": sweep_honesty.measure,
    "correctness": correctness.measure,
    "prove-planted": proofs.measure_planted,
    "prove-clean": proofs.measure_clean,
    "transformers-loss": proofs.measure_transformers,
    **continual.MEASURES,
    "growing-mnist": continual.measure_growth,
    "email-sequence": recipes.measure_email_sequence,
    "image-pairs": recipes.measure_image_pairs,
    "chest-xray-vqa": recipes.measure_chest_xray_vqa,
    "recipes-full": recipes.measure_full,
    "darkroom": darkroom.measure_plain,
    "darkroom-two-region": darkroom.measure_two_region,
}
# Competitors side by side, by the module that describes them.
CONTESTS = {
    "plan-gpt2": "benchmarks.plan_gpt2",
    "plan-resnet": "benchmarks.plan_resnet",
    "plan-mlp": "benchmarks.plan_mlp",
    "whole-job-gpt2": "benchmarks.whole_job",
    "whole-job-mlp": "benchmarks.whole_job",
    "cpu-mlp": "benchmarks.cpu",
    "cpu-cnn": "benchmarks.cpu",
    "cpu-transformer": "benchmarks.cpu",
    "cpu-jpeg": "benchmarks.cpu_jpeg",
    "lora-race": "benchmarks.lora_race",
    "moe-twin": "benchmarks.moe_twin",
    "side-by-side": "benchmarks.side_by_side",
    "side-by-side-gpu": "benchmarks.side_by_side",
    **dict.fromkeys(zoo.NAMES, "benchmarks.zoo"),
}
SEVERAL = {
    short: tuple(name for name in CONTESTS if name.startswith(f"{short}-"))
    for short in ("plan", "whole-job", "cpu", "zoo")
}
VERDICTS = "prove-trainers"  # what `drivetrain prove` says of other trainers
ONLY_BY_NAME = {  # long, or in need of more than this folder
    "revisions",
    "sweep-honesty",
    *continual.MEASURES,
    "growing-mnist",
    "prove-planted",
    "prove-clean",
    "transformers-loss",
    "email-sequence",
    "image-pairs",
    "chest-xray-vqa",
    "recipes-full",
    "darkroom",
    "darkroom-two-region",
}
NEEDS_A_GPU = {
    "cache",
    "capture",
    "feed",
    "fp8",
    "fsdp",
    "gpt2",
    "moe",
    "muon-race",
    "repeat",
    "roofline",
    "recipes-full",
    "repeat-runs",
    "repeat-attention",
    "saving",
    "saving-explained",
    "lora-race",
    "moe-twin",
    "side-by-side-gpu",
    *SEVERAL["plan"],
    *SEVERAL["whole-job"],
    *SEVERAL["zoo"],
}


def main() -> None:
    arguments = _arguments()
    if given := os.environ.get("PYTHONPATH"):  # children run in other folders
        paths = (str(Path(path).absolute()) for path in given.split(os.pathsep) if path)
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if arguments.names == ["table"]:
        print(f"written to {', '.join(map(str, table.write(arguments.out)))}")
        return
    hardware = detect()
    left_out = ONLY_BY_NAME | (set() if hardware.gpus else NEEDS_A_GPU)
    everything = [name for name in (*BENCHMARKS, *CONTESTS) if name not in left_out]
    for name in arguments.names or everything:
        if name in CONTESTS:
            _contest(name, arguments, hardware)
        elif name == VERDICTS:
            _verdicts(arguments, hardware)
        else:
            _benchmark(name, arguments.out, hardware)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = [*BENCHMARKS, *CONTESTS, VERDICTS]
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"which ones (default: all): {', '.join(known)}; {', '.join(SEVERAL)} are several of them; or table",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON (default: benchmarks/results)")
    contests = parser.add_argument_group("competitors side by side")
    contests.add_argument("--only", default="", metavar="A,B", help="these competitors; results of others are kept")
    contests.add_argument("--smoke", action="store_true", help="tiny sizes that run anywhere; they prove nothing")
    contests.add_argument("--missing", action="store_true", help="those without a result; results of others are kept")
    contests.add_argument("--budget", type=float, default=1e9, metavar="S", help="begin no competitor after so long")
    contests.add_argument("--once", "--quick", action="store_true", help="each competitor once, without more rounds")
    contests.add_argument("--cache", type=Path, help="where compilers and plans keep what they found (default: new)")
    arguments = parser.parse_args()
    names = [each for name in arguments.names for each in SEVERAL.get(name, (name,))]
    unknown = [name for name in names if name not in known]
    if unknown and names != ["table"]:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there is {', '.join(known)}, and table alone")
    arguments.names, arguments.only = names, [name for name in arguments.only.split(",") if name]
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def _contest(name: str, arguments: argparse.Namespace, hardware: Hardware) -> None:
    contest = importlib.import_module(CONTESTS[name]).contest(name, arguments.smoke)
    known = [competitor.name for competitor in contest.competitors]
    unknown = [one for one in arguments.only if one not in known]
    if unknown:
        raise SystemExit(f"{name} has no competitor {', '.join(unknown)}; it has {', '.join(known)}")
    path = arguments.out / f"{name}{'-smoke' if arguments.smoke else ''}-{label(hardware)}.json"
    only = arguments.only
    # Older results know nothing of transformers: only a new kind of contest can name it and keep its results.
    others = ("transformers",) if contest.shown_as else ()
    book = Book(path, contest, {**machine(hardware), **rivals_here(*others)}, keep=bool(only) or arguments.missing)
    book.document |= circumstances()
    book.revision = book.document["revision"]
    if arguments.missing:
        measured = book.document["competitors"]
        only = [one for one in known if not measured.get(one, {}).get("runs")]
        if not only:
            print(f"{name}: nothing is missing in {path}")
            return
    print(f"{name}:")
    run_contest(
        contest,
        book,
        smoke=arguments.smoke,
        only=only,
        budget_seconds=arguments.budget,
        once=arguments.once,
        cache=arguments.cache,
        say=lambda text: print(text, flush=True),
    )
    for kind in ("ratios", "limits"):
        for words, found in book.document.get(kind, {}).items():
            print(f"  {'met' if found['met'] else 'MISSED'}: {table.in_words(words, found)}")
    print(f"kept in {path}")


def _benchmark(name: str, out: Path, hardware: Hardware) -> None:
    begin = time.monotonic()
    samples = BENCHMARKS[name]()
    document = {
        "benchmark": name,
        "command": f"python -m benchmarks {name}",
        "date": datetime.now(UTC).date().isoformat(),
        **circumstances(),
        "machine": machine(hardware),
        "seconds": round(time.monotonic() - begin, 1),
        "results": {key: summary(values) for key, values in samples.items()},
    }
    path = out / f"{name}-{label(hardware)}.json"
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(document["results"], indent=2, ensure_ascii=False))
    print(f"kept in {path}")


def _verdicts(arguments: argparse.Namespace, hardware: Hardware) -> None:
    unknown = [one for one in arguments.only if one not in prove_trainers.SUBJECTS]
    if unknown:
        known = ", ".join(prove_trainers.SUBJECTS)
        raise SystemExit(f"{VERDICTS} has no trainer {', '.join(unknown)}; it has {known}")
    path = arguments.out / f"{VERDICTS}-{label(hardware)}.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["trainers"] if arguments.only and path.exists() else {}
    trainers = prove_trainers.measure(arguments.only, kept)
    document = {
        "benchmark": VERDICTS,
        "command": f"python -m benchmarks {VERDICTS}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(hardware),
        "versions": prove_trainers.versions(),
        "trainers": trainers,
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"kept in {path}")


def rivals_here(*others: str) -> dict[str, str | None]:
    """Return the versions of other trainers; None for what is not installed."""
    return {name: _version(name) for name in ("lightning", "accelerate", *others)}


def circumstances() -> dict[str, Any]:
    """Return this repository's revision, and the load of the machine: processes that want a core, over a minute.

    Where only the files were copied to the machine, `BENCHMARK_REVISION` says which revision they are.
    """
    asked = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
        revision = told.stdout.strip() if told.returncode == 0 else ""
    except OSError:
        revision = ""
    revision = os.environ.get("BENCHMARK_REVISION") or revision
    return {"revision": revision or "unknown", "load": round(os.getloadavg()[0], 1)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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


if __name__ == "__main__":
    main()
