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
        taken = load_weights(model, weights if experts is None else _held_here(weights, experts.held))
    except CheckpointError as error:
        problem = {"message": error.message, "remedy": error.remedy}
    for found in world.gather(problem):
        if found is not None:
            raise DrivetrainError(f"init_from: {found['message']}", remedy=found["remedy"])
    assert taken is not None
    return taken


def _held_here(weights: Weights, held: Mapping[str, Held]) -> Weights:
    """As this rank sees them: of experts, the rows that it holds. Those of a layer with other slots are not seen."""
    wholes = {name: (found.num_slots, *found.parameter.shape[1:]) for name, found in held.items()}
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
