"""Makes a job and its configuration of a configured `transformers.Trainer`, or says what of it cannot be obeyed."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from drivetrain.config import Config, configure
from drivetrain.core.aims import Aim, EarlyStopping
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.log import notice
from drivetrain.data.source import by_length, source_of
from drivetrain.hf.lengths import known_lengths
from drivetrain.hf.model_job import job
from drivetrain.job import Job

OPTIMIZERS: dict[str, Callable[..., Callable[[Any], torch.optim.Optimizer]]] = {
    "adamw_torch": (adamw := lambda args: lambda groups: torch.optim.AdamW(
        groups, lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon
    )),
    "adamw_torch_fused": adamw,
    "sgd": lambda args: lambda groups: torch.optim.SGD(groups, lr=args.learning_rate),
    "adagrad": lambda args: lambda groups: torch.optim.Adagrad(groups, lr=args.learning_rate),
    "rmsprop": lambda args: lambda groups: torch.optim.RMSprop(groups, lr=args.learning_rate),
}  # fmt: skip
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "warmup_stable_decay",
)  # fmt: skip
TRACKERS = ("tensorboard", "wandb", "mlflow")
OBEYED = {
    "output_dir", "run_name", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "gradient_checkpointing",
    "torch_compile", "torch_compile_mode", "logging_strategy", "logging_steps", "report_to", "eval_strategy",
    "eval_steps", "save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "seed", "use_cpu", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_prefetch_factor", "train_sampling_strategy", "length_column_name", "remove_unused_columns",
}  # fmt: skip
# They change what is printed, or are what happens here anyway.
WITHOUT_MEANING = {
    "do_train", "do_eval", "do_predict", "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node",
    "logging_first_step", "prediction_loss_only", "dataloader_persistent_workers", "average_tokens_across_devices",
    "ddp_find_unused_parameters", "local_rank", "use_cache", "bf16_full_eval", "fp16_full_eval",
}  # fmt: skip
_SET_BY_ITSELF = {"do_train", "do_eval", "do_predict", "local_rank", "disable_tqdm"}  # by other fields
REMEDIES = {
    "callbacks": "write a hook: hooks=[dt.every(100, function)]",
    "compute_loss": "write the loss in dt.Job(loss=lambda model, batch: …)",
    "compute_loss_func": "write the loss in dt.Job(loss=lambda model, batch: …)",
    "compute_metrics": "give functions of (output, batch): dt.hf.job(…, metrics={…})",
    "optimizers": "give dt.hf.job(…, optimizer=lambda params: …, schedule=…)",
    "optim": f"one of {', '.join(OPTIMIZERS)}; any other: dt.hf.job(…, optimizer=lambda params: …)",
    "model_init": "give the model itself",
    "deepspeed": "dt.configure(parallel_strategy='deepspeed')",
    "fsdp": "dt.configure(parallel_strategy='fsdp')",
    "resume_from_checkpoint": "a run of Drivetrain goes on by itself; start from weights with init_from=…",
    "auto_find_batch_size": "leave it out: the micro-batch is found by itself",
    "neftune_noise_alpha": "add the noise in a forward hook of the embedding",
    "full_determinism": "dt.configure(repeat='bitwise')",
}
_LEAVE_OUT = "leave it at its default, or write the job with dt.hf.job"
KEEP_ALL = 10**6


def job_from(trainer: Any) -> tuple[Job, Config]:
    """Make a `Job` and its configuration of a configured `transformers.Trainer`.

    The job means what the Trainer would have trained: model, loss, optimizer, schedule, global batch, length, seed,
    validation, checkpoints. Samples come in the order of the job's own seed, which is another one. Whatever else was
    set is refused by its name, all of it at once: other fields of `TrainingArguments`, overridden methods, callbacks
    (except `EarlyStoppingCallback`), `compute_metrics`, your own optimizer. The Trainer is left as it is.

    The global batch is `per_device_train_batch_size` × `gradient_accumulation_steps` × the devices that the Trainer
    sees. How a step is divided is planned anew; `torch_compile=False`, the default, leaves compiling to the plan.

    Args:
        trainer: The Trainer, before `train()` is called.

    Returns:
        The job and the configuration, as `dt.train` takes them: `dt.train(*dt.hf.job_from(trainer))`.

    Raises:
        ConfigError: Something that was set cannot be obeyed.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        >>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, pad_token_id=0)
        >>> samples = [{"input_ids": [5, 7, 9, 2], "labels": [5, 7, 9, 2]}] * 16
        >>> arguments = TrainingArguments("out", max_steps=3, learning_rate=1e-3, use_cpu=True, report_to="none")
        >>> trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=samples)
        >>> job, settings = dt.hf.job_from(trainer)
        >>> job.global_batch, job.max_steps
        (8, 3)
    """
    args = trainer.args
    changed = _changed_fields(args)
    _tell_ignored(changed)
    problems = [*_unknown_fields(args, changed), *_unknown_parts(trainer), *_unknown_values(trainer)]
    if problems:
        raise ConfigError(problems)
    source, fields = _data_of(trainer)
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    samples = source.samples_per_epoch(batch)
    batch = min(batch, samples or batch)
    per_epoch = source.steps_per_epoch(batch)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * (per_epoch or 0))
    is_whole = args.max_steps <= 0 and float(args.num_train_epochs).is_integer()
    made = job(
        trainer.model,
        source,
        name=args.run_name,
        label_smoothing=args.label_smoothing_factor,
        tokenizer=trainer.processing_class,
        optimizer=OPTIMIZERS[_text(args.optim)](args),
        weight_decay=args.weight_decay,
        schedule=_schedule(args, steps),
        clip_norm=args.max_grad_norm or None,
        global_batch=batch,
        epochs=int(args.num_train_epochs) if is_whole else None,
        max_steps=None if is_whole else steps,
        seed=args.seed,
        **fields,
        **_periods(trainer, steps),
        **_validation(trainer),
    )
    return made, _configuration(args)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _problem(name: str, message: str, value: object = None, remedy: str = "") -> Problem:
    return Problem(name, message, value, "Trainer", remedy=remedy or REMEDIES.get(name, _LEAVE_OUT))


def _changed_fields(args: Any) -> list[str]:
    """Return the names of the fields that have other values than by default."""
    plain = type(args)(output_dir=args.output_dir)
    names = [field.name for field in dataclasses.fields(args) if not field.name.startswith("_")]
    return [name for name in names if repr(getattr(args, name)) != repr(getattr(plain, name))]


def _tell_ignored(changed: Iterable[str]) -> None:
    """Report fields that were set and mean nothing here."""
    ignored = sorted((WITHOUT_MEANING - _SET_BY_ITSELF).intersection(changed))
    if ignored:
        notice(f"dt.hf.job_from: {', '.join(ignored)}: not used; what is learned does not depend on it")


def _unknown_fields(args: Any, changed: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each field that was set and is not obeyed."""
    for name in changed:
        if name not in OBEYED | WITHOUT_MEANING:
            value = getattr(args, name)
            yield _problem(name, f"{name}={value!r} is not obeyed", value)


