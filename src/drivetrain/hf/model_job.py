"""Makes a `Job` of a transformers model and tokenized data."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.core.aims import positive_batch
from drivetrain.core.errors import DrivetrainError, InputError
from drivetrain.core.isolation import generators_kept
from drivetrain.core.schedules import WarmupCosine
from drivetrain.data.keyed_items import spread_over
from drivetrain.data.source import Source, source_of
from drivetrain.hf.adapters import is_adapted, with_adapter
from drivetrain.hf.heads import MASKED, OWN_LOSS, Task, class_for, head_of, make_loss
from drivetrain.hf.padding import Collator, pad_id_for
from drivetrain.hf.row_shape import OpenedModel, RowShape, takes_row_masks
from drivetrain.hf.rows import open_rows
from drivetrain.job import Job

LR, ADAPTER_LR, WEIGHT_DECAY, CLIP_NORM = 5e-5, 2e-4, 0.01, 1.0
EPOCHS, GLOBAL_BATCH = 3, 16
_SPREAD, _LOOK_SECONDS = 16, 5.0  # samples that are read first for labels, and how long others are
MOST_WARMUP_STEPS, WARMUP_PART = 100, 10


def job(
    model: Any,
    data: Any,
    *,
    name: str | None = None,
    task: Task | None = None,
    adapter: Path | str | None = None,
    tokenizer: Any = None,
    pad_id: int | None = None,
    columns: Mapping[str, str] | None = None,
    length: int | None = None,
    packing: bool | None = None,
    group_by_length: bool = False,
    valid: Any = None,
    test: Any = None,
    lr: float | None = None,
    label_smoothing: float = 0.0,
    **fields: Any,
) -> Job:
    """Make a `Job` that trains a transformers model on tokenized data.

    The loss is the model's own, as a sum over the labels that are not -100: any micro-batch and any number of devices
    train like the whole batch at once. A batch in which no label counts contributes nothing.

    Where samples have different lengths, those of a micro-batch of a causal model are packed into rows, each of which
    attends to itself alone, if that saves much padding; otherwise they are padded at their end, to one of a few
    lengths. Neither changes the loss, and the run tells which was chosen. A global batch counts samples in either case.

    Unless `fields` say otherwise, the optimizer is `torch.optim.AdamW`, with a weight decay of 0.01 on weights of two
    dimensions and more; the schedule is `WarmupCosine`, with a warm-up of a tenth of the steps, at most 100; gradients
    are clipped to a norm of 1; a step has 16 samples, or all where there are fewer; and the job has 3 epochs, where
    `max_steps` is not given either.

    Args:
        model: A model of transformers, or a `PeftModel`, of which only the adapter trains; a configuration, whose
            weights are drawn by the job's seed; or a local folder, whose weights are loaded in float32. Nothing is
            downloaded. Models for causal, masked and sequence-to-sequence language modeling, for token classification
            and for sequence classification are known; others raise an error.
        data: Samples with `input_ids` and, except for a causal model, `labels`: a list of dictionaries, a data set of
            torch or of `datasets`, a dictionary of tensors, or the path of a JSON-lines or Parquet file.
        name: The name of the run. Default: the type of the model, such as `llama`.
        task: What a configuration or folder is built for: `causal-lm`, `masked-lm`, `seq2seq-lm`,
            `token-classification` or `sequence-classification`. Default: the first of its `architectures`, else
            `causal-lm`.
        adapter: The folder of an adapter of peft that goes on training, on top of `model`. Its base model must have
            the same shapes.
        tokenizer: Its `pad_token_id` pads samples.
        pad_id: The token that pads samples. Default: the tokenizer's, the model's, or the model's end of text.
        columns: What the data calls a column, by the name that the model takes it under: `{"labels": "target"}`.
            `label` and `label_ids` are found as they are.
        length: The length of every row; samples must not be longer. Default: one of a few lengths, the shortest that
            holds a batch's longest sample.
        packing: Whether several samples may share a row. Default: where it saves a tenth of the tokens or more, the
            model can tell samples of a row apart, and there are no `metrics`, which would get such rows.
        group_by_length: Whether global batches are made of samples of similar length, as `dt.by_length` does.
        valid: The validation set, like `data`, or several by name.
        test: The test set, likewise.
        lr: The highest learning rate. Default: 5e-5; 2e-4 for an adapter.
        label_smoothing: The part of each label that is spread over all classes.
        fields: Any other field of `Job`, such as `max_steps`, `global_batch`, `seed` or `optimizer`.

    Returns:
        The job, for `dt.train`, `dt.evaluate` and whatever else takes one.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, pad_token_id=0)
        >>> samples = [{"input_ids": [5, 7, 9, 2]}, {"input_ids": [5, 8, 2]}] * 8
        >>> job = dt.hf.job(config, samples, max_steps=2, global_batch=4)
        >>> dt.train(job, quiet=True).steps
        2
    """
    opened = open_model(model, task)
    if adapter is not None:
        base = opened.model if isinstance(opened.model, nn.Module) else opened.model()
        opened = open_model(with_adapter(base, Path(adapter)))
    head = head_of(opened.model_class, opened.config)
    collate = Collator(head, pad_id_for(head, opened.config, tokenizer, pad_id), dict(columns or {}), length)
    valid_rows, test_rows = _open_sets(valid), _open_sets(test)
    source = source_of(open_rows(data))
    if lr is not None and "optimizer" in fields:
        raise DrivetrainError("both lr and an optimizer are given", remedy="give the rate to the optimizer")
    rate = lr if lr is not None else ADAPTER_LR if opened.is_adapter else LR
    defaults: dict[str, Any] = {
        "name": name or opened.config.model_type,
        "optimizer": lambda groups: torch.optim.AdamW(groups, lr=rate),
        "global_batch": source.global_batch or min(GLOBAL_BATCH, source.samples_per_epoch(None) or GLOBAL_BATCH),
        "weight_decay": WEIGHT_DECAY,
        "clip_norm": CLIP_NORM,
        "collate": collate,
        "items": head.items,
        "epochs": None if "max_steps" in fields else EPOCHS,
    }
    fields = {**defaults, **fields}
    fields.setdefault("schedule", WarmupCosine(warmup_steps=_warmup_steps(source, fields)))
    if fields["collate"] is collate:  # a user's own may take other columns
        shape = RowShape(opened, collate, packing, group_by_length)
        source, opened, collate = shape.settled(source, fields)
        fields["collate"] = collate
    elif packing or group_by_length:
        raise DrivetrainError(
            "packing and group_by_length are done by the job's own collate function, and another is given",
            remedy="leave collate out; or group with data=dt.by_length(data, lengths)",
        )
    masks_rows = fields["collate"] is collate and collate.packs and takes_row_masks(opened.config)
    loss = make_loss(head, collate.varying_dims, label_smoothing, opened.config, masks_rows=masks_rows)
    made = Job(model=opened.model, data=source, loss=loss, valid=valid_rows, test=test_rows, **fields)
    for each in (made.source, *made.valid_sets.values(), *made.test_sets.values()):
        if made.collate is collate:
            _try_first(each, collate)
    if made.collate is collate:
        _refuse_masked(made.source, collate)
    return made


def open_model(model: Any, task: Task | None = None) -> OpenedModel:
    """Find out what a job was given as its model; a folder's weights are not read yet."""
    try:
        from transformers import PretrainedConfig, PreTrainedModel
    except ImportError as error:
        remedy = "pip install 'drivetrain[hf]'"
        raise DrivetrainError(f"dt.hf needs transformers: {error}", remedy=remedy) from error

    if isinstance(model, PreTrainedModel):
        return OpenedModel(model, type(model), model.config)
    if is_adapted(model):
        _refuse_prompts(model)
        base = model.get_base_model()
        return OpenedModel(model, type(base), base.config, is_adapter=True)
    if isinstance(model, PretrainedConfig):
        built_as = class_for(model, task)
        return OpenedModel(lambda: _module(built_as(model)), built_as, model)
    if isinstance(model, (str, Path)):
        return _open_folder(Path(model), task)
    raise DrivetrainError(
        f"expected a model of transformers, its configuration or a local folder, got {type(model).__name__}",
        remedy="give the model itself; for a module of your own, make the job with dt.Job",
    )


