"""Train a mixture of experts that grows and sleeps on MNIST, Fashion-MNIST or the bundled digits.

python examples/gpu_training_example.py                                    # whatever is here: GPUs, or the CPU
python examples/gpu_training_example.py --data digits --epochs 3           # nothing is downloaded
python examples/gpu_training_example.py --data-dir ~/mnist                 # the four IDX files, compressed or not
python examples/gpu_training_example.py --mixed-precision --precision-type bf16 --compile --accumulation-steps 2
python examples/gpu_training_example.py --gpu-mode multi_gpu --parallel-strategy expert_parallel
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import drivetrain as dt
from drivetrain.core.launchers import find_place
from drivetrain.recipes.digits_moe import mixture_job, show_mixture
from drivetrain.recipes.mnist import NAMES, load_pictures

EPOCHS, BATCH = 5, 128


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpu-mode", choices=["auto", "cpu", "single_gpu", "multi_gpu"], default="auto", help="which devices")
    add(
        "--parallel-strategy", choices=["data_parallel", "ddp", "expert_parallel"], help="how several GPUs share a step"
    )
    add("--mixed-precision", action="store_true", help="bf16, or fp16 on GPUs that have none")
    add("--precision-type", choices=["auto", "fp16", "bf16"], default="auto", help="which one, with --mixed-precision")
    add("--batch-size", type=int, help=f"samples at once on each device (default: {BATCH} over all devices)")
    add("--auto-batch-size", action="store_true", help="measure how many samples at once are fastest; the step stays")
    add("--accumulation-steps", type=int, help="micro-batches that make up a step on each device")
    add("--epochs", type=int, default=EPOCHS)
    add("--experts", type=int, help="how many experts it starts with (default: 3)")
    add("--compile", action="store_true", help="torch.compile")
    add("--compile-mode", choices=["default", "reduce-overhead", "max-autotune"], default="default")
    add("--monitor-gpu", action="store_true", help="a row of what the devices do every 10 steps, in gpu.jsonl")
    add("--data", choices=NAMES, default="mnist")
    add("--data-dir", type=Path, help="folder of the IDX files (default: downloaded once, and kept)")
    add("--output-dir", type=Path, default=Path("results"), help="runs are folders in here")
    add("--name", help="of the run (default: gpu_training)")
    add("--seed", type=int, default=0)
    add("--max-steps", type=int, help="stop early, to try things out")
    return parser


def plain(words: Sequence[str]) -> list[str]:
    """The command line with one spelling of each flag: `--gpu_mode` is `--gpu-mode`."""
    return [
        re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) if word.startswith("--") else word
        for word in words
    ]


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """The flags by drivetrain's own names. What is not given is left to be measured or decided."""
    mixed = given.precision_type if given.mixed_precision else "fp32" if given.gpu_mode == "cpu" else None
    found = {
        "gpu_mode": given.gpu_mode,
        "parallel_strategy": given.parallel_strategy,
        "mixed_precision": True if given.mixed_precision else None,
        "precision": mixed,
        "batch_size": given.batch_size,
        "accumulation_steps": given.accumulation_steps,
        "auto_batch_size": True if given.auto_batch_size else None,  # divides the step that the other two make up
        "epochs": given.epochs,
        "experts": given.experts,
        "compile": True if given.compile else None,
        "compile_mode": given.compile_mode if given.compile else None,
        "gpu_log_interval": 10 if given.monitor_gpu else None,
        "monitor_gpu": True if given.monitor_gpu else None,
        "output_dir": given.output_dir,
        "seed": given.seed,
        "max_steps": given.max_steps,
        "name": given.name or "gpu_training",
    }
    return {name: value for name, value in found.items() if value is not None}


def left_unused(given: argparse.Namespace) -> str:
    """A flag that nothing follows from, in words; empty if there is none."""
    if given.precision_type == "auto" or given.mixed_precision:
        return ""
    return f"--precision-type {given.precision_type} does nothing without --mixed-precision; add that to use it"


def wants_processes(given: argparse.Namespace) -> bool:
    """Whether several GPUs are to be used, and no process was started for each yet."""
    if given.gpu_mode not in ("auto", "multi_gpu") or given.parallel_strategy == "data_parallel":
        return False
    return find_place().size == 1 and len(dt.detect().gpus) > 1


def main() -> int:
    given = flags().parse_args(plain(sys.argv[1:]))
    try:
        if wants_processes(given):
            dt.launch_distributed_training(__file__, arguments=sys.argv[1:])
            return 0
        notice = left_unused(given)
        if notice and find_place().rank == 0:
            print(f"gpu_training: {notice}", file=sys.stderr)
        config = dt.configure(**settings(given))
        pictures = load_pictures(given.data, given.data_dir)
        job = mixture_job("gpu_training", pictures, config, epochs=EPOCHS, global_batch=BATCH)
        result = dt.train(job, config)
        if result.is_main:
            show_mixture(result, pictures)
        return 0 if result.finished else 130
    except dt.DrivetrainError as error:
        print(f"gpu_training: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
