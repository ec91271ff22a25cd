"""Weights to start from: a safetensors file, the folder of another run, or one of its checkpoints."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.checkpoint import Checkpoint
from drivetrain.checkpoint.errors import CheckpointDamagedError, CheckpointError, SharedFileError
from drivetrain.checkpoint.manifest import MANIFEST_NAME
from drivetrain.checkpoint.plain_names import renamed
from drivetrain.checkpoint.tensor_file import DTYPES, TensorFile
from drivetrain.core.state import local_part, offsets_of

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
    unknown = [name for name, (code, _) in layouts.items() if code not in DTYPES]
    if unknown:
        raise CheckpointError(
            f"{path} holds {unknown[0]!r} as {layouts[unknown[0]][0]}, which is not supported",
            remedy="convert it to one of " + ", ".join(DTYPES),
            path=path,
        )

    def read(name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return file.read(name, tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True)))

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