def _refuse_prompts(model: Any) -> None:
    if model.active_peft_config.is_prompt_learning:
        kind = model.active_peft_config.peft_type.value
        raise DrivetrainError(f"{kind} puts tokens before each sample, which changes the labels", remedy=OWN_LOSS)


def _open_folder(folder: Path, task: Task | None) -> OpenedModel:
    from transformers import AutoConfig

    if (folder / "adapter_config.json").is_file():
        raise DrivetrainError(
            f"{folder} holds an adapter, without the model it belongs to",
            remedy=f"dt.hf.job(base_model, …, adapter={str(folder)!r})",
        )
    if not (folder / "config.json").is_file():
        raise DrivetrainError(
            f"there is no model in {folder}: no config.json",
            remedy="give a folder that save_pretrained wrote; to fetch one: hf download NAME --local-dir FOLDER",
        )
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    built_as: Any = class_for(config, task)

    def load() -> nn.Module:
        return _module(built_as.from_pretrained(folder, local_files_only=True, dtype=torch.float32))

    return OpenedModel(load, built_as, config)


def _module(made: Any) -> nn.Module:
    assert isinstance(made, nn.Module)
    return made


def _open_sets(sets: Any) -> Any:
    """Open a validation or test set, or several by name."""
    if type(sets) is dict:
        return {name: open_rows(each) for name, each in sets.items()}
    return None if sets is None else open_rows(sets)


def _try_first(source: Source, collate: Collator) -> None:
    """Look at the first sample, so that a missing column is told before anything is started."""
    if source.is_keyed and len(source.dataset):
        collate.sample(source.dataset[0])


def _refuse_masked(source: Source, collate: Collator) -> None:
    """Raise where no label counts: such a run would learn nothing, and say so nowhere."""
    if not source.is_keyed or not collate.head.labels_are_tokens:
        return
    began, num_read = time.monotonic(), 0
    numbers = dict.fromkeys([*spread_over(len(source.dataset), _SPREAD), *range(len(source.dataset))])
    with generators_kept():
        for number in numbers:
            labels = collate.sample(source.dataset[number])["labels"]
            if bool((labels[1:] if collate.head.task == "causal-lm" else labels).ne(MASKED).any()):
                return
            num_read += 1
            if time.monotonic() - began > _LOOK_SECONDS:
                break
    raise InputError(
        f"none of the {num_read} samples that were read has a label that counts: all are {MASKED}, hidden by the "
        "attention_mask, or the only token",
        remedy="check how labels are made: a prompt may be masked, its answer must not",
    )


def _warmup_steps(source: Source, fields: Mapping[str, Any]) -> int:
    """Return a tenth of the job's steps, at most 100; 100 where their number is not known."""
    batch = positive_batch(fields["global_batch"])
    per_epoch = source.steps_per_epoch(batch) if batch is not None else None
    by_epochs = per_epoch * fields["epochs"] if per_epoch is not None and fields["epochs"] else None
    steps = min((each for each in (by_epochs, fields.get("max_steps")) if each is not None), default=None)
    return MOST_WARMUP_STEPS if steps is None else min(MOST_WARMUP_STEPS, steps // WARMUP_PART)
