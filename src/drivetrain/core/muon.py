"""Muon for weights that are matrices: whole, or as rows that ranks share by FSDP.

The update of a matrix is its momentum, orthogonalized by a few Newton-Schulz iterations, which need all of it. Where a
rank has only rows, each matrix has an owner: all ranks send it their rows, it iterates, and sends the rows of the
result back. So the work is shared out, too. Matrices of one shape are iterated together: a small one alone does not
keep a GPU busy, and each takes twenty kernels.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.optimizers import Optim

IterationDtype = Literal["bf16", "fp32"]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STACK_ELEMENTS = 2**25  # matrices of one shape are iterated together up to this size: beyond, nothing is gained
# What is a matrix and yet no hidden layer: rows of embeddings and of the last layer stand for words or classes.
NOT_HIDDEN = ("*embed*", "*emb.*", "*wte*", "*wpe*", "*token*", "*position*", "*head*", "*classifier*")


class Muon(torch.optim.Muon):
    """Muon as torch has it, with the type of its iteration as a setting, and for sharded weights, too.

    Args:
        params: Parameters of two dimensions, or groups of them.
        lr: The learning rate.
        dtype: The type in which updates are orthogonalized. `bf16` is what Muon was made with, and the fastest on a
            GPU; then another micro-batch or number of devices moves results by some 1e-3. `fp32` keeps that at
            rounding.
        options: The other options of `torch.optim.Muon`: `weight_decay`, `momentum`, `nesterov`, `ns_coefficients`,
            `eps`, `ns_steps` and `adjust_lr_fn`.

    Example:
        >>> optimizer = dt.Muon([torch.nn.Parameter(torch.ones(4, 8))], lr=0.02, dtype="fp32")
    """

    unsaved_attributes = ("_rows",)  # that follow from how weights are sharded

    def __init__(self, params: Any, lr: float = 1e-3, *, dtype: IterationDtype = "bf16", **options: Any) -> None:
        if dtype not in _DTYPES:
            raise DrivetrainError(f"Muon(dtype={dtype!r})", remedy='dtype="bf16" or dtype="fp32"')
        super().__init__(params, lr=lr, **options)
        for group in self.param_groups:
            group.setdefault("iteration_dtype", dtype)
        self._rows: dict[Tensor, _Rows] = {}  # of parameters that ranks share

    def take_rows(self, parts: Mapping[Tensor, Tensor]) -> None:
        """Have the optimizer know the matrices that its parameters are rows of.

        Args:
            parts: This rank's part of each matrix, and the distributed tensor that it is of.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in parts:
                    self._rows[parameter] = _rows_of(parameter, parts[parameter])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step, on all ranks together where they share weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            updates = self._orthogonalized(group, held, self._momenta(group, held))
            rate = float(group["lr"])
            for parameter, update in zip(held, updates, strict=True):
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-_adjusted(rate, group["adjust_lr_fn"], self._shape(parameter)))
        return loss

    def _shape(self, parameter: Tensor) -> tuple[int, int]:
        rows, columns = self._rows[parameter].shape if parameter in self._rows else parameter.shape
        return rows, columns

    def _momenta(self, group: Mapping[str, Any], held: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what is orthogonalized: the momenta, which look ahead where they are Nesterov's."""
        if not held:
            return []
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        for parameter, gradient in zip(held, gradients, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                empty = torch.zeros_like(gradient, memory_format=torch.preserve_format)
                self.state[parameter]["momentum_buffer"] = empty
        kept = [self.state[parameter]["momentum_buffer"] for parameter in held]
        torch._foreach_lerp_(kept, gradients, 1 - group["momentum"])
        found = torch._foreach_lerp(gradients, kept, group["momentum"]) if group["nesterov"] else kept
        return [each.to(_DTYPES[group["iteration_dtype"]]) for each in found]

    def _orthogonalized(
        self, group: Mapping[str, Any], held: Sequence[Tensor], updates: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        shared = [number for number, parameter in enumerate(held) if parameter in self._rows]
        whole = [number for number, parameter in enumerate(held) if parameter not in self._rows]
        found = dict(zip(whole, _all_iterated([updates[number] for number in whole], group), strict=True))
        if shared:
            rows = [self._rows[held[number]] for number in shared]
            found |= zip(shared, _by_owners(rows, [updates[number] for number in shared], group), strict=True)
        return [found[number] for number in range(len(held))]


def muon_with_adamw(
    lr: float = 0.02,
    adamw_lr: float = 3e-4,
    *,
    dtype: IterationDtype = "bf16",
    not_hidden: Sequence[str] = NOT_HIDDEN,
    weight_decay: float = 0.0,
    **options: Any,
) -> dict[str, Optim]:
    """Return the optimizers of a job: Muon for the matrices of hidden layers, AdamW for all other weights.

    Args:
        lr: The learning rate of Muon.
        adamw_lr: The learning rate of AdamW.
        dtype: The type of Muon's iteration, as in `dt.Muon`.
        not_hidden: Patterns of the names of matrices that AdamW trains: embeddings and the last layer, whose rows stand
            for words or classes. Give your model's own names if it calls them otherwise.
        weight_decay: Weight decay of the weights that have two dimensions or more.
        options: Other options of `dt.Muon`, such as `momentum` or `adjust_lr_fn`.

    Example:
        >>> optimizers = dt.muon_with_adamw(lr=0.02, adamw_lr=3e-4)
        >>> list(optimizers)
        ['matrices', 'rest']
    """

    def is_hidden(name: str, parameter: nn.Parameter) -> bool:
        return parameter.dim() == 2 and not any(fnmatchcase(name, pattern) for pattern in not_hidden)

    def matrices(params: Any) -> torch.optim.Optimizer:
        return Muon(params, lr=lr, dtype=dtype, weight_decay=weight_decay, **options)

    def rest(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=adamw_lr)

    return {
        "matrices": Optim(matrices, params=is_hidden, weight_decay=weight_decay),
        "rest": Optim(rest, weight_decay=weight_decay),
    }


def _adjusted(rate: float, how: str | None, shape: tuple[int, int]) -> float:
    """Return the learning rate for a matrix of this shape, so that updates of all shapes are of similar size."""
    rows, columns = shape
    if how == "match_rms_adamw":
        return rate * 0.2 * math.sqrt(max(rows, columns))
    return rate * math.sqrt(max(1, rows / columns))


def _all_iterated(matrices: Sequence[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
    """Iterate some matrices, those of one shape together."""
    found: dict[int, Tensor] = {}
    by_shape: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(number)
    for shape, numbers in by_shape.items():
        at_once = max(1, STACK_ELEMENTS // max(1, shape.numel()))
        for start in range(0, len(numbers), at_once):
            some = numbers[start : start + at_once]
            if len(some) == 1:
                found[some[0]] = _iterated(matrices[some[0]], group)
            else:
                found |= zip(some, _iterated(torch.stack([matrices[number] for number in some]), group), strict=True)
    return [found[number] for number in range(len(matrices))]


def _iterated(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Push the singular values of a matrix toward 1, by an odd polynomial of degree 5 that is applied a few times.

    A stack of matrices has a first dimension more.
    """
    first, third, fifth = group["ns_coefficients"]
    add_product: Callable[..., Tensor] = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if is_tall else matrix
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=group["eps"])
    with _exact_products(matrix):
        for _ in range(group["ns_steps"]):
            gram = wide @ wide.mT
            wide = add_product(wide, add_product(gram, gram, gram, beta=third, alpha=fifth), wide, beta=first)
    return wide.mT if is_tall else wide


@contextmanager
def _exact_products(matrix: Tensor) -> Iterator[None]:
    """Multiply float32 matrices in float32, whatever else may be rounded to TF32."""
    before = torch.get_float32_matmul_precision()
    if matrix.dtype is not torch.float32 or matrix.device.type != "cuda" or before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# Matrices of which each rank has rows


class _Rows(NamedTuple):
    """The matrix that a parameter is rows of."""

    shape: tuple[int, int]
    group: Any  # of the processes that share it

    def num_rows(self, rank: int, world_size: int) -> int:
        """Return how many rows a rank has: equal parts from the first on, as FSDP cuts them."""
        most = -(-self.shape[0] // world_size)
        return max(0, min(most, self.shape[0] - rank * most))


def _rows_of(part: Tensor, matrix: Any) -> _Rows:
    mesh = matrix.device_mesh
    if part.device.type != mesh.device_type:
        raise DrivetrainError(
            "Muon needs whole matrices, and these are kept in host memory", remedy="leave the offloading of weights out"
        )
    found = _Rows((matrix.shape[0], matrix.shape[1]), mesh.get_group(mesh.ndim - 1))  # of the ranks of one copy
    rank, size = dist.get_rank(found.group), dist.get_world_size(found.group)
    if part.shape[0] != found.num_rows(rank, size):
        raise DrivetrainError(
            f"a rank has {part.shape[0]} rows of a matrix of {matrix.shape[0]}, which Muon does not expect",
            remedy="--parallel-strategy ddp",
        )
    return found


def _by_owners(rows: Sequence[_Rows], updates: Sequence[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
    """Return this rank's rows of each orthogonalized matrix. All ranks call it together."""
    processes = rows[0].group
    rank, size = dist.get_rank(processes), dist.get_world_size(processes)
    owners = _owners([each.shape for each in rows], size)

    def num_elements(number: int, of_rank: int) -> int:
        return rows[number].num_rows(of_rank, size) * rows[number].shape[1]

    owned_by = [[number for number, owner in enumerate(owners) if owner == each] for each in range(size)]
    mine = owned_by[rank]
    sent = [sum(num_elements(number, rank) for number in numbers) for numbers in owned_by]  # to each rank
    received = [sum(num_elements(number, each) for number in mine) for each in range(size)]  # from each rank
    flat = torch.cat([updates[number].reshape(-1) for numbers in owned_by for number in numbers])
    arrived = flat.new_empty(sum(received))
    dist.all_to_all_single(arrived, flat, received, sent, group=processes)
    pieces = iter(torch.split(arrived, [num_elements(number, each) for each in range(size) for number in mine]))
    parts = {(each, number): next(pieces) for each in range(size) for number in mine}
    gathered = [torch.cat([parts[each, number] for each in range(size)]).view(rows[number].shape) for number in mine]
    iterated = [matrix.reshape(-1) for matrix in _all_iterated(gathered, group)]
    whole = dict(zip(mine, iterated, strict=True))
    by_rank = {
        number: torch.split(whole[number], [num_elements(number, each) for each in range(size)]) for number in mine
    }
    back = [by_rank[number][each] for each in range(size) for number in mine]
    flat_back = torch.cat(back) if back else arrived[:0]
    returned = torch.empty_like(flat)
    dist.all_to_all_single(returned, flat_back, sent, received, group=processes)
    order = [number for numbers in owned_by for number in numbers]
    found = dict(zip(order, torch.split(returned, [num_elements(number, rank) for number in order]), strict=True))
    return [found[number].view(-1, rows[number].shape[1]) for number in range(len(rows))]


def _owners(shapes: Iterable[tuple[int, int]], size: int) -> list[int]:
    """Return the rank that iterates each matrix: the largest first, each to the rank with the least work so far."""
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    found, load = [0] * len(costs), [0] * size
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        found[number] = min(range(size), key=lambda rank: (load[rank], rank))
        load[found[number]] += costs[number]
    return found
