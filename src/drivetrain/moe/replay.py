"""Keeps a balanced sample of everything that was seen, and trains on some of it again, outside of steps.

The reservoir has equally many samples of each group, however rare or long ago. Every sample has a pseudo-random rank
that follows from the seed and its number. Of each group those with the lowest ranks are kept. So the reservoir is a
fair sample of the group's distinct samples, whatever their order and however often each was seen; it is the same on
every rank; and there is no generator whose state would have to be saved.

A replay is run on all ranks together. It borrows the job's optimizer, whose learning rates and past gradients fit the
model, and restores its state: steps are not counted, rates and moments are those of the last step, gradients that
others hold are not touched. The model is in evaluation mode: no dropout, no noise, no batch statistics, no loads
counted; so the results do not depend on how samples are divided over ranks.
"""

import hashlib
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.core.hook import Rehearsal, StepContext
from drivetrain.core.isolation import evaluating
from drivetrain.core.metrics import LossSum
from drivetrain.moe.experts import Routing
from drivetrain.moe.mixture import mixtures_in

CHECKED = 4  # one in this many is held out for checks, and never replayed
Extra = Callable[[Sequence[int], int, Mapping[str, Routing]], Tensor | None]


class Reservoir:
    """The numbers of samples by group. At most `capacity` in all."""

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self._capacity, self._seed = capacity, seed
        self._groups: dict[str, list[int]] = {}  # each by rank
        self._group_of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    @property
    def groups(self) -> Mapping[str, Sequence[int]]:
        return dict(sorted(self._groups.items()))

    def group_of(self, number: int) -> str:
        return self._group_of[number]

    def unknown(self, numbers: Iterable[int], most: int) -> list[int]:
        """Return the numbers that are not in it: those of the lowest ranks, which may be kept."""
        new = {number for number in numbers if number not in self._group_of}
        return sorted(new, key=self._rank)[:most]

    def add(self, number: int, group: str) -> None:
        if number in self._group_of:
            return
        is_new = group not in self._groups
        insort(self._groups.setdefault(group, []), number, key=self._rank)
        self._group_of[number] = group
        for name in list(self._groups) if is_new else [group]:  # a new group makes the others' shares smaller
            kept, share = self._groups[name], max(1, self._capacity // len(self._groups))
            for gone in kept[share:]:
                del self._group_of[gone]
            del kept[share:]

    @property
    def checked(self) -> list[int]:
        """The samples that are never replayed: selected by rank, so that they stay so."""
        return [number for kept in self.groups.values() for number in kept if self._is_checked(number)]

    def draw(self, count: int, *key: int, without: Collection[int] = ()) -> list[int]:
        """Draw from the samples that may be replayed: equally many of each group, at random.

        The key identifies the draw.
        """
        groups = [
            [number for number in kept if not self._is_checked(number) and number not in without]
            for kept in self.groups.values()
        ]
        # Where the count does not divide evenly, the groups that get one more are drawn, too.
        groups = sorted((kept for kept in groups if kept), key=lambda kept: self._rank(kept[0], *key))
        drawn = []
        for place, kept in enumerate(groups):
            share = count // len(groups) + (place < count % len(groups))
            drawn += sorted(kept, key=lambda number: self._rank(number, *key))[:share]
        return drawn

    def state_dict(self) -> dict[str, Any]:
        return {"groups": {name: list(kept) for name, kept in self.groups.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._groups = {name: list(kept) for name, kept in state["groups"].items()}
        self._group_of = {number: name for name, kept in self._groups.items() for number in kept}

    def _rank(self, number: int, *key: int) -> int:
        packed = repr((self._seed, number, *key)).encode()
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "big")

    def _is_checked(self, number: int) -> bool:
        # The last bits; which samples are kept is by the first ones.
        return self._rank(number) % CHECKED == 0


class ReplayedSamples(NamedTuple):
    """The inputs of a layer from this rank's samples: each token, the experts it chose, and the sample it is of."""

    tokens: Tensor
    chosen: Tensor
    sample: Tensor  # its place in `numbers`
    numbers: Sequence[int]


class Replay:
    """Replays samples during one sleep."""

    def __init__(self, context: StepContext, rehearsal: Rehearsal, micro_batch: int) -> None:
        self._context, self._rehearsal, self._world = context, rehearsal, context.world
        self._model, self._optimizer = context.model, rehearsal.optimizer
        self._micro_batch = micro_batch
        self._layers = mixtures_in(context.model)
        self._trained: list[Tensor] = [p for group in self._optimizer.param_groups for p in group["params"]]
        # Experts on one rank each: their gradients include the tokens of all ranks already.
        self._own = {
            id(parameter)
            for layer in self._layers.values()
            if len(layer.dispatcher.placement(layer.num_slots)[1]) > 1
            for parameter in layer.experts.parameters()
        }

    # Looking

    @torch.no_grad()
    def loss(self, numbers: Sequence[int]) -> float:
        """Return the mean loss over these samples, the same on every rank."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        with evaluating(self._model):
            for own, weight in self._parts(numbers):
                total, count = self._loss(own)
                totals += weight * torch.stack([total.double(), torch.as_tensor(count).to(totals)])
        total, count = self._world.all_reduce(totals).tolist()
        return total / count if count else 0.0

    @torch.no_grad()
    def look(self, numbers: Sequence[int]) -> dict[str, ReplayedSamples]:
        """Return the inputs of each mixture for these samples, on this rank."""
        found: dict[str, list[ReplayedSamples]] = {name: [] for name in self._layers}
        with evaluating(self._model), self._routings() as routings:
            for own, weight in self._parts(numbers):
                routings.clear()
                self._loss(own)
                for name, (tokens, routing) in routings.items():
                    kept = len(tokens) if weight else 0
                    sample = torch.arange(kept, device=tokens.device) * len(own) // max(len(tokens), 1)
                    found[name].append(ReplayedSamples(tokens[:kept], routing.chosen[:kept], sample, own))
        return {name: _joined(parts) for name, parts in found.items() if parts}

    # Learning

    @contextmanager
    def borrowed(self, rate: float) -> Iterator[None]:
        """Let the job's optimizer be stepped inside, at `rate` times its learning rates; restore it on exit."""
        state = self._optimizer.state
        had = {parameter: {name: _copied(value) for name, value in kept.items()} for parameter, kept in state.items()}
        rates = [_copied(group["lr"]) for group in self._optimizer.param_groups]
        gradients = [parameter.grad for parameter in self._trained]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"].mul_(rate) if isinstance(group["lr"], Tensor) else group["lr"] * rate
        try:
            yield
        finally:
            for parameter in list(state):
                for name in set(state[parameter]) - set(had.get(parameter, {})):
                    del state[parameter][name]
            for parameter, kept in had.items():
                for name, value in kept.items():
                    _put_back(state[parameter], name, value)
            for group, old in zip(self._optimizer.param_groups, rates, strict=True):
                _put_back(group, "lr", old)
            for parameter, gradient in zip(self._trained, gradients, strict=True):
                parameter.grad = gradient

    def step(self, numbers: Sequence[int], only: set[int] | None = None, extra: Extra | None = None) -> None:
        """Step once on these samples, inside `borrowed`. `only`: ids of the parameters that move.

        `extra` is added to the mean loss: it gets this rank's samples, their weight and routings, and returns this
        rank's part. It is called once for each portion that is computed at once.
        """
        trained = [p for p in self._trained if p.requires_grad and (only is None or id(p) in only)]
        sums = [torch.zeros_like(parameter) for parameter in trained]
        added = [torch.zeros_like(parameter) for parameter in trained]
        count = torch.zeros((), dtype=torch.float64, device=self._world.device)
        with evaluating(self._model), self._routings() as routings:
            for own, weight in self._parts(numbers):
                routings.clear()
                total, items = self._loss(own)
                said = {name: found[1] for name, found in routings.items()}
                more = None if extra is None else extra(own, weight, said)
                # Weighted before backward: experts of other ranks get gradients from this rank's tokens, too.
                _add(sums, self._gradients(total * weight, trained, keep=more is not None))
                if more is not None:
                    _add(added, self._gradients(more, trained))
                count += weight * torch.as_tensor(items).to(count)
        self._world.all_reduce(count)
        gradients = self._over_ranks(trained, [total / count.to(total) for total in sums])
        if extra is not None:
            _add(gradients, self._over_ranks(trained, added))
        self._clip(trained, gradients)
        for parameter in self._trained:
            parameter.grad = None  # the optimizer skips parameters without one
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()

    @contextmanager
    def learning(self, rate: float) -> Iterator[None]:
        """Borrow the optimizer for steps inside; on exit the EMA of the weights is moved by as much as they were."""
        averages = self._averages()
        before = [parameter.detach().clone() for parameter, _ in averages]
        with self.borrowed(rate):
            yield
        with torch.no_grad():
            for (parameter, average), old in zip(averages, before, strict=True):
                average += parameter - old

    def saved(self) -> Callable[[], None]:
        """Return a function that restores weights and their EMA to their present values; the optimizer is borrowed."""
        tensors = [*self._trained, *(average for _, average in self._averages())]
        before = [tensor.detach().clone() for tensor in tensors]

        @torch.no_grad()
        def put_back() -> None:
            torch._foreach_copy_(tensors, before)

        return put_back

    def _averages(self) -> list[tuple[Tensor, Tensor]]:
        found = [(parameter, self._context.experts.companions(parameter).get("average")) for parameter in self._trained]
        return [(parameter, average) for parameter, average in found if average is not None]

    # What all of it needs

    def _parts(self, numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
        """Yield this rank's samples in portions; all ranks get equally many, those with nothing left at weight 0."""
        rank, size = self._world.rank, self._world.size
        own = numbers[len(numbers) * rank // size : len(numbers) * (rank + 1) // size]
        most = -(-len(numbers) // size)
        for start in range(0, most, self._micro_batch):
            portion = own[start : start + self._micro_batch]
            yield (portion, 1) if portion else (numbers[:1], 0)

    def _loss(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor | float]:
        result: Any = self._rehearsal.loss(self._model, self._rehearsal.samples.batch(numbers))
        return (result.total, result.count) if isinstance(result, LossSum) else (result * len(numbers), len(numbers))

    def _gradients(self, value: Tensor, trained: list[Tensor], *, keep: bool = False) -> list[Tensor | None]:
        if not value.requires_grad:
            return [None] * len(trained)
        return list(torch.autograd.grad(value, trained, retain_graph=keep, allow_unused=True))

    def _over_ranks(self, trained: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        shared = [index for index, parameter in enumerate(trained) if id(parameter) not in self._own]
        if self._world.size > 1 and shared:
            flat = self._world.all_reduce(torch.cat([gradients[index].flatten() for index in shared]))
            parts = torch.split(flat, [gradients[index].numel() for index in shared])
            for index, part in zip(shared, parts, strict=True):
                gradients[index] = part.view_as(gradients[index])
        return gradients

    def _clip(self, trained: list[Tensor], gradients: list[Tensor]) -> None:
        most = self._rehearsal.clip_norm
        if most is None:
            return
        own = [g for p, g in zip(trained, gradients, strict=True) if id(p) in self._own]
        shared = [g for p, g in zip(trained, gradients, strict=True) if id(p) not in self._own]
        square = torch.zeros((), dtype=torch.float64, device=self._world.device)
        square += sum(gradient.double().square().sum() for gradient in own)
        if self._own:
            self._world.all_reduce(square)
        square += sum(gradient.double().square().sum() for gradient in shared)
        torch._foreach_mul_(gradients, (most / (square.sqrt() + 1e-6)).clamp(max=1.0).to(gradients[0]))

    @contextmanager
    def _routings(self) -> Iterator[dict[str, tuple[Tensor, Routing]]]:
        """Collect each router's last input and routing."""
        found: dict[str, tuple[Tensor, Routing]] = {}

        def note(name: str) -> Callable[..., None]:
            return lambda router, inputs, routing: found.update({name: (inputs[0].detach(), routing)})

        handles = [layer.router.register_forward_hook(note(name)) for name, layer in self._layers.items()]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def _joined(parts: list[ReplayedSamples]) -> ReplayedSamples:
    first = [sum(len(part.numbers) for part in parts[:index]) for index in range(len(parts))]
    return ReplayedSamples(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.chosen for part in parts]),
        torch.cat([part.sample + start for part, start in zip(parts, first, strict=True)]),
        [number for part in parts for number in part.numbers],
    )


def _add(sums: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for total, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:
            total += gradient


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _put_back(kept: Any, name: str, value: Any) -> None:
    """Restore a value, in place where it is a tensor: a captured graph reads it at its address."""
    if isinstance(value, Tensor):
        kept[name].copy_(value)
    else:
        kept[name] = value
