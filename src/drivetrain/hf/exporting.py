"""Writes what a run learned as a folder that `from_pretrained` of transformers or peft opens."""

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoint.weights import plainly_named
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.isolation import generators_kept
from drivetrain.hf.adapters import is_adapted
from drivetrain.hf.heads import Task
from drivetrain.hf.model_job import open_model
from drivetrain.run.result import Result, Which, checkpoint_of, load_whole, new_model

_SHOWN = 3


def export(
    run: Path | str | Result,
    path: Path | str,
    *,
    model: Any = None,
    task: Task | None = None,
    which: Which = "last",
    tokenizer: Any = None,
) -> Path:
    """Write the weights of a run as a folder that `from_pretrained` opens, and return its path.

    Of a `PeftModel`, the folder holds the adapter alone, for `PeftModel.from_pretrained(base_model, path)`. The weights
    are those of the checkpoint, to the bit; the moving average, where the job kept one. The folder is there once it is
    whole. The model that is given stays as it is.

    Args:
        run: What `dt.train` returned, or the folder of a run.
        path: The folder to write; it must not be there yet.
        model: The model that was trained, as `dt.hf.job` takes it: with any weights, but an adapter's base model with
            its own. Default: that of the run's job, which a folder alone does not have.
        task: What a configuration or a folder is built for, as in `dt.hf.job`.
        which: `last`, the newest checkpoint, or `best`, the one that validated best.
        tokenizer: A tokenizer to put into the folder.

    Returns:
        The path of the folder.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, pad_token_id=0)
        >>> job = dt.hf.job(config, [{"input_ids": [5, 7, 9, 2]}] * 8, name="tiny", max_steps=2, global_batch=4)
        >>> folder = dt.hf.export(dt.train(job, quiet=True), "tiny-llama")
        >>> type(LlamaForCausalLM.from_pretrained(folder)).__name__
        'LlamaForCausalLM'
    """
    target = Path(path)
    if isinstance(run, Result) and not run.is_main:
        return target
    if target.exists():
        raise DrivetrainError(f"{target} is there already", remedy="give a folder that is not there, or remove it")
    made = _model_of(run, model, task)
    checkpoint = checkpoint_of(run, which)
    if is_adapted(made):
        _check_base(made, checkpoint)
    load_whole(made, checkpoint, checkpoint.path)
    _write(made, tokenizer, target)
    return target


def _model_of(run: Path | str | Result, model: Any, task: Task | None) -> nn.Module:
    """Return a model of its own to load the weights into."""
    if model is not None:
        given = open_model(model, task).model
        with generators_kept():
            made = copy.deepcopy(given).cpu() if isinstance(given, nn.Module) else given()
    elif isinstance(run, Result) and run.job is not None:
        made = new_model(run.job)
    else:
        raise DrivetrainError(
            "a run's folder does not hold its model's configuration",
            remedy="say what was trained: dt.hf.export(folder, path, model=…), as in dt.hf.job",
        )
    if not hasattr(made, "save_pretrained"):
        raise DrivetrainError(f"{type(made).__name__} has no save_pretrained", remedy="dt.export writes any model")
    return made


def _check_base(model: Any, checkpoint: Checkpoint) -> None:
    """Raise unless the frozen weights of a model with an adapter are those that the adapter was trained with."""
    source = plainly_named(checkpoint, model.state_dict())
    config, prefix = model.active_peft_config, model.base_model.prefix
    trains_biases = getattr(config, "bias", "none") != "none"
    differing, count = list[str](), 0
    for name, parameter in model.named_parameters():
        is_adapters = prefix in name or ".modules_to_save." in name or (trains_biases and name.endswith("bias"))
        if parameter.requires_grad or is_adapters:
            continue
        count += 1
        kept = source.keys.get(f"model/{name}")
        is_same = kept is not None and tuple(kept.shape) == tuple(parameter.shape)
        if not is_same or not torch.equal(source.read(f"model/{name}").to(parameter.dtype), parameter.detach().cpu()):
            differing.append(name)
    if differing:
        raise DrivetrainError(
            f"the adapter was trained on another base model: {len(differing)} of its {count} weights differ, such as "
            f"{', '.join(differing[:_SHOWN])}",
            remedy="give the base model that the run trained, with its own weights",
        )


def _write(model: Any, tokenizer: Any, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was interrupted
    try:
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
