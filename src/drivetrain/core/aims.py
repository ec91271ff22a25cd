"""What a job asks of its steps: the metrics to aim at, and global batches that change over a run. Loads no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Literal

# ----------------------------------------------------------------------------------------------------------------------
# Metrics to aim at: which is best, and when to stop because it no longer improves.

Mode = Literal["auto", "min", "max"]
_MORE_IS_BETTER = ("acc", "f1", "auc", "precision", "recall", "iou", "dice", "bleu", "rouge", "r2", "psnr", "score")
_MORE_IF_A_WORD = ("top", "hits", "ndcg", "map", "mrr", "reward", "return", "kappa", "corr", "ssim", "exact")
_LESS_IS_BETTER = (
    "loss",
    "err",
    "mae",
    "mse",
    "rmse",
    "perplexity",
    "ppl",
    "wer",
    "cer",
    "fid",
    "nll",
    "bits",
    "distance",
)


@dataclass(frozen=True)
class Aim:
    """A metric, and its better direction.

    Args:
        metric: The name of the metric, such as `valid_accuracy`.
        mode: Whether less (`min`) or more (`max`) is better. `auto` takes names like accuracy, f1 or auc as better when
            higher, and losses and errors as better when lower. A name that says neither needs `min` or `max`.

    Example:
        >>> dt.Aim("valid_accuracy").is_better(0.9, than=0.8)
        True
    """

    metric: str = "valid_loss"
    mode: Mode = "auto"

    @property
    def wants_more(self) -> bool:
        if self.mode != "auto":
            return self.mode == "max"
        words = self.metric.removeprefix("valid_").split("_")
        is_loss = "loss" in (words[0], words[-1])  # such as that of a part, `valid_loss_dice`, or of a set
        return not is_loss and (
            any(word in self.metric for word in _MORE_IS_BETTER)
            or any(word.startswith(_MORE_IF_A_WORD) for word in words)
        )

    @property
    def is_clear(self) -> bool:
        """Whether the better direction is given, or known from the name."""
        return self.mode != "auto" or self.wants_more or any(word in self.metric for word in _LESS_IS_BETTER)

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Return whether `value` is better by more than `by`.

        Any number is better than nan, and nan is never better.
        """
        if math.isnan(value) or math.isnan(than):
            return not math.isnan(value)
        return value > than + by if self.wants_more else value < than - by


@dataclass(frozen=True)
class EarlyStopping:
    """Stop after `patience` validations in a row that did not improve the metric by more than `min_delta`.

    Args:
        patience: How many validations in a row may be without improvement.
        min_delta: The least change that counts as one.
        metric: The name of the metric, such as `valid_accuracy`.
        mode: Whether less (`min`) or more (`max`) is better; `auto` goes by the name.

    Example:
        >>> dt.EarlyStopping(patience=5, metric="valid_accuracy").patience
        5
    """

    patience: int = 3
    min_delta: float = 0.0
    metric: str = "valid_loss"
    mode: Mode = "auto"


# ----------------------------------------------------------------------------------------------------------------------
# Global batches that change over a run: `{0: 256, 1000: 512}` means 256 samples per step, 512 after 1,000 steps.

BatchSizes = tuple[tuple[int, int], ...]  # (steps done before, samples of each step from there on), from 0 on
GlobalBatch = int | Mapping[int, int]


def batch_sizes_of(global_batch: GlobalBatch | None) -> BatchSizes:
    """Return the sizes of a global batch that changes; empty for one that does not."""
    if not isinstance(global_batch, Mapping):
        return ()
    changes = groupby(sorted(global_batch.items()), key=itemgetter(1))  # what does not change anything is left out
    found = tuple(next(same) for _, same in changes)
    return found if len(found) > 1 else ()


def recorded_batch(recorded: Any) -> GlobalBatch | None:
    """Return the global batch that the record of a job has: JSON, whose keys are texts."""
    if isinstance(recorded, Mapping):
        return {int(steps): int(size) for steps, size in recorded.items()}
    return int(recorded) if recorded else None


def largest_batch(global_batch: GlobalBatch | None) -> int | None:
    """Return the samples of the largest step, which memory is planned for."""
    return max(global_batch.values()) if isinstance(global_batch, Mapping) else global_batch


def positive_batch(global_batch: Any) -> int | None:
    """Return the samples of the largest step of a job that is not checked yet; None if it is not sound."""
    if isinstance(global_batch, Mapping) and problem_of(global_batch):
        return None
    found = largest_batch(global_batch)
    return found if _is_whole(found, 1) else None


def problem_of(global_batch: Mapping[Any, Any]) -> str:
    """Return what is wrong with sizes by step; empty if nothing is."""
    wrong = [key for key in global_batch if not _is_whole(key, 0)]
    if wrong:
        return f"{wrong[0]!r} is not a number of steps"
    if 0 not in global_batch:
        return "it does not say how many samples the first steps have"
    wrong = [size for size in global_batch.values() if not _is_whole(size, 1)]
    return f"{wrong[0]!r} is not a number of samples" if wrong else ""


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def in_words(sizes: BatchSizes) -> str:
    """Return the sizes as `256 samples, 512 after 1,000 steps`; empty if there are none."""
    if not sizes:
        return ""
    (_, first), *others = sizes
    return ", ".join([f"{first:,} samples", *(f"{size:,} after {steps:,} steps" for steps, size in others)])


def samples_between(sizes: BatchSizes, first_step: int, last_step: int) -> int:
    """Return the samples of some steps, as if no step ended an epoch: such a one may have fewer."""
    stretches = pairwise((*sizes, (last_step, 0)))
    return sum(size * max(0, min(end, last_step) - max(begin, first_step)) for (begin, size), (end, _) in stretches)
