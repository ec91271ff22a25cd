"""Weights alone: read to start from a file or another run, and exported to one plain file that other tools read.

`torch.compile` puts `_orig_mod.` before the names of what it wraps, DataParallel and DistributedDataParallel `module.`:
files that were written with a wrapped model are read under the names of the model itself.
"""

import io
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.checkpoint import Checkpoint
from drivetrain.checkpoint.files import CheckpointDamagedError, CheckpointError, Files, SharedFileError
from drivetrain.checkpoint.manifest import MANIFEST_NAME
from drivetrain.checkpoint.tensor_file import (
    CODES,
    DTYPES,
    RESERVED_NAME,
    Entry,
    TensorFile,
    arranged,
    described_pairs,
    encoded,
)
from drivetrain.core.state import TensorSource, local_part, offsets_of

_COMPILED, _PARALLEL = "_orig_mod.", "module."


def plain_name(name: str) -> str:
    """Remove the prefix that `torch.compile` adds, which no user's module has as its name."""
    return name.replace(_COMPILED, "")


def renamed(names: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Map stored names to those in `own`; unchanged, where no other mapping matches more of them.

    A model may have a submodule called `module`: then its names fit as they are.
    """
    known = set(own)
    ways = [{name: name for name in names}, {name: plain_name(name) for name in names}]
    if names and all(plain_name(name).startswith(_PARALLEL) for name in names):
        ways.append({name: plain_name(name).removeprefix(_PARALLEL) for name in names})
    return max(ways, key=lambda way: len(known & set(way.values())))


class PlainNames:
    """A checkpoint that was written with a wrapped model, seen under the names of the model itself."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names
        self._stored = {self._plain(key): key for key in source.keys}

    @property
    def meta(self) -> Mapping[str, Any]:
        meta = dict(self._source.meta)
        if "optimizer_groups" in meta:
            meta["optimizer_groups"] = [
                {**group, "params": [self._names.get(name, name) for name in group["params"]]}
                for group in meta["optimizer_groups"]
            ]
        if "optimizer_scalars" in meta:
            scalars = meta["optimizer_scalars"]
            meta["optimizer_scalars"] = {self._names.get(name, name): value for name, value in scalars.items()}
        return meta

    @property
    def keys(self) -> Mapping[str, Any]:
        return {plain: self._source.keys[key] for plain, key in self._stored.items()}

    def read(self, key: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        return self._source.read(self._stored[key], offsets, shape)

    def _plain(self, key: str) -> str:
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            of, _, field = name.rpartition("/")
            return f"{kind}/{self._names.get(of, of)}/{field}"
        return f"{kind}/{self._names.get(name, name)}"


def plainly_named(source: TensorSource, own: Collection[str]) -> TensorSource:
    """Return a checkpoint under a model's names, which are `own`; the source itself if it has these."""
    names = renamed([key.removeprefix("model/") for key in source.keys if key.startswith("model/")], own)
    return source if all(name == plain for name, plain in names.items()) else PlainNames(source, names)


_PREFIX = "model/"
_PICKLED = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}
_SHOWN = 5
_SOURCES = "give a .safetensors file, the folder of a run such as runs/digits, or one of its checkpoints"
_REMEDY = "use weights of the same model; names have to be those of model.state_dict()"


@dataclass(frozen=True)
class Weights:
    """Tensors by the names in the model. Each is read when it is asked for."""

    path: Path  # the file, or the checkpoint that was found
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]  # a range of one: its name, offsets, shape

    def called(self, own: Collection[str]) -> "Weights":
        """Return the weights under a model's names, `own`, where they were written with that model wrapped."""
        stored = {plain: name for name, plain in renamed(self.shapes.keys(), own).items()}
        if len(stored) < len(self.shapes):
            return self
        shapes = {plain: self.shapes[name] for plain, name in stored.items()}
        return Weights(self.path, shapes, lambda name, offsets, shape: self.read(stored[name], offsets, shape))


@dataclass(frozen=True)
class WeightsTaken:
    """The outcome for each name, sorted."""

    path: Path
    taken: tuple[str, ...]
    missing: tuple[str, ...]  # in the model only: these keep what the model was made with
    unexpected: tuple[str, ...]  # in the source only
    other_shape: tuple[str, ...]  # in both, and not taken
    left_out: tuple[str, ...] = ()  # of the same shape, and not taken, since what belongs to them does not fit
    notes: tuple[str, ...] = ()  # on parts of the model as a whole; names in these are not reported again
    told: frozenset[str] = frozenset()

    @property
    def lines(self) -> tuple[str, ...]:
        """A report for people: a line for each kind of outcome, with a few names."""
        names = {
            "only in the model, and left as they were made": self.missing,
            "only there, and not used": self.unexpected,
            "of another shape, and left as the model made them": self.other_shape,
        }
        found = [f"{len(self.taken)} tensors from {self.path}", *self.notes]
        for what, all_of_them in names.items():
            new = [name for name in all_of_them if name.split(" ")[0] not in self.told]
            found += [f"{len(new)} {what}: {_some(new)}"] if new else []
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join(self.lines)


