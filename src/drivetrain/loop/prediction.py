"""Prediction: a model's outputs over a data set, one row per sample, in order, on all ranks together.

The set is divided as in validation, so each rank computes one contiguous part of the rows.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import evaluating
from drivetrain.core.precision import Precision
from drivetrain.core.world import World
from drivetrain.data.batch import map_tensors
from drivetrain.data.loader import Loader
from drivetrain.loop.validation import (
    computes_gradients,
    micro_batches,
    raise_on_all_ranks,
    recording_outputs,
    seed_validation,
)
from drivetrain.strategies.base import LossFunction

ForwardFunction = Callable[[Any, Any], Any]  # of (model, batch)
CHUNK_BYTES = 2**28  # of one message between ranks
_PAD = "pad them to one length in forward=lambda model, batch: …"
_ROWS = "return tensors with a row per sample from forward=lambda model, batch: …"


def forward_of(loss: LossFunction) -> ForwardFunction:
    """Return a function that calls the model as the loss function does, and returns what the model returned."""

    def forward(model: Any, batch: Any) -> Any:
        with recording_outputs(model, []) as outputs:
            try:
                try:
                    loss(model, batch)
                except RuntimeError as error:
                    if not computes_gradients(error):
                        raise
                    with torch.enable_grad():
                        loss(model, batch)
            except Exception as error:
                raise DrivetrainError(
                    f"the loss function, which knows how the model is called, raised {type(error).__name__}: {error}",
                    remedy="give data like the job's, or say how the model is called: "
                    "forward=lambda model, batch: model(batch)",
                ) from error
        if not outputs:
            raise DrivetrainError(
                "the loss function did not call the model, so it has no output to return",
                remedy="say how the model is called: forward=lambda model, batch: model(batch)",
            )
        return outputs[-1]

    return forward


def predict_rows(
    model: nn.Module,
    called: Any,
    loader: Loader,
    precision: Precision,
    world: World,
    forward: ForwardFunction,
    seed: int,
) -> Any:
    """Return the outputs over a whole data set, in the host's memory, the same on every rank. Collective.

    Args:
        model: The model, which is put into evaluation mode.
        called: What `forward` gets: the model, perhaps compiled.
        loader: The data set as one step, see `whole_set_loader`.
        precision: The precision of the forward.
        world: The ranks that share the work.
        forward: A function of (model, batch): tensors with a row per sample, in any nesting.
        seed: The job's seed, for models that draw at random.
    """
    found: list[Any] = []
    failure: Exception | None = None
    seed_validation(seed)
    try:
        with evaluating(model), torch.no_grad():
            for micro in micro_batches(loader):
                with precision.around_forward() or nullcontext():
                    output = forward(called, micro.batch)
                # A rank without samples has outputs of weight 0: these show their structure.
                found.append(_on_host(output, micro.num_samples, keep=bool(micro.weight)))
        mine = _joined(found)
    except Exception as error:  # noqa: BLE001  (raised below, on all ranks)
        failure = error
    raise_on_all_ranks(failure, "prediction", model, world)
    return mine if world.size == 1 else _from_all_ranks(mine, loader, world)


def _on_host(output: Any, num_samples: int, *, keep: bool, where: str = "the output") -> Any:
    """Return an output in plain containers and the host's memory, after checking that it has a row per sample."""
    if isinstance(output, Tensor):
        if output.dim() == 0 or len(output) != num_samples:
            raise DrivetrainError(
                f"{where} has the shape {tuple(output.shape)} for a batch of {num_samples} samples", remedy=_ROWS
            )
        return (output if keep else output[:0]).detach().cpu()
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, Mapping)):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if isinstance(output, Mapping):
        return {
            name: _on_host(value, num_samples, keep=keep, where=f"{where}[{name!r}]") for name, value in output.items()
        }
    if isinstance(output, (list, tuple)):
        parts = (
            _on_host(part, num_samples, keep=keep, where=f"{where}[{number}]") for number, part in enumerate(output)
        )
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if output is None:
        return None
    raise DrivetrainError(f"{where} is of type {type(output).__name__}, expected a tensor", remedy=_ROWS)


def _joined(parts: Sequence[Any]) -> Any:
    """Return the rows of many outputs as one."""
    first = parts[0]
    if isinstance(first, Tensor):
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise DrivetrainError(f"outputs of batches have rows of different shapes: {sorted(shapes)}", remedy=_PAD)
        return torch.cat(list(parts))
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, (list, tuple)):
        joined = (_joined(column) for column in zip(*parts, strict=True))
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return first


def tensors_by_name(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an output with their paths in it, such as `boxes.0`."""
    if isinstance(output, Tensor):
        yield name or "output", output
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from tensors_by_name(value, f"{name}.{key}" if name else str(key))
    elif isinstance(output, (list, tuple)):
        names = getattr(output, "_fields", range(len(output)))
        for key, value in zip(names, output, strict=True):
            yield from tensors_by_name(value, f"{name}.{key}" if name else str(key))


def _from_all_ranks(mine: Any, loader: Loader, world: World) -> Any:
    """Return all ranks' rows, in order, on every rank."""
    kinds = world.gather({name: [str(it.dtype), *it.shape[1:]] for name, it in tensors_by_name(mine)})
    for rank, others in enumerate(kinds):
        if others != kinds[0]:
            raise DrivetrainError(f"outputs are {kinds[0]} on rank 0 and {others} on rank {rank}", remedy=_PAD)
    place = loader.division.place(0)
    slices = [loader.division.rank_slice(place, rank) for rank in range(world.size)]

    def whole(part: Tensor) -> Tensor:
        rows = part.new_empty((place.num_samples, *part.shape[1:]))
        rows[slice(*slices[world.rank])] = part
        for rank, (start, stop) in enumerate(slices):
            _broadcast(rows[start:stop], rank, world.aside())
        return rows

    return map_tensors(whole, mine)


def _broadcast(rows: Tensor, rank: int, world: World) -> None:
    """Send one rank's rows to all, as bytes: not every type can be sent as it is."""
    if not rows.numel():
        return
    assert world.group is not None
    flat = rows.reshape(-1).view(torch.uint8)
    for start in range(0, len(flat), CHUNK_BYTES):
        dist.broadcast(flat[start : start + CHUNK_BYTES], group=world.group, group_src=rank)
