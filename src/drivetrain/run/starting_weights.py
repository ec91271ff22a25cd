"""`Job.init_from`: the weights that a new run starts with."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from drivetrain.checkpoint import CheckpointError, Weights, WeightsTaken, load_weights, read_weights
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.world import World
from drivetrain.monitor.books import NoBooks
from drivetrain.strategies import SharedExperts
from drivetrain.strategies.shared_experts import Held


def take_weights(
    source: str | Path, model: nn.Module, world: World, experts: SharedExperts | None = None
) -> WeightsTaken:
    """Every rank reads for itself. What is wrong on one is raised on all: they would wait for it otherwise.

    `experts`: those that were dealt out already, of which a rank reads its rows.
    """
    taken, problem = None, None
    try:
        weights = read_weights(Path(source))
        taken = _taken(model, weights, {} if experts is None else experts.held)
    except CheckpointError as error:
        problem = {"message": error.message, "remedy": error.remedy}
    for found in world.gather(problem):
        if found is not None:
            raise DrivetrainError(f"init_from: {found['message']}", remedy=found["remedy"])
    assert taken is not None
    return taken


def _taken(model: nn.Module, weights: Weights, held: Mapping[str, Held]) -> WeightsTaken:
    """What is told of experts is of all of them, whatever this rank holds."""
    wholes = {name: (found.num_slots, *found.parameter.shape[1:]) for name, found in held.items()}
    taken = load_weights(model, _held_here(weights, held, wholes))
    unlike = [name for name, whole in wholes.items() if weights.shapes.get(name, whole) != whole]
    return replace(
        taken,
        missing=tuple(name for name in taken.missing if name not in unlike),
        other_shape=taken.other_shape
        + tuple(f"{name} {weights.shapes[name]} there, {wholes[name]} in the model" for name in unlike),
    )


def _held_here(weights: Weights, held: Mapping[str, Held], wholes: Mapping[str, tuple[int, ...]]) -> Weights:
    """As this rank sees them: of experts, the rows that it holds. Those of a layer with other slots are not seen."""
    shared_out = {name: held[name] for name, whole in wholes.items() if weights.shapes.get(name) == whole}

    def read(name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if name not in shared_out:
            return weights.read(name, offsets, shape)
        return shared_out[name].read(partial(weights.read, name), weights.shapes[name])

    here = {name: tuple(found.parameter.shape) for name, found in shared_out.items()}
    others = {name: shape for name, shape in weights.shapes.items() if name not in held}
    return replace(weights, shapes=others | here, read=read)


def write_down(taken: WeightsTaken, books: NoBooks) -> None:
    books.event(
        "weights taken",
        path=str(taken.path),
        taken=taken.taken,
        missing=taken.missing,
        unexpected=taken.unexpected,
        other_shape=taken.other_shape,
    )
    books.say(f"  weights    {taken}")
