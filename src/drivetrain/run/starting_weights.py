"""`Job.init_from`: the weights that a new run starts with."""

from pathlib import Path

from torch import nn

from drivetrain.checkpoint import CheckpointError, WeightsTaken, load_weights, read_weights
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.world import World
from drivetrain.monitor.books import NoBooks


def take_weights(source: str | Path, model: nn.Module, world: World) -> WeightsTaken:
    """Every rank reads for itself. What is wrong on one is raised on all: they would wait for it otherwise."""
    taken, problem = None, None
    try:
        taken = load_weights(model, read_weights(Path(source)))
    except CheckpointError as error:
        problem = {"message": error.message, "remedy": error.remedy}
    for found in world.gather(problem):
        if found is not None:
            raise DrivetrainError(f"init_from: {found['message']}", remedy=found["remedy"])
    assert taken is not None
    return taken


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
