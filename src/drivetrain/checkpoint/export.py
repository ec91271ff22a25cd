"""Exports weights to one plain file that other tools read, safetensors or a pickled state_dict."""

import io
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from drivetrain.checkpoint.errors import CheckpointError
from drivetrain.checkpoint.files import Files
from drivetrain.checkpoint.plain_names import plain_name
from drivetrain.checkpoint.tensor_file import CODES, RESERVED_NAME, Entry, arranged, encoded

PICKLED = (".pt", ".pth", ".bin")  # what `torch.save` writes, by custom
SUFFIXES = (".safetensors", *PICKLED)


class _Info(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class ExportSource(Protocol):
    """A checkpoint, or anything else that has whole tensors by key."""

    @property
    def path(self) -> Path: ...

    @property
    def keys(self) -> Mapping[str, _Info]: ...

    def read(self, key: str) -> Tensor: ...


class LiveTensors:
    """Tensors of a model that is being trained, as a checkpoint would give them; `path` is its run's folder."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path, self.keys = path, tensors

    def read(self, key: str) -> Tensor:
        return self.keys[key].detach().cpu().contiguous()


def check_suffix(path: Path) -> None:
    """Raise for a suffix of a format that `export` does not write."""
    if path.suffix.lower() not in ("", *SUFFIXES):
        raise CheckpointError(
            f"{path} ends in {path.suffix!r}, and weights are written as safetensors or as a state_dict",
            remedy=f"end its name in one of {', '.join(SUFFIXES)}: the first is safetensors, the others torch.save",
            path=path,
        )


def export(checkpoint: ExportSource, path: Path, prefix: str = "model/", instead: str = "") -> Path:
    """Write the whole tensors below the prefix, named without it, in the format of the suffix of `path`.

    `.pt`, `.pth` and `.bin` get a state_dict by `torch.save`; any other allowed name gets safetensors, for which one
    tensor at a time is in memory. With `instead`, a tensor of the same name below that prefix is taken where there is
    one. An existing file is replaced atomically, or left as it is.
    """
    check_suffix(path)
    found = [key for key in checkpoint.keys if key.startswith(prefix)]
    names = {key: plain_name(key.removeprefix(prefix)) for key in found}
    if len(set(names.values())) < len(names):
        names = {key: key.removeprefix(prefix) for key in found}
    if not names:
        known = sorted({key.split("/")[0] + "/" for key in checkpoint.keys if "/" in key})
        raise CheckpointError(
            f"{checkpoint.path} holds no tensor whose name starts with {prefix!r}",
            remedy=f"choose one of these prefixes: {', '.join(known) or '(there are none)'}",
            path=checkpoint.path,
        )
    if forbidden := [key for key, name in names.items() if name in ("", RESERVED_NAME)]:
        raise CheckpointError(
            f"{forbidden[0]!r} has no name that a safetensors file can hold, without {prefix!r}",
            remedy="choose another prefix",
            path=checkpoint.path,
        )
    infos = checkpoint.keys
    if instead:
        others = {key: instead + key.removeprefix(prefix) for key in names}
        names = {others[key] if others[key] in infos else key: name for key, name in names.items()}
    keys = list(names)
    entries = [Entry(names[key], CODES[infos[key].dtype], tuple(infos[key].shape)) for key in keys]
    files = Files()
    draft = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        if path.suffix.lower() in PICKLED:
            files.write_file(draft, _pickled({name: checkpoint.read(key) for key, name in names.items()}))
        else:
            files.write_file(
                draft, encoded(arranged(entries, {"format": "pt"}), lambda number: checkpoint.read(keys[number]))
            )
        files.rename(draft, path)
        files.fsync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}; it needs {sum(entry.num_bytes for entry in entries)} bytes",
            remedy="name a folder that is there, that you can write to, and that has the space",
            path=path,
        ) from None
    finally:
        files.remove_file(draft)
    return path


def _pickled(state: Mapping[str, Tensor]) -> Iterator[memoryview]:
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    yield buffer.getbuffer()
