"""Metrics to aim at: which is best, and when to stop because it no longer improves."""

import math
from dataclasses import dataclass
from typing import Literal

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
