"""Makes batches of tokenized samples of unequal length, as a model takes them: padded, or packed into rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from drivetrain.core.errors import DrivetrainError, InputError
from drivetrain.hf.heads import MASKED, Head
from drivetrain.hf.lengths import next_bucket, pack_rows

_LABELS = ("labels", "label", "label_ids")  # what data sets call them; a model takes the first


@dataclass(frozen=True)
class Collator:
    """Pads a list of samples at their end, to one length of a few; or packs several into each row.

    Columns that the model does not take, such as texts, are left out. Where a causal model is given no labels, they are
    its tokens, except those that the attention mask hides. Labels of padding are -100.

    Args:
        head: What the model learns, and the columns it takes.
        pad_id: The token that pads `input_ids`.
        columns: What the data calls a column, by the name that the model takes it under.
        length: The length that no sample may exceed, and that all are padded to; None: there is none.
        buckets: The lengths to pad to: the first that holds the longest sample of a batch. Empty: exactly that length.
        packs: Whether samples share rows. Positions then begin anew with each sample, by which the model tells
            them apart, and the first token of a sample is no label: nothing before it predicts it.
    """

    head: Head
    pad_id: int
    columns: Mapping[str, str]
    length: int | None = None
    buckets: tuple[int, ...] = ()
    packs: bool = False

    @property
    def by_sample(self) -> "Collator":
        """The same, with a row per sample."""
        return replace(self, packs=False)

    @property
    def varying_dims(self) -> tuple[int, ...]:
        """The dimensions of its batches whose sizes vary: 0, the number of rows, and 1, their length."""
        rows, lengths = (0,) if self.packs else (), () if len(self.buckets) == 1 else (1,)
        return (*rows, *lengths)

    def __call__(self, items: Sequence[Any]) -> dict[str, Any]:
        samples = [self.sample(item) for item in items]
        names = list(samples[0])
        if any(list(sample) != names for sample in samples):
            raise InputError(
                f"samples of one batch have different columns: {sorted({', '.join(sample) for sample in samples})}",
                remedy="give every sample the same columns",
            )
        if self.packs:
            return self._packed(samples)
        return {name: self._stacked(name, [sample[name] for sample in samples]) for name in names}

    def sample(self, item: Any) -> dict[str, Tensor]:
        """Return what the model takes of one sample, not padded. Raises where a column is not there."""
        if not isinstance(item, Mapping):
            raise InputError(
                f"a sample is a dictionary of columns such as input_ids and labels, and not {type(item).__name__}",
                remedy="tokenize texts first: data=[tokenizer(text) for text in texts]",
            )
        found = {name: _tensor(name, value) for name, value in self._columns_of(item).items()}
        tokens = found["input_ids"]
        if tokens.dim() != 1 or not len(tokens):
            raise InputError(
                f"input_ids of a sample has the shape {list(tokens.shape)}, and a list of tokens is needed",
                remedy="tokenize one text per sample, without return_tensors, and leave out empty ones",
            )
        if "attention_mask" in self.head.inputs:
            found.setdefault("attention_mask", torch.ones_like(tokens))
        self._check_lengths(found)
        if "labels" not in found:
            mask = found.get("attention_mask", torch.ones_like(tokens))
            found["labels"] = tokens.masked_fill(mask == 0, MASKED)  # a tokenizer may have padded it already
        return _document(found) if self.packs else found

    def _columns_of(self, item: Mapping[str, Any]) -> dict[str, Any]:
        taken = {name: name for name in self.head.inputs if name in item}
        given_labels = next((name for name in _LABELS if name in item), None)
        if given_labels is not None:
            taken["labels"] = given_labels
        taken |= self.columns
        needed = ["input_ids"] if self.head.task == "causal-lm" else ["input_ids", "labels"]
        missing = [taken.get(name, name) for name in needed if taken.get(name, name) not in item]
        missing += [name for name in self.columns.values() if name not in item and name not in missing]
        if missing:
            raise InputError(
                f"there is no column {', '.join(map(repr, missing))}; the columns are {', '.join(map(repr, item))}",
                remedy="tokenize the data, or say what it calls a column: columns={'labels': 'target'}",
            )
        return {name: item[column] for name, column in taken.items()}

    def _check_lengths(self, found: Mapping[str, Tensor]) -> None:
        length = len(found["input_ids"])
        per_token = ("attention_mask", *(("labels",) if self.head.labels_are_tokens else ()))
        for name in per_token:
            if name in found and found[name].shape != (length,):
                raise InputError(
                    f"a sample has {length} input_ids and {name} of the shape {list(found[name].shape)}",
                    remedy=f"give one entry of {name} per token; labels that do not count are {MASKED}",
                )
        if self.length is not None and length > self.length:
            raise InputError(
                f"a sample has {length} tokens, and length={self.length}",
                remedy="truncate it when it is tokenized, or give a larger length",
            )

    def _stacked(self, name: str, values: list[Tensor]) -> Tensor:
        is_whole = values[0].dim() != 1 or (name == "labels" and self.head.task == "sequence-classification")
        if is_whole:
            return torch.stack(values)
        filler = {"input_ids": self.pad_id, "labels": MASKED}.get(name, 0)
        length = self._padded_to(max(map(len, values)))
        return torch.stack([pad(value, (0, length - len(value)), value=filler) for value in values])

    def _padded_to(self, longest: int) -> int:
        return max(next_bucket(longest, self.buckets), self.length or 0)

    def _packed(self, samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        lengths = [len(sample["input_ids"]) for sample in samples]
        row = self._padded_to(max(lengths))
        rows = pack_rows(lengths, row)
        # What fills up a row is one more document, whose tokens are no labels.
        rest = [row - sum(lengths[index] for index in each) for each in rows]
        fillers = {"input_ids": self.pad_id, "labels": MASKED}
        found: dict[str, Any] = {
            name: torch.stack(
                [
                    pad(torch.cat([samples[index][name] for index in each]), (0, left), value=fillers.get(name, 0))
                    for each, left in zip(rows, rest, strict=True)
                ]
            )
            for name in samples[0]
        }
        found["position_ids"] = torch.stack(
            [
                torch.cat([torch.arange(length) for length in (*(lengths[index] for index in each), left)])
                for each, left in zip(rows, rest, strict=True)
            ]
        )
        if "use_cache" in self.head.inputs:
            found["use_cache"] = False  # a decoder that fills a cache does not look for packed samples
        return found


def _document(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what goes into a row of a sample: without the padding at its end, and without its first label."""
    mask, labels = found.pop("attention_mask", torch.ones_like(found["input_ids"])), found["labels"]
    is_kept = (mask != 0) | (labels != MASKED)
    length = int(is_kept.nonzero()[-1]) + 1 if bool(is_kept.any()) else 1
    if bool((mask[:length] == 0).any()):
        raise InputError(
            "the attention_mask of a sample hides tokens before the end, which cannot be packed",
            remedy="pad on the right or not at all when tokenizing; or give packing=False",
        )
    others = [name for name, value in found.items() if value.shape != labels.shape]
    if "position_ids" in found or others:
        said = f"a {others[0]} that has no entry per token" if others else "position_ids of its own"
        raise InputError(f"a sample has {said}, which cannot be packed", remedy="leave it out, or give packing=False")
    found = {name: value[:length] for name, value in found.items()}
    found["labels"] = found["labels"].clone()
    found["labels"][0] = MASKED
    return found


def pad_id_for(head: Head, config: Any, tokenizer: Any, pad_id: int | None) -> int:
    """Return the token to pad with: as given, else the tokenizer's, else the model's, else the end of a text."""
    of_model = getattr(config, "pad_token_id", None)
    ends = getattr(config, "eos_token_id", None)
    of_tokenizer = getattr(tokenizer, "pad_token_id", None)
    found = [each for each in (pad_id, of_tokenizer, of_model, ends) if each is not None]
    if not found:
        raise DrivetrainError("nothing says which token pads short samples", remedy="give tokenizer=…, or pad_id=0")
    chosen = found[0] if isinstance(found[0], int) else found[0][0]  # a model may have several ends
    # These look for the model's own token, to find the last word or to number the positions.
    if head.task != "causal-lm" and of_model is not None and chosen != of_model:
        raise DrivetrainError(
            f"samples would be padded with token {chosen}, and the model takes {of_model} for padding",
            remedy=f"give pad_id={of_model}, or set pad_token_id of the model's configuration",
        )
    return int(chosen)


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"the column {name!r} holds no numbers: {error}", remedy="tokenize the data first") from None
