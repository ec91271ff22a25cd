"""`Job.init_from`: loads the weights that a new run starts with."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from drivetrain.checkpoint import CheckpointError, Weights, WeightsTaken, load_weights, read_weights
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.world import World
from drivetrain.moe import MixtureOfExperts
from drivetrain.monitor.recorder import NoRunRecorder
from drivetrain.strategies import SharedExperts
from drivetrain.strategies.shared_experts import HeldExperts


def take_weights(
    source: str | Path, model: nn.Module, world: World, experts: SharedExperts | None = None
) -> WeightsTaken:
    """Load the weights on every rank. An error on one is raised on all: the others would wait for it otherwise.

    `experts`: those that are distributed already, of which a rank reads its rows.
    """
    taken, problem = None, None
    try:
        weights = read_weights(Path(source)).called(model.state_dict())
        taken = _taken(model, weights, {} if experts is None else experts.held)
    except CheckpointError as error:
        problem = {"message": error.message, "remedy": error.remedy}
    for found in world.gather(problem):
        if found is not None:
            raise DrivetrainError(f"init_from: {found['message']}", remedy=found["remedy"])
    assert taken is not None
    return taken


def _taken(model: nn.Module, weights: Weights, held: Mapping[str, HeldExperts]) -> WeightsTaken:
    """Load the weights, and report on all experts, not only on those that this rank holds."""
    wholes = {name: (found.num_slots, *found.parameter.shape[1:]) for name, found in held.items()}
    mixtures = {name: part for name, part in model.named_modules() if isinstance(part, MixtureOfExperts)}
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    differing = _differing(mixtures, shapes | wholes, weights)
    anew = {name for layer in differing for name in shapes if _is_in(layer, name)}
    before = {name: _num_active(layer) for name, layer in mixtures.items()}
    taken = load_weights(model, _held_here(weights, held, wholes), anew)
    unlike = [name for name, whole in wholes.items() if weights.shapes.get(name, whole) != whole]
    notes = [_why_anew(layer, mixtures[layer], names, shapes | wholes, weights) for layer, names in differing.items()]
    notes += [
        f"{name or 'the model'} has {_experts(_num_active(layer))} now, as there; it was made with {before[name]}"
        for name, layer in mixtures.items()
        if _num_active(layer) != before[name]
    ]
    return replace(
        taken,
        missing=tuple(name for name in taken.missing if name not in unlike),
        other_shape=taken.other_shape
        + tuple(f"{name} {weights.shapes[name]} there, {wholes[name]} in the model" for name in unlike),
        notes=tuple(notes),
        told=frozenset(anew | {name for layer in differing for name in weights.shapes if _is_in(layer, name)}),
    )


def _differing(
    mixtures: Iterable[str], shapes: Mapping[str, tuple[int, ...]], weights: Weights
) -> dict[str, list[str]]:
    """Return the mixtures that have another shape there, with the names of the tensors in question.

    None of their weights are taken: which experts are active, and what these have learnt, only make sense together.
    """
    found = {
        layer: [
            name for name in shapes if _is_in(layer, name) and weights.shapes.get(name, shapes[name]) != shapes[name]
        ]
        for layer in mixtures
    }
    return {layer: names for layer, names in found.items() if names}


def _is_in(layer: str, name: str) -> bool:
    return name.startswith(f"{layer}." if layer else "")


def _num_active(layer: MixtureOfExperts) -> int:
    return int(layer.router.active.sum())


def _experts(number: int) -> str:
    return f"{number} active expert{'' if number == 1 else 's'}"


def _why_anew(
    layer: str,
    mixture: MixtureOfExperts,
    names: list[str],
    shapes: Mapping[str, tuple[int, ...]],
    weights: Weights,
) -> str:
    head = f"{layer or 'the model'} starts anew with its {_experts(_num_active(mixture))}, none of its weights are used"
    ids = f"{layer}.expert_ids" if layer else "expert_ids"
    if ids in names and len(weights.shapes[ids]) == 1:
        there = weights.shapes[ids][0]
        return (
            f"{head}: it has {there} slots there and {mixture.num_slots} in the model; "
            f"make it with num_slots={there} to take them"
        )
    name = names[0]
    return (
        f"{head}: {name} is {weights.shapes[name]} there and {shapes[name]} in the model; make both alike to take them"
    )


def _held_here(weights: Weights, held: Mapping[str, HeldExperts], wholes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Return this rank's view of the weights: its own rows of experts, and none of a layer with other slots."""
    shared_out = {name: held[name] for name, whole in wholes.items() if weights.shapes.get(name) == whole}

    def read(name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if name not in shared_out:
            return weights.read(name, offsets, shape)
        return shared_out[name].read(partial(weights.read, name), weights.shapes[name])

    here = {name: tuple(found.parameter.shape) for name, found in shared_out.items()}
    others = {name: shape for name, shape in weights.shapes.items() if name not in held}
    return replace(weights, shapes=others | here, read=read)


def write_down(taken: WeightsTaken, recorder: NoRunRecorder) -> None:
    recorder.event(
        "weights taken",
        path=str(taken.path),
        taken=taken.taken,
        missing=taken.missing,
        unexpected=taken.unexpected,
        other_shape=taken.other_shape,
        left_out=taken.left_out,
        notes=taken.notes,
    )
    for number, line in enumerate(taken.lines):
        recorder.say(f"  {'' if number else 'weights':<9}  {line}")
