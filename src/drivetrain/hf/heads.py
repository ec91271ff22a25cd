"""What the loss of a transformers model is a mean of, by its class; and the loss of a job, as a sum over these items.

`model(**batch).loss` is a mean over the labels of its batch that are not -100. The mean of the means of micro-batches
is another number as soon as they have different numbers of such labels, so a job's loss is a sum with its count.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.metrics import LossSum, summed_by_count

MASKED = -100  # the label that transformers leaves out of a loss
Task = Literal["causal-lm", "masked-lm", "token-classification", "seq2seq-lm", "sequence-classification"]
_TABLES: dict[Task, str] = {  # in the order in which a class is looked for: some are in several
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
TASKS = tuple(_TABLES)
OWN_LOSS = (
    "make the job with dt.Job(…, loss=lambda model, batch: model(**batch).loss): what it is a mean of is measured"
)

SDPA = (
    'use a GPU; or attn_implementation="sdpa" in the configuration, or from_pretrained(…, attn_implementation="sdpa")'
)


class Head(NamedTuple):
    """The task of a model, and the columns that its `forward` takes."""

    task: Task
    inputs: tuple[str, ...]

    @property
    def labels_are_tokens(self) -> bool:
        """Whether there is a label for each token of `input_ids`."""
        return self.task in ("causal-lm", "masked-lm", "token-classification")

    @property
    def items(self) -> str:
        return "samples" if self.task == "sequence-classification" else "tokens"


def head_of(model_class: type, config: Any) -> Head:
    """Return what a class of transformers learns. Raises where the number of items of its loss is not known."""
    from transformers.models.auto import modeling_auto

    name = model_class.__name__
    forward = inspect.unwrap(model_class.forward)  # type: ignore[attr-defined]
    tasks = [task for task, table in _TABLES.items() if name in _classes(getattr(modeling_auto, table))]
    if not tasks:
        raise _unknown(f"{name} is none of the models that dt.hf.job knows the loss of: {', '.join(TASKS)}")
    task = tasks[0]
    # Every other decoder shifts its labels in the loss function that the models share; some have their own way.
    if task == "causal-lm" and "loss_function" not in forward.__code__.co_names:
        raise _unknown(f"{name} does not use the causal loss of transformers, so how it shifts labels is not known")
    if task == "seq2seq-lm" and not getattr(config, "is_encoder_decoder", False):
        raise _unknown(f"{name} makes a text of something other than a text")
    if getattr(config, "output_router_logits", False):
        raise _unknown(f"{name} adds the loss of its router (output_router_logits=True), which is no sum over tokens")
    return Head(task, tuple(inspect.signature(forward).parameters))


def class_for(config: Any, task: Task | None) -> type:
    """Return the class that a configuration is built as: by its task, else by its `architectures`, else a causal LM."""
    import transformers
    from transformers.models.auto import modeling_auto

    if task is not None and task not in _TABLES:
        raise DrivetrainError(f"there is no task {task!r}", remedy=f"one of {', '.join(TASKS)}")
    named = (getattr(config, "architectures", None) or [None])[0]
    if task is None and named is not None and hasattr(transformers, named):
        by_name: type = getattr(transformers, named)
        return by_name
    names = getattr(modeling_auto, _TABLES[task or "causal-lm"])
    if config.model_type not in names:
        raise DrivetrainError(
            f"a {config.model_type} model has no head for {task or 'causal-lm'}",
            remedy=f"give task=…, one of {', '.join(TASKS)}, or the model itself",
        )
    name = names[config.model_type]
    by_task: type = getattr(transformers, name if isinstance(name, str) else name[0])
    return by_task


def make_loss(
    head: Head,
    varying_dims: tuple[int, ...] = (),
    label_smoothing: float = 0.0,
    config: Any = None,
    *,
    masks_rows: bool = False,
) -> Callable[[nn.Module, Any], LossSum]:
    """Make the loss function of a job: the model's own loss, as a sum over the labels that count.

    Args:
        head: What the model learns.
        varying_dims: The dimensions of its batches that vary, for the compiler (`strategies/compiling.py`).
        label_smoothing: The part of each label that is spread over all classes, as torch's `cross_entropy` does.
        config: The model's configuration, which names its implementation of attention.
        masks_rows: Whether the mask of samples that share a row is made here. Transformers makes the same one, but asks
            the device first whether there are such rows, so that the host waits in every step.
    """

    is_flex = getattr(config, "_attn_implementation", None) == "flex_attention"
    # A cache of keys and values is of no use here.
    options = {"use_cache": False} if "use_cache" in head.inputs else {}

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> LossSum:
        if is_flex and batch["labels"].device.type == "cpu" and torch.is_grad_enabled():
            raise DrivetrainError(
                "flex attention cannot be trained on a CPU: torch has no backward for it", remedy=SDPA
            )
        masks = {"attention_mask": row_mask(batch["position_ids"])} if masks_rows else {}
        output = model(**{**options, **batch, **masks})
        mean = output.loss
        if label_smoothing or (head.task == "causal-lm" and output.logits.dtype is torch.float64):
            # The causal loss of transformers rounds logits to float32.
            mean = _cross_entropy(head, output.logits, batch["labels"], label_smoothing)
        # A batch without any label that counts has a mean of 0/0: it contributes nothing.
        summed = summed_by_count({"loss": mean}, {"loss": _num_items(head, batch["labels"])})["loss"]
        assert isinstance(summed, LossSum)
        return summed

    loss.varying_dims = varying_dims  # type: ignore[attr-defined]
    return loss


def row_mask(position_ids: Tensor) -> Tensor:
    """Return which tokens of a row each token attends to: those before it in its own sample, which begins at 0."""
    sample = (position_ids == 0).cumsum(-1)
    length = position_ids.shape[-1]
    is_before = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).tril()
    return (sample[:, None, :, None] == sample[:, None, None, :]) & is_before


def _cross_entropy(head: Head, logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    if head.task == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits = logits if logits.dtype is torch.float64 else logits.float()
    classes = logits.reshape(-1, logits.shape[-1])
    return cross_entropy(classes, labels.flatten(), ignore_index=MASKED, label_smoothing=label_smoothing)


def _num_items(head: Head, labels: Tensor) -> Tensor | int:
    if head.task == "sequence-classification" and (labels.is_floating_point() or labels.dim() > 1):
        return len(labels)  # regression, or several labels per sample
    counted = labels[..., 1:] if head.task == "causal-lm" else labels
    return (counted != MASKED).sum()


def _classes(names: Mapping[str, str | tuple[str, ...]]) -> set[str]:
    return {name for entry in names.values() for name in ([entry] if isinstance(entry, str) else entry)}


def _unknown(message: str) -> DrivetrainError:
    return DrivetrainError(message, remedy=OWN_LOSS)
