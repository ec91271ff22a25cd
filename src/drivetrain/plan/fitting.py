"""Finds how a job can be laid out so that it fits, cheapest first; else explains what takes how much memory.

Pure functions of what a step needs and of what the machine has. Figures of layouts that were not measured are rules:
sharded state is divided by the number of GPUs, and the weights of three blocks are whole at a time (the one that is
computed, the one that is prefetched, and an in-flight gradient).
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from pydantic import Field

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.plugins import strategy_facts
from drivetrain.core.value import Value, format_bytes
from drivetrain.plan.memory import FRAGMENTATION, MemoryModel
from drivetrain.plan.plan import MemoryForecast
from drivetrain.plan.simulate import Held

WHOLE_BLOCKS = 3
MOST_GPUS = 4096
LEAST_INPUT = 0.02  # of a sample: to suggest less than this would be no help


class Needs(Value):
    """The memory that a step takes with everything on one device, gradients of earlier micro-batches included."""

    held: Held
    keep: MemoryModel  # peak by micro-batch, held included
    recompute: MemoryModel | None = None  # the same with blocks recomputed; None: the model has no repeated blocks
    activation_bytes: int = 0  # of one sample: what backward waits for
    block_bytes: int = 0  # weights of the largest block
    flops: float = 0.0  # of one sample, forward and backward; 0: none that are counted
    num_operations: int = 0  # of forward and backward: kernels to launch
    weights: dict[str, int] = Field(default_factory=dict)  # by module
    activations: dict[str, int] = Field(default_factory=dict)  # of one sample, by module
    notes: tuple[str, ...] = ()


class MemoryLayout(Value):
    """The placement of state, and whether activations are recomputed."""

    strategy: str
    num_gpus: int = 1
    zero_stage: int = 0
    offloads_optimizer: bool = False
    recomputes: bool = False

    def line(self, needs: Needs) -> MemoryModel | None:
        """Return the peak by micro-batch on each device."""
        line = needs.recompute if self.recomputes else needs.keep
        if line is None:
            return None
        moved = self._held(needs) - needs.held.total
        floor = max(0.0, line.floor_bytes + moved) if line.floor_bytes else 0.0
        return line.model_copy(update={"fixed_bytes": line.fixed_bytes + moved, "floor_bytes": floor})

    def largest(self, needs: Needs, limit_bytes: float, at_most: int) -> int:
        """Return the largest micro-batch that fits; 0 if none does."""
        line = self.line(needs)
        return 0 if line is None else line.largest(limit_bytes, at_most)

    def forecast(self, needs: Needs, micro_batch: int) -> MemoryForecast:
        line = self.line(needs)
        assert line is not None
        parts = self._parts(needs.held)
        activations = round(line.sample_bytes * micro_batch)
        # Weights that are cast or gathered for the time of a step, and what backward needs besides.
        workspace = max(0, line.peak_bytes(micro_batch) - parts.total - activations)
        return MemoryForecast(
            parameters=parts.parameters + parts.buffers,
            gradients=parts.gradients,
            optimizer=parts.optimizer,
            activations=activations,
            workspace=workspace,
        )

    @property
    def is_whole(self) -> bool:
        """Whether each device holds a whole copy of everything."""
        return strategy_facts(self.strategy).memory == "whole"

    @property
    def _stage(self) -> int:
        """What is divided, as a ZeRO stage: shards are divided like its third."""
        return 3 if strategy_facts(self.strategy).memory == "shards" else self.zero_stage

    def _held(self, needs: Needs) -> int:
        return self._parts(needs.held).total + self._gathered(needs)

    def _gathered(self, needs: Needs) -> int:
        return WHOLE_BLOCKS * needs.block_bytes if self._stage == 3 else 0

    def _parts(self, held: Held) -> Held:
        """Return this device's part of what is held."""
        stage = self._stage

        def share(size: int, from_stage: int) -> int:
            return -(-size // self.num_gpus) if stage >= from_stage else size

        return Held(
            parameters=share(held.parameters, 3),
            buffers=held.buffers,
            gradients=share(held.gradients, 2),
            optimizer=0 if self.offloads_optimizer else share(held.optimizer, 1),
        )

    def __str__(self) -> str:
        facts = strategy_facts(self.strategy)
        words = {
            "whole": "one device" if facts.processes == "one" else f"{self.strategy}, whole copies",
            "shards": f"{self.strategy} over {self.num_gpus} GPUs",
            "zero": f"{self.strategy}, ZeRO stage {self.zero_stage} over {self.num_gpus} GPU(s)",
        }[facts.memory]
        words += ", optimizer in host memory" if self.offloads_optimizer else ""
        return words + (", activations recomputed" if self.recomputes else "")


def layouts(num_gpus: int) -> Iterator[MemoryLayout]:
    """Yield layouts, from the one that costs the least time to the one that takes the least memory."""
    whole = "ddp" if num_gpus > 1 else "single"
    for recomputes in (False, True):
        yield MemoryLayout(strategy=whole, num_gpus=num_gpus, recomputes=recomputes)
    if num_gpus > 1:
        for recomputes in (False, True):
            yield MemoryLayout(strategy="fsdp", num_gpus=num_gpus, recomputes=recomputes)
    for stage in (2, 3) if num_gpus > 1 else (2,):
        for recomputes in (False, True):
            yield MemoryLayout(
                strategy="deepspeed",
                num_gpus=num_gpus,
                zero_stage=stage,
                offloads_optimizer=True,
                recomputes=recomputes,
            )


def first_that_fits(needs: Needs, limit_bytes: float, num_gpus: int, micro_batch: int = 1) -> MemoryLayout | None:
    """Return the cheapest layout in which this many samples at a time fit."""
    return next(
        (layout for layout in layouts(num_gpus) if layout.largest(needs, limit_bytes, micro_batch) >= micro_batch),
        None,
    )


class WayOut(Value):
    """A remedy that a user can apply, and what it saves."""

    what: str
    saves_bytes: int
    is_enough: bool


def ways_out(
    needs: Needs, limit_bytes: float, num_gpus: int, micro_batch: int = 1, *, recomputes: bool = False
) -> list[WayOut]:
    """Return the remedies, cheapest first; those that are enough by themselves before those that are not."""
    found = list(_ways_out(needs, limit_bytes, num_gpus, micro_batch, recomputes))
    return sorted(found, key=lambda way: not way.is_enough)


def _ways_out(needs: Needs, limit_bytes: float, num_gpus: int, micro_batch: int, recomputes: bool) -> Iterator[WayOut]:
    whole = "ddp" if num_gpus > 1 else "single"
    recomputes = recomputes and needs.recompute is not None
    now = MemoryLayout(strategy=whole, num_gpus=num_gpus, recomputes=recomputes)
    line = now.line(needs) or needs.keep
    peak, room = line.peak_bytes(micro_batch), limit_bytes * (1 - FRAGMENTATION)
    smaller = line.largest(limit_bytes, micro_batch - 1)
    if smaller:
        yield WayOut(
            what=f"--batch-size {smaller}, or less: the global batch stays",
            saves_bytes=peak - line.peak_bytes(smaller),
            is_enough=True,
        )
    if needs.recompute is not None and not recomputes:
        saves = peak - needs.recompute.peak_bytes(micro_batch)
        if saves > 0:
            yield WayOut(
                what="--activations recompute: computes each block twice, about a third more time",
                saves_bytes=saves,
                is_enough=peak - saves <= room,
            )
    beyond = max(1, peak - needs.held.total)
    part = (room - needs.held.total) / beyond
    if LEAST_INPUT < part < 1:
        yield WayOut(
            what=f"shorter sequences or smaller images, so that a sample takes {part:.0%} of what it takes now",
            saves_bytes=round(peak - room),
            is_enough=True,
        )
    if needs.activation_bytes and not recomputes:
        saves = min(needs.activation_bytes * micro_batch, beyond)
        yield WayOut(
            what="--activations offload: keeps them in host memory, at the speed of the bus",
            saves_bytes=saves,
            is_enough=peak - saves <= room,
        )
    sharded = _smallest_fsdp(needs, limit_bytes, num_gpus, micro_batch)
    if sharded is not None:
        sharded_line = sharded.line(needs)
        assert sharded_line is not None
        also = " and --activations recompute" if sharded.recomputes else ""
        yield WayOut(
            what=f"{sharded.num_gpus} GPUs like this one with FSDP{also}: divides weights, gradients and optimizer",
            saves_bytes=peak - sharded_line.peak_bytes(micro_batch),
            is_enough=True,
        )
    if needs.held.optimizer:
        offloads = now.model_copy(update={"strategy": "deepspeed", "zero_stage": 2, "offloads_optimizer": True})
        offloaded = offloads.line(needs)
        assert offloaded is not None
        host = needs.held.optimizer + needs.held.gradients
        yield WayOut(
            what="DeepSpeed ZeRO with the optimizer in host memory, which needs "
            f"{format_bytes(host)} there; slower steps",
            saves_bytes=peak - offloaded.peak_bytes(micro_batch),
            is_enough=offloaded.peak_bytes(micro_batch) <= room,
        )


def _smallest_fsdp(needs: Needs, limit_bytes: float, at_least: int, micro_batch: int) -> MemoryLayout | None:
    """Return the FSDP layout with the fewest GPUs like these that fits.

    Numbers of GPUs are doubled, each first without recomputing, then with.
    """
    number = 2
    while number <= MOST_GPUS:
        for recomputes in (False, True):
            layout = MemoryLayout(strategy="fsdp", num_gpus=number, recomputes=recomputes)
            if number >= at_least and layout.largest(needs, limit_bytes, micro_batch) == micro_batch:
                return layout
        number *= 2
    return None


def does_not_fit(
    needs: Needs,
    limit_bytes: float,
    where: str,
    how_much: str,
    num_gpus: int = 1,
    micro_batch: int = 1,
    *,
    recomputes: bool = False,
) -> DrivetrainError:
    """Return the error with what takes how much, by kind and by module, and remedies. `how_much` explains the limit."""
    line = (needs.recompute if recomputes else None) or needs.keep
    peak, held = line.peak_bytes(micro_batch), needs.held
    kinds = {
        "parameters": held.parameters + held.buffers,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "activations": round(line.sample_bytes * micro_batch),
        "workspace": max(0, peak - held.total - round(line.sample_bytes * micro_batch)),
    }
    what = "not even one sample at a time fits" if micro_batch == 1 else f"{micro_batch} samples at a time do not fit"
    lines = [f"{what} on {where}: a step needs {format_bytes(peak)}, and there is {how_much}"]
    lines += [f"  {kind:<12} {format_bytes(size):>9}" for kind, size in kinds.items()]
    lines += [f"  weights by module: {_listed(needs.weights)}"] if needs.weights else []
    lines += [f"  activations by module: {_listed(needs.activations)}"] if needs.activations else []
    lines += [f"  {note}" for note in needs.notes]
    ways = ways_out(needs, limit_bytes, num_gpus, micro_batch, recomputes=recomputes)
    told = [
        f"{number}. {way.what} (saves {format_bytes(way.saves_bytes)}{'' if way.is_enough else ', not enough alone'})"
        for number, way in enumerate(ways, 1)
    ]
    remedy = "cheapest first:\n    " + "\n    ".join(told) if told else "a GPU with more memory, or a smaller model"
    return DrivetrainError("\n".join(lines), remedy=remedy)


def by_group(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sum modules of one list, largest first: `blocks.0.mlp` and `blocks.1.mlp` belong to `blocks`."""
    found: dict[str, int] = {}
    for name, size in sizes.items():
        group = re.split(r"\.?\b\d+\b", name, maxsplit=1)[0] or name or "the loss and the rest"
        found[group] = found.get(group, 0) + size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _listed(sizes: Mapping[str, int], most: int = 4) -> str:
    found: Sequence[tuple[str, int]] = list(by_group(sizes).items())
    told = ", ".join(f"{name} {format_bytes(size)}" for name, size in found[:most] if size)
    rest = sum(size for _, size in found[most:])
    return told + (f", others {format_bytes(rest)}" if rest else "")
