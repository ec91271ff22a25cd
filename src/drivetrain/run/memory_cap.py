"""Lets a run that was out of memory go on with smaller micro-batches. What a step means stays as it was.

The cap is kept in the run's folder, so that it holds for every later start on the same kind of device with as many
processes. A run of one process goes on by itself, from its last checkpoint. Of several, a rank that is out of memory
leaves the others waiting in a collective: all of them have to be started again, as `drivetrain launch` does.
"""

import gc
import json
from dataclasses import replace

import torch
from torch import nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import write_atomically
from drivetrain.monitor.recorder import NoRunRecorder, RunRecorder
from drivetrain.run.result import CHECKPOINTS
from drivetrain.run.session import Session

FILE = "memory.json"
_OF_THE_HOST = "DefaultCPUAllocator: can't allocate memory"
_OTHER_WAYS_OUT = "--activations recompute or offload, --precision bf16, or fsdp on several GPUs"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _OF_THE_HOST in str(error)


def heed_cap(run: Session) -> None:
    """Follow smaller micro-batches if earlier ones ran out of memory. Collective, once the folder is claimed."""
    found = run.world.agree(_read(run) if run.world.is_main else None)
    if found is not None and found["micro_batch"] < run.way.micro_batch:
        why = f"micro-batches of {found['ran_out']} samples or more ran out of memory"
        run.follow(replace(run.planned.but(micro_batch=found["micro_batch"]), why_capped=why))


def tell_cap(run: Session, recorder: RunRecorder | NoRunRecorder) -> None:
    why = run.planned.why_capped
    if why:
        recorder.event("micro-batch capped", words=why, micro_batch=run.way.micro_batch)
        recorder.say(f"  memory     {why}: now {run.way.micro_batch}, and a step stays what it was")


def lower_cap(run: Session, error: BaseException) -> None:
    """Have the next start take half the micro-batch; an error where there is nothing to halve."""
    before, held = run.way.micro_batch, run.weighting.holds_division
    if held:
        raise DrivetrainError(
            f"out of memory with micro-batches of {before} samples, which cannot be made smaller without changing what "
            f"is learnt: {held}",
            remedy=f"{_OTHER_WAYS_OUT}; or return a LossSum, if the loss is a sum over samples or tokens",
        ) from error
    if before <= len(run.devices):
        raise DrivetrainError("out of memory with one sample at a time", remedy=_OTHER_WAYS_OUT) from error
    facts = {"micro_batch": before // 2, "ran_out": before, "machine": run.machine(), "world_size": run.world.size}
    # Several ranks may be out of memory at once.
    write_atomically(run.path / FILE, json.dumps(facts) + "\n", f".{run.world.rank}")


def can_go_on_here(run: Session) -> bool:
    """Return whether this process can start over: every changed state is in a checkpoint, or can be made again."""
    job = run.job
    if run.world.size > 1 or not job.source.is_keyed:
        return False
    return has_checkpoint(run) or not (isinstance(job.model, nn.Module) or job.hooks)


def has_checkpoint(run: Session) -> bool:
    return any((run.path / CHECKPOINTS).glob("step-*/manifest.json"))


def give_memory_back() -> None:
    """Drop what the failed start has left on the device. Nothing may hold a reference to its error any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _read(run: Session) -> dict[str, int] | None:
    """Return the cap that was found with this device and world; None if there is none."""
    try:
        found = json.loads((run.path / FILE).read_text(encoding="utf-8"))
        is_of_here = (found["machine"], found["world_size"]) == (run.machine(), run.world.size)
        return {name: max(1, int(found[name])) for name in ("micro_batch", "ran_out")} if is_of_here else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
