"""Decides how samples become the rows of a batch: padded to which lengths, packed or not, grouped by length or not."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.core.aims import positive_batch
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import evaluating, generators_kept
from drivetrain.data.division import Indices
from drivetrain.data.source import Source, by_length
from drivetrain.hf.lengths import buckets_for, in_words, known_lengths, padding_share
from drivetrain.hf.padding import Collator

MOST_BUCKETS, MOST_ROW_LENGTHS = 8, 1  # of padded samples, and of packed ones: their rows are nearly full anyway
LEAST_SAVED = 0.1  # of the tokens, for packing by default
_TRIAL_TOKENS = 6
_COMPILED = "; compiled once for all sizes"
NO_PACKING = "give packing=False; group_by_length=True saves padding, too"


class OpenedModel(NamedTuple):
    """A model, or the function that makes it, with what is known of it before it is made."""

    model: nn.Module | Callable[[], nn.Module]
    model_class: type
    config: Any
    is_adapter: bool = False


@dataclass(frozen=True)
class RowShape:
    """Decides how samples are laid out in the rows of a batch: packed or padded, and to which lengths."""

    opened: OpenedModel
    collate: Collator
    packing: bool | None
    groups: bool

    def settled(self, source: Source, fields: Mapping[str, Any]) -> tuple[Source, OpenedModel, Collator]:
        """Return the source with its notes, the model with a check if samples are packed, and the collate function."""
        if self.packing:
            self._refuse_packing()
        lengths = self._lengths(source)
        if self.groups:
            source = by_length(source, lengths if lengths is not None else self._length_of)
            lengths = source.lengths
        batch = positive_batch(fields["global_batch"]) or 1
        if self._is_packed(source, lengths, batch, fields):
            collate = replace(self.collate, packs=True, buckets=self._buckets(lengths, MOST_ROW_LENGTHS))
            opened = self.opened._replace(model=_checked(self.opened.model))
        else:
            collate = replace(self.collate, buckets=self._buckets(lengths, MOST_BUCKETS))
            opened = self.opened
        note = _note(collate, source, lengths, batch, fields)
        return replace(source, notes=(*source.notes, *note)), opened, collate

    def _lengths(self, source: Source) -> Indices | None:
        if not source.is_keyed or not len(source.dataset):
            return None
        return known_lengths(source.dataset, self.collate.columns.get("input_ids", "input_ids"))

    def _length_of(self, item: Any) -> int:
        return len(self.collate.by_sample.sample(item)["input_ids"])

    def _buckets(self, lengths: Indices | None, most: int) -> tuple[int, ...]:
        if self.collate.length is not None:
            return (self.collate.length,)
        return () if lengths is None else buckets_for(lengths, most)

    def _is_packed(self, source: Source, lengths: Indices | None, batch: int, fields: Mapping[str, Any]) -> bool:
        if self.packing is not None:
            return self.packing
        if self.groups or lengths is None or self.collate.length is not None or fields.get("metrics"):
            return False
        if lengths.min() == lengths.max():
            return False
        if self._why_not_packed() or not _looks_at_positions(self.opened.model_class):
            return False
        stream = source.order(batch, fields.get("seed", 0), shuffle=True)
        shares = [
            padding_share(lengths, stream, batch, self._buckets(lengths, most), packs=packs)  # type: ignore[arg-type]
            for packs, most in ((False, MOST_BUCKETS), (True, MOST_ROW_LENGTHS))
        ]
        if (1 - shares[0]) > (1 - LEAST_SAVED) * (1 - shares[1]):
            return False
        return not isinstance(self.opened.model, nn.Module) or _tells_samples_apart(self.opened.model)

    def _why_not_packed(self) -> str:
        head = self.collate.head
        if head.task != "causal-lm":
            return f"samples are packed for a causal model, and this is one for {head.task}"
        if "position_ids" not in head.inputs:
            return f"{self.opened.model_class.__name__} takes no position_ids, by which it would tell samples apart"
        return ""

    def _refuse_packing(self) -> None:
        why_not = self._why_not_packed()
        if why_not:
            raise DrivetrainError(f"packing=True: {why_not}", remedy=NO_PACKING)
        if isinstance(self.opened.model, nn.Module):
            _refuse_leaks(self.opened.model)


def _note(
    collate: Collator, source: Source, lengths: Indices | None, batch: int, fields: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the sentence that says which rows there are, and how much of them is padding."""
    if lengths is None or not collate.buckets:
        return
    stream: Any = source.order(batch, fields.get("seed", 0), shuffle=fields.get("shuffle", True))
    share = padding_share(lengths, stream, batch, collate.buckets, packs=collate.packs)
    how = "samples of a micro-batch are packed into rows of" if collate.packs else "samples are padded to"
    grouped = ", grouped by length" if source.lengths is not None else ""
    yield (
        f"{how} {in_words(collate.buckets)} tokens{grouped}: {100 * share:.0f} % of the tokens are padding, with a "
        f"global batch of {batch} in one piece{_COMPILED if collate.varying_dims else ''}"
    )


def takes_row_masks(config: Any) -> bool:
    """Return whether one mask of causal rows, made by us, is what every layer of a model would make for itself."""
    has_windows = any(getattr(config, name, None) for name in ("sliding_window", "layer_types", "attention_chunk_size"))
    return getattr(config, "_attn_implementation", None) == "sdpa" and not has_windows


def _looks_at_positions(model_class: type) -> bool:
    """Return whether a class is known to tell samples apart by their positions: it leaves masks to transformers."""
    return bool(getattr(model_class, "_supports_attention_backend", False)) and not getattr(
        model_class, "_is_stateful", False
    )


def _checked(model: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    """Return the model; one that is built later is then checked."""
    if isinstance(model, nn.Module):
        return model

    def build() -> nn.Module:
        made = model()
        _refuse_leaks(made)
        return made

    return build


def _refuse_leaks(model: nn.Module) -> None:
    if not _tells_samples_apart(model):
        raise DrivetrainError(
            f"samples that are packed into one row would see the tokens of other samples in {type(model).__name__}: "
            "it does not attend by position_ids, or carries a state from token to token",
            remedy=NO_PACKING,
        )


def _tells_samples_apart(model: nn.Module) -> bool:
    """Return whether the second of two packed samples has the same outputs whatever the first one is.

    Weights that have no values yet are not looked at.
    """
    weight = next(model.parameters())
    if weight.is_meta:
        return True
    first, second = _trial_logits(model, weight.device, 1), _trial_logits(model, weight.device, 2)
    rounding = torch.finfo(weight.dtype).eps * (64 if weight.dtype.itemsize >= 4 else 2)
    return bool((first - second).abs().max() <= rounding * first.abs().max())


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run as it is what layers compile for themselves, as flex attention does: compiling takes longer than a trial."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of flex attention, that it is slow so
        yield


def _trial_logits(model: nn.Module, device: torch.device, token: int) -> Tensor:
    """Return the outputs for a sample that shares its row with one of another token."""
    tokens = torch.tensor([[token] * _TRIAL_TOKENS + [0, 1, 0, 1, 1, 0]], device=device)
    positions = torch.arange(_TRIAL_TOKENS, device=device).repeat(1, 2)
    with generators_kept(), torch.no_grad(), evaluating(model), _uncompiled():
        found: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return found[0, _TRIAL_TOKENS:].float()
