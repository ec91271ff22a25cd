"""Figures that are no means over samples: macro F1 of the heads, AUROC of the CheXpert labels. Exact on any world."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.recipes.chest_xray_data import FINDINGS, HEADS


def auroc(scores: Tensor, is_positive: Tensor) -> float:
    """Returns the probability that a positive has a higher score than a negative, ties counted half; nan without both.

    By ranks: the sum of the positives' ranks, less the least that it can be, by the number of pairs.
    """
    num_positive, num_negative = int(is_positive.sum()), int((~is_positive).sum())
    if not num_positive or not num_negative:
        return float("nan")
    _, which, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts.double() - 1) / 2)[which]  # of equal scores, the mean of their ranks
    above = ranks[is_positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def macro_f1(confusion: Tensor) -> float:
    """Returns the mean F1 over the answers that were right or given at least once; nan if there is none.

    Args:
        confusion: How often each answer (row) was right and each (column) was given.
    """
    hits, both = confusion.diagonal().double(), (confusion.sum(0) + confusion.sum(1)).double()
    return float((2 * hits / both)[both > 0].mean())


class MacroF1:
    """Counts answers by head over the batches of a validation."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._confusions: dict[str, Tensor] = {}

    def update(self, logits: Mapping[str, Tensor], target: Tensor) -> None:
        for number, (head, answers) in enumerate(HEADS.items()):
            right, said = target[:, 1], logits[head].argmax(1)
            pairs = torch.where(target[:, 0] == number, right * len(answers) + said, len(answers) ** 2)
            counts = torch.bincount(pairs, minlength=len(answers) ** 2 + 1)[:-1].view(len(answers), -1)
            self._confusions[head] = self._confusions.get(head, 0) + counts

    def compute(self) -> dict[str, float]:
        found = {}
        for head, answers in HEADS.items():
            counts = self._confusions.get(head, torch.zeros(len(answers), len(answers), dtype=torch.long))
            found[head] = macro_f1(torch.stack(_of_all_ranks(counts.flatten())).sum(0).view(len(answers), -1))
        return found


class LabelAUROC:
    """Keeps the scores of the labels that are known; `macro` is the mean over findings with both kinds of label."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Mapping[str, Tensor], target: Tensor) -> None:
        self._scores.append(logits["chexpert"].detach().float())
        self._labels.append(target[:, 2:])

    def compute(self) -> dict[str, float]:
        width = len(FINDINGS)
        scores = torch.cat([torch.zeros(0, width), *(each.cpu() for each in self._scores)])
        labels = torch.cat([torch.zeros(0, width, dtype=torch.long), *(each.cpu() for each in self._labels)])
        scores = torch.cat(_of_all_ranks(scores.flatten())).view(-1, width)
        labels = torch.cat(_of_all_ranks(labels.flatten())).view(-1, width)
        found = {}
        for column, finding in enumerate(FINDINGS):
            is_known = labels[:, column] >= 0
            value = auroc(scores[is_known, column], labels[is_known, column] == 1)
            if value == value:
                found[finding.lower().replace(" ", "_")] = value
        return {"macro": sum(found.values()) / len(found) if found else float("nan"), **found}


def _of_all_ranks(values: Tensor) -> list[Tensor]:
    """Returns the flat tensor of every rank, on the host; their lengths may differ."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [values.cpu()]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    told = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(told, torch.tensor([len(values)], device=device))
    lengths = [int(each) for each in told]
    padded = torch.zeros(max(lengths), dtype=values.dtype, device=device)
    padded[: len(values)] = values.to(device)
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded)
    return [each[:length].cpu() for each, length in zip(found, lengths, strict=True)]
