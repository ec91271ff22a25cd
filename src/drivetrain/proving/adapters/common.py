"""The parts that adapters share: the accumulation that a case asks for, and its data behind torch's own loader."""

import re
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from drivetrain.core.errors import DrivetrainError
from drivetrain.proving.case import Case


def accumulation_steps(case: Case) -> int:
    """Return how many micro-batches a process computes in one optimizer step.

    Raises:
        DrivetrainError: the global batch is not micro-batch × accumulation steps × processes.
    """
    per_round = case.micro_batch * case.world_size
    if case.global_batch % per_round:
        raise DrivetrainError(
            f"a global batch of {case.global_batch} is not made of micro-batches of {case.micro_batch} on "
            f"{case.world_size} processes",
            remedy="Subject(even_divisions=True): only divisors of the global batch are tried then",
        )
    return case.global_batch // per_round


def make_loader(case: Case, batch_size: int | None = None) -> DataLoader[Any]:
    """Return a torch DataLoader over the case's data, which shuffles if the job does."""
    return DataLoader(
        case.data,
        batch_size=batch_size or case.micro_batch,
        shuffle=case.job.shuffle,
        collate_fn=case.collate,
        num_workers=case.num_workers,
    )


def last_numbered(folder: Path, pattern: str) -> tuple[Path, int] | None:
    """Return the entry of a folder whose name matches with the largest number, and that number."""
    found = [
        (path, int(match[1]))
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(pattern, path.name))
    ]
    return max(found, key=lambda entry: entry[1], default=None)
