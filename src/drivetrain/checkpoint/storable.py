"""Checks that state can be stored: tensors of known types, and JSON. All else is refused before a byte is written.

A trainer calls these at the start of a run, so that unstorable state is found before the first save.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from drivetrain.checkpoint.box import Box
from drivetrain.checkpoint.errors import CheckpointError
from drivetrain.checkpoint.tensor_file import CODES
from drivetrain.core.state import Shard

DEEPEST_META = 64


def refuse_unstorable_shards(shards: Iterable[Shard]) -> None:
    """Raise a CheckpointError that names the key of the first shard that cannot be stored."""
    for shard in shards:
        if problem := _shard_problem(shard):
            raise CheckpointError(f"the tensor {shard.key!r} cannot be saved: {problem[0]}", remedy=problem[1])


def _shard_problem(shard: Shard) -> tuple[str, str] | None:
    tensor: Any = shard.tensor  # whatever a user's state holds
    if not shard.key or not _is_text(shard.key):
        return "its name is empty or is not text", "give it a name"
    if not isinstance(tensor, torch.Tensor):
        return f"it is a {type(tensor).__name__}, not a tensor", "put what is not a tensor into meta, as JSON"
    if hasattr(tensor, "to_local"):
        return "it is a distributed tensor", "hand in its local part, with the offsets of that part"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "without data" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        return f"it is {kind}", "hand in a dense tensor"
    if tensor.dtype not in CODES:
        return f"its type is {tensor.dtype}", "use one of " + ", ".join(sorted(map(str, CODES)))
    if not Box(tuple(shard.offsets), tuple(tensor.shape)).fits_in(shard.global_shape):
        return (
            f"a part of shape {list(tensor.shape)} at {list(shard.offsets)} does not lie in the global shape"
            f" {list(shard.global_shape)}",
            "offsets and shapes have one number per dimension, and the part ends inside the whole",
        )
    return None


def refuse_unstorable_meta(meta: Mapping[str, Any]) -> None:
    """Raise a CheckpointError that names the first value that JSON cannot hold. Tuples come back as lists."""
    if not isinstance(meta, Mapping):
        raise CheckpointError(f"meta is a {type(meta).__name__}, not a mapping", remedy="hand in a dictionary")
    _refuse(dict(meta), "meta", 0)
    try:
        json.dumps(dict(meta), allow_nan=False)
    except ValueError as error:  # an integer of thousands of digits
        raise CheckpointError(
            f"meta cannot be saved as JSON: {error}", remedy="take out what JSON cannot hold"
        ) from None


def _refuse(value: object, where: str, depth: int) -> None:
    problem = ""
    if depth > DEEPEST_META:
        problem = f"is nested more than {DEEPEST_META} deep"
    elif isinstance(value, str):
        problem = "" if _is_text(value) else "is a string that is not text"
    elif isinstance(value, float):
        problem = "" if math.isfinite(value) else f"is {value}, which JSON does not know"
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse(item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not _is_text(key):
                problem = f"has the key {key!r}, which is not text: JSON would change it"
                break
            _refuse(item, f"{where}.{key}", depth + 1)
    elif value is not None and not isinstance(value, int):
        problem = f"is a {type(value).__name__}, which JSON does not know"
    if problem:
        raise CheckpointError(
            f"{where} {problem}", remedy="hand in tensors as shards, and all else as JSON (None for a missing number)"
        )


def _is_text(text: object) -> bool:
    """Return whether it is text without lone surrogates: a file with these could not be read back as UTF-8."""
    try:
        return isinstance(text, str) and text.encode() is not None
    except UnicodeEncodeError:
        return False
