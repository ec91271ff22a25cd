"""Finds out in the first batches of a driven loop whether a divided step is the whole one, and says where it is not.

The loss is the loop's own, so it cannot be computed again on parts of a batch, as `dt.train` does. What is looked at is
how it was computed: its graph, the buffers that the forward changed, and its second derivatives by what the model
returned. Where samples do not meet in the loss, those of one sample's output by another's are exactly 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.core.metrics import LossSum, NamedLosses
from drivetrain.data.batch import MicroBatch, leaves
from drivetrain.loop.trainer import COUNTED_STEPS
from drivetrain.run import Session
from drivetrain.run.loss_probe import leaves_labels_out, looks_like_a_sum, mean_counts
from drivetrain.run.loss_weighting import BATCH_NORM
from drivetrain.run.model_factory import couples_samples

_MOST_CALLS = 3  # of the model for a batch: two views or towers, an anchor with two others
_MOST_VALUES = 4_000_000  # of an output: that of embeddings, not the logits of a vocabulary
_MOST_NODES = 2000  # of a graph, between the loss and the outputs
_COUPLED = "so what is learned depends on how many batches a step is divided into"


class DivisionWatch:
    """Looks at the first batches of divided steps, and tells once of each thing that makes them unlike the whole step.

    Args:
        session: The run.
        model: The model, as the loop has it.
        say: Prints a line.
        is_called: Whether the loop calls the model itself, so that its outputs can be watched; not a compiled one.
    """

    def __init__(self, session: Session, model: nn.Module, say: Callable[[str], None], *, is_called: bool) -> None:
        self._has_peers, self._model, self._say = session.world.size > 1, model, say
        # How many batches are looked at.
        self._num_left = COUNTED_STEPS if session.weighting.reason == "not measured" else 0
        self._buffers = _buffers_but_of_norms(model)
        self._versions: list[int] = []
        self._outputs = _Outputs(model) if is_called and not session.holds_parts else None
        self._counts: list[tuple[int, list[int]]] = []  # of each batch: its samples, and what its means are over
        self._told = set[str]()

    def begin(self, micro: MicroBatch) -> None:
        """Prepare to look at a batch that is handed out now."""
        if not self._is_divided(micro):
            return
        self._versions = [buffer._version for buffer in self._buffers.values()]
        if self._outputs is not None:
            self._outputs.watch()

    def end(self) -> None:
        """Look at the model's outputs no longer; called where the forward of a batch is over, however it ended."""
        if self._outputs is not None:
            self._outputs.close()

    def judge(self, micro: MicroBatch, loss: Tensor | LossSum | NamedLosses) -> None:
        """Say why the batches of a step together are not the whole one, if they are not."""
        if not self._is_divided(micro):
            self._num_left = max(0, self._num_left - 1)
            return
        is_first, self._num_left = self._num_left == COUNTED_STEPS, self._num_left - 1
        lines: dict[str, str] = {}
        if is_first and couples_samples(self._model):
            lines["norm"] = (
                f"{BATCH_NORM}: what is learned depends on how many batches a step is divided into (group or layer "
                "normalization does not depend on it)"
            )
        changed = self._changed_buffers()
        if changed:
            lines["buffers"] = (
                f"each forward pass changes {', '.join(changed[:3])}{', …' if changed[3:] else ''}, {_COUPLED}. Keep a "
                "step in one batch (--batch-size), or change it once per step in a hook, dt.every(1, …)"
            )
        lines |= self._about_loss(micro, loss, is_first=is_first)
        for kind, line in lines.items():
            if kind not in self._told:
                self._told.add(kind)
                self._say(f"  loss       {line}")

    def _is_divided(self, micro: MicroBatch) -> bool:
        return self._num_left > 0 and (self._has_peers or not micro.is_last or micro.number > 0)

    def _changed_buffers(self) -> list[str]:
        versions, self._versions = self._versions, []
        pairs = zip(self._buffers.items(), versions, strict=False)  # none where the step has a closure
        return [name for (name, buffer), version in pairs if buffer._version != version]

    def _about_loss(self, micro: MicroBatch, loss: Any, *, is_first: bool) -> dict[str, str]:
        found: dict[str, str] = {}
        if is_first and isinstance(loss, Tensor) and looks_like_a_sum(loss, max(1, micro.num_samples)):
            found["sum"] = (
                "it looks like a sum over its batch, and is taken for a mean, so its gradients depend on how many "
                "batches a step is divided into. --loss-weighting sum adds them up, as in a loop without "
                "micro-batches; run.backward(dt.LossSum(sum, count)) divides by the count"
            )
        if isinstance(loss, Tensor) and leaves_labels_out(loss):
            self._num_left = 0
            found["labels"] = (
                "it is a mean over labels that are not ignored, or over class weights, and is taken for a mean over "
                "samples, so its gradients depend on how a step is divided. run.backward(dt.LossSum(sum, count)) "
                'divides by the count: cross_entropy(…, reduction="sum") and (labels != -100).sum()'
            )
        elif isinstance(loss, Tensor) and (unlike := self._unlike_means(micro, loss)):
            found["means"] = (
                f"it is a mean over {unlike}, and is taken for a mean over samples, so its gradients depend on how a "
                "step is divided. run.backward(dt.LossSum(sum, count)) divides by the count"
            )
        total = loss.total if isinstance(loss, LossSum) else loss
        if self._outputs is not None and isinstance(total, Tensor) and self._outputs.meet_in(total, micro.num_samples):
            found["coupled"] = (
                f"it compares the samples of a batch with each other, as contrastive losses and roots of a mean do, "
                f"{_COUPLED}. Keep a step in one batch, on one process: --batch-size as large as the global batch"
            )
        return found

    def _unlike_means(self, micro: MicroBatch, loss: Tensor) -> str:
        """Return in words how the numbers of values differ that a mean is over in batches of as many samples."""
        now = micro.num_samples, mean_counts(loss)
        for num_samples, counts in self._counts:
            for before, after in zip(counts, now[1], strict=False) if len(counts) == len(now[1]) else ():
                if before != after and before * now[0] != after * num_samples:
                    return f"{before} values in a batch of {num_samples} samples and {after} in one of {now[0]}"
        self._counts.append(now)
        return ""


