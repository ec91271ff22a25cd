"""Adapters of peft: whether a model has one, and putting a saved one onto its base model."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.plan.fitting import without_memory

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SHOWN = 3


def is_adapted(model: Any) -> bool:
    """Return whether a model is a `PeftModel`, without importing peft for one that is not."""
    if not any(base.__module__.partition(".")[0] == "peft" for base in type(model).__mro__):
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def with_adapter(base: nn.Module, folder: Path) -> Any:
    """Return the base model with the adapter of a folder, which goes on training.

    Raises a DrivetrainError, and leaves the model as it is, where the adapter was made for another one.
    """
    try:
        from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    except ImportError as error:
        raise DrivetrainError(f"an adapter needs peft: {error}", remedy="pip install 'drivetrain[hf]'") from error

    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        remedy = "give a folder that dt.hf.export or save_pretrained of a PeftModel wrote"
        raise DrivetrainError(f"there is no adapter in {folder}: no {missing[0]}", remedy=remedy)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DrivetrainError(
            f"{folder / WEIGHTS} cannot be read: {error}", remedy="save the adapter again, as safetensors"
        ) from None
    try:
        ghost = get_peft_model(without_memory(base), PeftConfig.from_pretrained(folder))
    except ValueError as error:  # none of its target modules is there
        raise _other_base(folder, str(error)) from None
    needed = {name: tuple(value.shape) for name, value in get_peft_model_state_dict(ghost).items()}
    differing = sorted(name for name in saved.keys() | needed.keys() if saved.get(name) != needed.get(name))
    if differing:
        shown = "; ".join(
            f"{name} is {saved.get(name, 'missing')} there and would be {needed.get(name, 'nothing')} here"
            for name in differing[:_SHOWN]
        )
        raise _other_base(folder, f"{len(differing)} of its weights do not fit: {shown}")
    return PeftModel.from_pretrained(base, folder, is_trainable=True)


def _other_base(folder: Path, message: str) -> DrivetrainError:
    return DrivetrainError(
        f"the adapter in {folder} belongs to another base model: {message}",
        remedy="give the base model that it was trained on: adapter_config.json names it",
    )
