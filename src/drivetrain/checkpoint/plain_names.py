"""Removes the prefixes that wrappers add to names, for checkpoints and files written with a wrapped model.

`torch.compile` puts `_orig_mod.` before the names of what it wraps, DataParallel and DistributedDataParallel `module.`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from drivetrain.core.state import TensorSource

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