def _unknown_values(trainer: Any) -> Iterator[Problem]:
    """Yield a problem for each value, of fields that are obeyed, that is not known."""
    args = trainer.args
    if _text(args.optim) not in OPTIMIZERS:
        yield _problem("optim", f"optim={_text(args.optim)!r} is not known")
    if _text(args.lr_scheduler_type) not in SCHEDULES:
        remedy = f"one of {', '.join(SCHEDULES)}; dt.OnPlateau reduces the rate by validations"
        yield _problem("lr_scheduler_type", f"{_text(args.lr_scheduler_type)!r} is not known", remedy=remedy)
    for tracker in args.report_to:
        if tracker not in TRACKERS:
            yield _problem("report_to", f"{tracker!r} is not known", remedy=f"one of {', '.join(TRACKERS)}")
    if args.metric_for_best_model not in (None, "loss", "eval_loss"):
        said = f"metric_for_best_model={args.metric_for_best_model!r} comes from compute_metrics"
        yield _problem("metric_for_best_model", said, remedy=REMEDIES["compute_metrics"])
    if trainer.train_dataset is None:
        yield _problem("train_dataset", "there is no training data", remedy="Trainer(train_dataset=…)")
    if _text(args.eval_strategy) != "no" and trainer.eval_dataset is None:
        yield _problem("eval_dataset", "eval_strategy needs a validation set", remedy="Trainer(eval_dataset=…)")
    if args.weight_decay and trainer.model is not None:
        named = set(trainer.get_decay_parameter_names(trainer.model))
        trained = {name: each.dim() for name, each in trainer.model.named_parameters() if each.requires_grad}
        other = next((name for name, dims in trained.items() if (name in named) is not (dims >= 2)), None)
        if other is not None:
            said = f"the Trainer's rule treats {other} unlike the rule here: weights of two dimensions and more decay"
            yield _problem("weight_decay", said, remedy="dt.hf.job(…, weight_decay=None, optimizer=lambda params: …)")


def _unknown_parts(trainer: Any) -> Iterator[Problem]:
    """Yield a problem for each part of the Trainer that is the user's own."""
    from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Trainer

    kind = type(trainer)
    if kind not in (Trainer, Seq2SeqTrainer):
        for name in sorted({name for base in kind.__mro__[: kind.__mro__.index(Trainer)] for name in vars(base)}):
            if callable(getattr(Trainer, name, None)) and getattr(kind, name) is not getattr(Trainer, name):
                said = f"{kind.__name__} overrides {name}"
                yield _problem(
                    name, said, remedy=REMEDIES.get(name, "write the job with dt.Job or a loop with dt.drive")
                )
    for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "model_init"):
        if getattr(trainer, name, None) is not None:
            yield _problem(name, f"{name} is not obeyed")
    if trainer.optimizer is not None or trainer.lr_scheduler is not None or trainer.optimizer_cls_and_kwargs:
        yield _problem("optimizers", "the Trainer has an optimizer or schedule of its own")
    for callback in trainer.callback_handler.callbacks:
        is_known = type(callback).__module__.startswith(("transformers.trainer", "transformers.integrations"))
        is_known = is_known or type(callback).__module__ == "transformers.utils.notebook"
        if not is_known and not isinstance(callback, EarlyStoppingCallback):
            yield _problem("callbacks", f"{type(callback).__name__} is not called")