def _buffers_but_of_norms(model: nn.Module) -> dict[str, Tensor]:
    of_norms = {id(it) for part in model.modules() if isinstance(part, _BatchNorm) for it in part.buffers()}
    return {name: it for name, it in model.named_buffers() if id(it) not in of_norms}


class _Outputs:
    """What the outermost calls of a model's parts return while a batch is computed."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._handles: list[Any] = []
        self._found: list[Tensor] = []
        self._depth = self._num_calls = 0

    def watch(self) -> None:
        self.close()
        self._found, self._depth, self._num_calls = [], 0, 0
        for module in self._modules:
            if not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(module.register_forward_pre_hook(self._enter))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():  # the loop's own torch.compile leaves both out
            self._depth += 1

    def _leave(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        if self._depth == 0:
            self._num_calls += 1
            if self._num_calls <= _MOST_CALLS:
                self._found += [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]

    def meet_in(self, loss: Tensor, num_samples: int) -> bool:
        """Return whether the loss's derivative by the output of the first sample depends on other samples' outputs.

        Rows that are a multiple of the samples are taken for several rows of each, such as two views. False where it
        cannot be found out.
        """
        found, self._found = self._found, []
        if num_samples < 2 or self._num_calls > _MOST_CALLS:
            return False
        try:
            outputs = [it for it in found if _has_rows_of(it, num_samples)]
            outputs = _nearest(loss, outputs) if len(outputs) == len(found) else []
            return bool(outputs) and _are_coupled(loss, outputs, num_samples)
        except (RuntimeError, NotImplementedError):  # an operation has no second derivative: it is advice
            return False


def _has_rows_of(output: Tensor, num_samples: int) -> bool:
    if torch._C._functorch.is_functorch_wrapped_tensor(output) or output.layout != torch.strided:
        return False
    is_plain = output.grad_fn is not None and not output._backward_hooks and output.dim() > 0
    is_plain = is_plain and output.is_floating_point() and output.numel() <= _MOST_VALUES
    has_time_first = output.dim() > 2 and output.shape[1] == num_samples
    return is_plain and not has_time_first and output.shape[0] % num_samples == 0


def _nearest(loss: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs that the loss was computed from directly, not through other ones; none in a large graph."""
    by_node: Mapping[Any, Tensor] = {output.grad_fn: output for output in outputs}
    nodes, seen, nearest = [loss.grad_fn], set[Any](), dict[int, Tensor]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in by_node:
            nearest[id(node)] = by_node[node]
        elif len(seen) > _MOST_NODES:
            return []
        else:
            nodes += [other for other, _ in node.next_functions]
    return list(nearest.values())


def _are_coupled(loss: Tensor, outputs: Sequence[Tensor], num_samples: int) -> bool:
    firsts: Sequence[Tensor | None] = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
    for gradient in firsts:
        if gradient is None or not gradient.requires_grad:
            continue
        row = gradient[0].flatten()
        weights = torch.arange(1, len(row) + 1, dtype=row.dtype, device=row.device).cos()
        seconds: Sequence[Tensor | None] = torch.autograd.grad(
            (row * weights).sum(), outputs, retain_graph=True, allow_unused=True
        )
        for second in seconds:
            if second is None:
                continue
            touched = ((second != 0) & second.isfinite()).flatten(1 if second.dim() > 1 else 0)
            num_touched = int((touched.any(1) if second.dim() > 1 else touched).sum())
            if num_touched > second.shape[0] // num_samples:
                return True
    return False