def read_weights(path: Path) -> Weights:
    """Open the weights in a path. Of a run, the newest complete checkpoint is taken.

    Changes nothing, so another run may be writing there.
    """
    if path.suffix.lower() in _PICKLED and not path.is_dir():
        raise CheckpointError(
            f"{path} is a pickle by its name: reading it would run whatever code is in it",
            remedy="load it where you trust it, and write its state with safetensors.torch.save_file",
            path=path,
        )
    try:
        if path.is_file():
            return _of_file(path)
        if (path / MANIFEST_NAME).is_file():
            return _of_checkpoint(Checkpoint.open(path))
    except SharedFileError:
        raise  # it has its own remedy
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(error.message, remedy=_SOURCES, path=error.path) from None
    for folder in (path / "checkpoints", path):
        found = Checkpoint.latest_in(folder) if folder.is_dir() else None
        if found is not None:
            return _of_checkpoint(found)
    there = "holds no checkpoint that is whole" if path.is_dir() else "is not there"
    raise CheckpointError(
        f"{path} {there}",
        remedy=_SOURCES,
        path=path,
    )


def load_weights(model: nn.Module, weights: Weights, leave: Collection[str] = ()) -> WeightsTaken:
    """Copy the tensors with the model's names and shapes into it; the rest is reported. Nothing in common is an error.

    Names in `leave` are not taken, even where they fit.
    """
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    common = sorted(state.keys() & weights.shapes.keys())
    unlike = [name for name in common if tuple(state[name].shape) != weights.shapes[name]]
    fitting = [name for name in common if name not in unlike and name not in leave]
    if not fitting:
        raise CheckpointError(_nothing_fits(weights, state, unlike or common), remedy=_REMEDY, path=weights.path)
    with torch.no_grad():
        for name in fitting:
            part = local_part(state[name])
            part.copy_(weights.read(name, offsets_of(state[name]), tuple(part.shape)))
    filled = {_place(state[name]) for name in fitting}  # two names of one tensor: files often hold only one of them
    return WeightsTaken(
        path=weights.path,
        taken=tuple(fitting),
        missing=tuple(
            name for name in sorted(state.keys() - weights.shapes.keys()) if _place(state[name]) not in filled
        ),
        unexpected=tuple(sorted(weights.shapes.keys() - state.keys())),
        other_shape=tuple(
            f"{name} {weights.shapes[name]} there, {tuple(state[name].shape)} in the model" for name in unlike
        ),
        left_out=tuple(name for name in common if name in leave and name not in unlike),
    )


def _nothing_fits(weights: Weights, state: Mapping[str, Tensor], common: list[str]) -> str:
    if common:
        name = common[0]
        return (
            f"no tensor of {weights.path} has the shape it has in the model: {name} is {weights.shapes[name]} there and"
            f" {tuple(state[name].shape)} in the model"
        )
    return (
        f"no tensor of {weights.path} has a name of the model's: there is {_some(sorted(weights.shapes))}; the model"
        f" has {_some(sorted(state))}"
    )


def _of_file(path: Path) -> Weights:
    file = TensorFile(path)
    layouts = {name: layout for name in sorted(file.names) if (layout := file.layout(name))}
    pairs = file.pairs()
    layouts |= {name: (code, layouts[name][1][:-1]) for name, code in pairs.items()}
    unknown = [name for name, (code, _) in layouts.items() if code not in DTYPES]
    if unknown:
        raise CheckpointError(
            f"{path} holds {unknown[0]!r} as {layouts[unknown[0]][0]}, which is not supported",
            remedy="convert it to one of " + ", ".join(DTYPES),
            path=path,
        )

    def read(name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        slices = tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))
        return file.read(name, slices, pairs.get(name, ""))

    return Weights(path, {name: shape for name, (_, shape) in layouts.items()}, read)


def _of_checkpoint(checkpoint: Checkpoint) -> Weights:
    names = {key.removeprefix(_PREFIX): key for key in checkpoint.keys if key.startswith(_PREFIX)}
    return Weights(
        checkpoint.path,
        {name: checkpoint.keys[key].shape for name, key in names.items()},
        lambda name, offsets, shape: checkpoint.read(names[name], offsets, shape),
    )


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return the address and size of a tensor. Empty tensors have no address; they need no weights either."""
    return local_part(tensor).data_ptr(), tensor.numel()


def _some(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


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
                draft,
                encoded(
                    arranged(entries, described_pairs(entries) | {"format": "pt"}),
                    lambda number: checkpoint.read(keys[number]),
                ),
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