def _schedule(args: Any, num_steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate by step: that of the scheduler which the Trainer would make."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    warmup = args.get_warmup_steps(num_steps)
    options: Any = dict(args.lr_scheduler_kwargs or {})
    scheduler: Any = get_scheduler(args.lr_scheduler_type, optimizer, warmup, num_steps, options)
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return lambda step: float(factor(step))


def _data_of(trainer: Any) -> tuple[Any, dict[str, Any]]:
    """Return the source of samples, and the fields that say how batches are made."""
    from transformers import DataCollatorWithPadding, default_data_collator

    args, collator = trainer.args, trainer.data_collator
    fields: dict[str, Any] = {}
    source = dataclasses.replace(source_of(trainer.train_dataset), drop_last=args.dataloader_drop_last)
    strategy = _text(args.train_sampling_strategy)
    fields["shuffle"] = strategy != "sequential"
    is_plain = collator is default_data_collator or (
        type(collator) is DataCollatorWithPadding and collator.padding is True and not collator.pad_to_multiple_of
    )
    if not is_plain:
        trainer._set_signature_columns_if_needed()
        kept = set(trainer._signature_columns) if args.remove_unused_columns else None
        fields["collate"] = lambda items: _collated(collator, items, kept)
    if strategy == "group_by_length" and is_plain:
        fields["group_by_length"] = True
    elif strategy == "group_by_length":
        lengths = known_lengths(source.dataset, "input_ids")
        source = by_length(source, (lambda item: len(item["input_ids"])) if lengths is None else lengths)
    return source, fields


def _collated(collator: Callable[..., Any], items: list[Any], kept: set[str] | None) -> dict[str, Any]:
    """Call the Trainer's own collator on the columns that the Trainer keeps."""
    if kept is not None and isinstance(items[0], Mapping):
        items = [{name: value for name, value in item.items() if name in kept} for item in items]
    return dict(collator(items))


def _period(strategy: str, steps: float | None, num_steps: int) -> int | None:
    """Return the number of steps of a period; None for epochs."""
    if strategy != "steps" or steps is None:
        return None
    return max(1, math.ceil(steps * num_steps) if steps < 1 else int(steps))


def _periods(trainer: Any, num_steps: int) -> dict[str, Any]:
    args = trainer.args
    saves, evals = _text(args.save_strategy), _text(args.eval_strategy)
    every: int | str | None = _period(saves, args.save_steps, num_steps) or "epoch"
    if saves == "best":  # the best checkpoint is kept anyway: it is saved after validations
        every = _period(evals, args.eval_steps, num_steps) or "epoch"
    if saves == "no":
        every = num_steps  # what was learned is kept, once
    limit = args.save_total_limit
    return {"checkpoint_every": every, "keep_last": KEEP_ALL if limit is None else max(1, limit)} | (
        {} if evals == "no" else {"valid_every": _period(evals, args.eval_steps, num_steps)}
    )


def _validation(trainer: Any) -> dict[str, Any]:
    from transformers import EarlyStoppingCallback

    args = trainer.args
    if _text(args.eval_strategy) == "no":
        return {}
    mode: Any = "max" if args.greater_is_better else "min"
    fields: dict[str, Any] = {
        "valid": trainer.eval_dataset,
        "valid_batch": args.per_device_eval_batch_size,
        "best": Aim("valid_loss", mode),
    }
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            patience, least = callback.early_stopping_patience, callback.early_stopping_threshold or 0.0
            fields["early_stopping"] = EarlyStopping(patience, least, "valid_loss", mode)
    return fields


def _configuration(args: Any) -> Config:
    values: dict[str, Any] = {
        "output_dir": args.output_dir,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "trackers": list(args.report_to),
    }
    if _text(args.logging_strategy) == "steps" and args.logging_steps >= 1:
        values["log_every"] = int(args.logging_steps)
    if args.gradient_checkpointing:
        values["activations"] = "recompute"
    if args.torch_compile:
        values["compile"] = True
    if args.use_cpu:
        values["gpu_mode"] = "cpu"
    if args.dataloader_num_workers:
        values["num_workers"] = args.dataloader_num_workers
    if args.dataloader_num_workers and args.dataloader_prefetch_factor is not None:
        values["prefetch_factor"] = args.dataloader_prefetch_factor
    if not args.dataloader_pin_memory:
        values["pin_memory"] = False
    return configure(**values)
