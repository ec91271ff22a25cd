"""Adapters of other trainers, each driven the way its own documentation tells users to, as trainers to prove.

An adapter does what an ordinary user of that trainer would write: no fix of ours is in it. Its package is imported
when the adapter is asked for, and not before.
"""

import io
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import write_atomically
from drivetrain.proving.case import Case, Subject

# ----------------------------------------------------------------------------------------------------------------------
# The parts that adapters share: the accumulation that a case asks for, and its data behind torch's own loader.


def accumulation_steps(case: Case) -> int:
    """Return how many micro-batches a process computes in one optimizer step.

    Raises:
        DrivetrainError: the global batch is not micro-batch × accumulation steps × processes.
    """
    per_round = case.micro_batch * case.world_size
    if case.global_batch % per_round:
        raise DrivetrainError(
            f"a global batch of {case.global_batch} is not made of micro-batches of {case.micro_batch} on "
            f"{case.world_size} processes",
            remedy="Subject(even_divisions=True): only divisors of the global batch are tried then",
        )
    return case.global_batch // per_round


def make_loader(case: Case, batch_size: int | None = None) -> DataLoader[Any]:
    """Return a torch DataLoader over the case's data, which shuffles if the job does."""
    return DataLoader(
        case.data,
        batch_size=batch_size or case.micro_batch,
        shuffle=case.job.shuffle,
        collate_fn=case.collate,
        num_workers=case.num_workers,
    )


def last_numbered(folder: Path, pattern: str) -> tuple[Path, int] | None:
    """Return the entry of a folder whose name matches with the largest number, and that number."""
    found = [
        (path, int(match[1]))
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(pattern, path.name))
    ]
    return max(found, key=lambda entry: entry[1], default=None)


# ----------------------------------------------------------------------------------------------------------------------
# A user's own loop in plain PyTorch: give a step function, and the rest is written here as PyTorch's guides do it.
#
# The rest: `DistributedDataParallel` on gloo, a `DataLoader` over the samples that the case names, `torch.save` of the
# state's `state_dict()` every few steps ("Saving and Loading a General Checkpoint" of the PyTorch recipes).


@dataclass
class LoopState:
    """The state that a plain loop keeps between steps.

    Attributes:
        case: the configuration that is run.
        model: the model, inside `DistributedDataParallel` where several processes train.
        optimizer: the job's optimizer over the model.
        scheduler: the job's schedule; call its `step()` once after every optimizer step.
        step: optimizer steps done.
    """

    case: Case
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    step: int = 0

    @property
    def bare_model(self) -> nn.Module:
        """The model without its wrapper."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved: model, optimizer, schedule, step."""
        return {
            "model": self.bare_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bare_model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


Step = Callable[[LoopState, Sequence[Any]], None]
MakeState = Callable[[Case], LoopState]


def make_state(case: Case) -> LoopState:
    """Build model, optimizer and schedule of a case; with several processes, inside DistributedDataParallel."""
    model = case.model()
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer)
    wrapped = DistributedDataParallel(model) if case.world_size > 1 else model
    return LoopState(case, wrapped, optimizer, scheduler)


def tutorial_step(state: LoopState, micro_batches: Sequence[Any]) -> None:
    """Take one optimizer step the way guides on gradient accumulation write it: loss / number of micro-batches."""
    case, model = state.case, state.model
    state.optimizer.zero_grad()
    for number, batch in enumerate(micro_batches):
        is_last = number == len(micro_batches) - 1
        waits = isinstance(model, DistributedDataParallel) and not is_last
        with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
            loss = case.scalar_loss(model, batch, state.step) / len(micro_batches)
            loss.backward()  # type: ignore[no-untyped-call]
    if case.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
    state.optimizer.step()
    state.scheduler.step()


def plain_subject(
    step: Step = tutorial_step,
    make: MakeState = make_state,
    *,
    name: str = "plain loop",
    max_world: int = 2,
    resumes: bool = True,
) -> Subject:
    """Return a plain PyTorch loop as a trainer to prove.

    Args:
        step: takes one optimizer step, given the state and this process's micro-batches of it. Call
            `state.case.loss(state.model, batch)` for the job's loss, or `scalar_loss(state.model, batch, state.step)`
            for one number of a loss that is a `LossSum` or has named parts; the batches are what `collate` makes.
        make: builds the state; a subclass of `LoopState` may save and load more.
        name: what the certificate calls it.
        max_world: the most processes it is tried with.
        resumes: whether its checkpoints are tried, too.

    Example:
        >>> from drivetrain.proving.adapters import plain_subject
        >>> def step(state, micro_batches):
        ...     state.optimizer.zero_grad()
        ...     for batch in micro_batches:
        ...         state.case.loss(state.model, batch).backward()
        ...     state.optimizer.step()
        >>> plain_subject(step, name="my loop", max_world=1).name
        'my loop'
    """
    run = partial(_run_plain, step=step, make=make)
    return Subject(run, name, max_world=max_world, resumes=resumes, several_optimizers=False)


def _run_plain(case: Case, *, step: Step, make: MakeState) -> nn.Module:
    if case.world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(case.seed)
    state = make(case)
    path = case.folder / "checkpoint.pt"
    if path.exists():
        state.load_state_dict(torch.load(path, weights_only=False))
    batches = _batches(case, state.step)
    while state.step < case.num_steps:
        step(state, list(islice(batches, _num_micro_batches(case, state.step))))
        state.step += 1
        if case.save_every and state.step % case.save_every == 0:
            if case.rank == 0:
                content = io.BytesIO()
                torch.save(state.state_dict(), content)
                write_atomically(path, content.getvalue())
            if case.world_size > 1:
                dist.barrier()
    return state.bare_model


def _num_micro_batches(case: Case, step: int) -> int:
    return sum(1 for numbers in case.micro_batches(step) if numbers)


def _batches(case: Case, first_step: int) -> Iterator[Any]:
    """Return an iterator over this process's micro-batches from a step to the end of the run."""
    chosen = [
        list(numbers) for step in range(first_step, case.num_steps) for numbers in case.micro_batches(step) if numbers
    ]
    return iter(DataLoader(case.data, batch_sampler=chosen, collate_fn=case.collate, num_workers=case.num_workers))


# ----------------------------------------------------------------------------------------------------------------------
# Accelerate, driven as its guides "Performing gradient accumulation" and "Checkpointing" show.
#
# The loop is that of `examples/complete_nlp_example.py` of Accelerate's repository: everything goes through `prepare`,
# `accumulate` decides when gradients are reduced, `save_state` and `load_state` keep the run, and a run that is
# continued within an epoch skips the batches that it has seen with `skip_first_batches`.


def accelerate_subject(*, use_seedable_sampler: bool = False, split_batches: bool = False) -> Subject:
    """Return Accelerate as a trainer to prove.

    Args:
        use_seedable_sampler: Accelerate's own option of that name: the order of an epoch follows from seed and epoch.
        split_batches: Accelerate's own option of that name: loaders are made with the batch size of all processes
            together, and schedules advance by one per optimizer step.
    """
    import accelerate  # noqa: F401  (loaded before processes are forked)

    options = {"use_seedable_sampler": use_seedable_sampler, "split_batches": split_batches}
    chosen = ", ".join(option for option, is_set in options.items() if is_set)
    run = partial(_run_accelerate, use_seedable_sampler=use_seedable_sampler, split_batches=split_batches)
    name = f"Accelerate ({chosen})" if chosen else "Accelerate"
    return Subject(run, name, max_world=2, even_divisions=True, several_optimizers=False)


def _run_accelerate(case: Case, *, use_seedable_sampler: bool, split_batches: bool) -> nn.Module:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    set_seed(case.seed)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation_steps(case),
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=use_seedable_sampler, split_batches=split_batches
        ),
    )
    model = case.model()
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer)
    loader = make_loader(case, case.micro_batch * (case.world_size if split_batches else 1))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    num_batches = completed_steps = first_epoch = num_seen = 0
    checkpoint = last_numbered(case.folder, r"step_(\d+)")
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint[0]))
        num_batches = checkpoint[1]
        first_epoch, num_seen = divmod(num_batches, len(loader))
        completed_steps = first_epoch * _updates(accelerator, len(loader)) + _updates(accelerator, num_seen)

    for epoch in count(first_epoch):
        model.train()
        active: Any = loader
        if epoch == first_epoch and num_seen:
            active = accelerator.skip_first_batches(loader, num_seen)
        if hasattr(active, "set_epoch"):
            active.set_epoch(epoch)
        for batch in active:
            with accelerator.accumulate(model):
                loss = case.scalar_loss(model, batch, completed_steps)
                accelerator.backward(loss)
                if accelerator.sync_gradients and case.clip_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            num_batches += 1
            if not accelerator.sync_gradients:
                continue
            completed_steps += 1
            if case.save_every and completed_steps % case.save_every == 0:
                accelerator.save_state(str(case.folder / f"step_{num_batches}"))
            if completed_steps == case.num_steps:
                unwrapped: nn.Module = accelerator.unwrap_model(model)
                return unwrapped
    raise AssertionError("epochs have no end")


def _updates(accelerator: Any, num_batches: int) -> int:
    """Return the optimizer steps in so many batches of an epoch; the last one may have fewer."""
    return -(-num_batches // int(accelerator.gradient_accumulation_steps))


# ----------------------------------------------------------------------------------------------------------------------
# DeepSpeed, driven as its Getting Started guide shows.
#
# `deepspeed.initialize` makes the engine from a configuration; the loop calls `backward` and `step` of the engine for
# every micro-batch, and the engine decides when a step is due. `save_checkpoint` gets the number of batches as client
# state; a run that is continued advances its loader to there. The loader is torch's own with a `DistributedSampler`, as
# DeepSpeed's own loader makes it.


def deepspeed_subject(stages: tuple[int, ...] = (0, 2)) -> Subject:
    """Return DeepSpeed as a trainer to prove.

    Args:
        stages: the stages of ZeRO that several processes are tried with; one process runs stage 0.
    """
    import deepspeed  # noqa: F401  (loaded before processes are forked)

    return Subject(
        _run_deepspeed,
        "DeepSpeed",
        strategies=tuple(f"zero-{stage}" for stage in stages),
        max_world=2,
        double=False,  # its reduction without ZeRO takes no float64
        even_divisions=True,
        several_optimizers=False,
    )


def _run_deepspeed(case: Case) -> Any:
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(case.seed)
    stage = int(case.strategy.removeprefix("zero-")) if case.strategy.startswith("zero-") else 0
    model = case.model()
    optimizer = case.optimizer(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=case.scheduler(optimizer),
        config={
            "train_batch_size": case.global_batch,
            "train_micro_batch_size_per_gpu": case.micro_batch,
            "gradient_accumulation_steps": accumulation_steps(case),
            "gradient_clipping": case.clip_norm or 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )
    sampler = DistributedSampler(case.data, case.world_size, case.rank, shuffle=case.job.shuffle, seed=case.seed)  # type: DistributedSampler[Any]
    loader = DataLoader(
        case.data,
        batch_size=case.micro_batch,
        sampler=sampler,
        collate_fn=case.collate,
        num_workers=case.num_workers,
    )  # type: DataLoader[Any]
    num_batches = 0
    if (case.folder / "latest").exists():
        _, client_state = engine.load_checkpoint(str(case.folder))
        num_batches = client_state["num_batches"]
    first_epoch, num_seen = divmod(num_batches, len(loader))
    for epoch in count(first_epoch):
        sampler.set_epoch(epoch)
        for batch in islice(loader, num_seen if epoch == first_epoch else 0, None):
            loss = case.scalar_loss(engine, batch, engine.global_steps)
            engine.backward(loss)
            num_batches += 1
            if not engine.is_gradient_accumulation_boundary():
                engine.step()
                continue
            if stage > 0:
                _show_gradients(case, model)
            with case.recorder.one_step():  # ZeRO steps parameter group by group
                engine.step()
            if case.save_every and engine.global_steps % case.save_every == 0:
                engine.save_checkpoint(str(case.folder), client_state={"num_batches": num_batches})
            if engine.global_steps == case.num_steps:
                return model
    raise AssertionError("epochs have no end")


def _show_gradients(case: Case, model: nn.Module) -> None:
    """Hand over the gradients that ZeRO holds, which are not in `.grad`: it clips them only while it steps."""
    from deepspeed.utils import safe_get_full_grad

    if case.clip_norm is not None:
        return case.recorder.gradients(None)
    found = {name: safe_get_full_grad(parameter) for name, parameter in model.named_parameters()}
    return case.recorder.gradients({name: gradient for name, gradient in found.items() if gradient is not None})


# ----------------------------------------------------------------------------------------------------------------------
# The Trainer of Hugging Face transformers, driven by `TrainingArguments` as its documentation shows.
#
# The job's loss stands where the Trainer calls the model: `compute_loss` is the library's own, and so is everything it
# does around it, such as counting labels and passing `num_items_in_batch` to models that take it. Runs are continued
# with `resume_from_checkpoint` ("Checkpointing" in the guide to the Trainer). The `nn.Module` of a job that is no
# transformers model is trained like any custom model: its loss is a mean per micro-batch (`loss_is_scaled_for_ga` in
# the docstring of `Trainer`).

_TAGS, _WHOLE = "proving_tags", "proving_batch"


def hf_subject() -> Subject:
    """Return the Trainer of transformers as a trainer to prove."""
    import transformers  # loaded before processes are forked

    transformers.Trainer  # noqa: B018  (is loaded at first use)
    return Subject(_run_hf_trainer, "Hugging Face Trainer", max_world=2, even_divisions=True, several_optimizers=False)


def _run_hf_trainer(case: Case) -> nn.Module:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class JobTrainer(Trainer):  # type: ignore[misc]
        """Calls the job's loss where the model is called."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            def call(**named: Any) -> dict[str, Any]:
                return {"loss": case.scalar_loss(model, _unpacked(named), self.state.global_step)}

            return super().compute_loss(call, inputs, *args, **kwargs)

    model = case.model()
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer)
    arguments = TrainingArguments(
        output_dir=str(case.folder),
        max_steps=case.num_steps,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=accumulation_steps(case),
        max_grad_norm=case.clip_norm or 0.0,
        seed=case.seed,
        train_sampling_strategy="random" if case.job.shuffle else "sequential",
        dataloader_num_workers=case.num_workers,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        save_strategy="steps" if case.save_every else "no",
        save_steps=case.save_every or 500,
        use_cpu=True,
        ddp_backend="gloo" if case.world_size > 1 else None,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = JobTrainer(
        model=model,
        args=arguments,
        train_dataset=case.data,
        data_collator=lambda items: _packed(case.collate(items)),
        optimizers=(optimizer, scheduler),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(case.folder)))
    return model


def _packed(batch: Any) -> dict[str, Any]:
    """Return a batch as the Trainer wants it: a dict with the job's own names in it, such as `labels`, at the top."""
    tags, inner = batch["tags"], batch["batch"]
    if isinstance(inner, Mapping):
        return {**inner, _TAGS: tags}
    return {_WHOLE: inner, _TAGS: tags}


def _unpacked(named: dict[str, Any]) -> dict[str, Any]:
    tags = named.pop(_TAGS)
    return {"tags": tags, "batch": named.pop(_WHOLE) if _WHOLE in named else named}


# ----------------------------------------------------------------------------------------------------------------------
# Lightning's Trainer, driven as its documentation shows.
#
# A `LightningModule` returns the job's loss from `training_step`, `configure_optimizers` returns optimizer and schedule
# (`interval: step`), the Trainer gets `accumulate_grad_batches`, `gradient_clip_val` and `strategy="ddp"`. Checkpoints
# are written by `ModelCheckpoint(every_n_train_steps=..., save_last=True)`, and runs are continued with
# `fit(ckpt_path="last")`.


def lightning_subject() -> Subject:
    """Return Lightning's Trainer as a trainer to prove."""
    import lightning  # noqa: F401  (loaded before processes are forked)

    return Subject(_run_lightning, "Lightning", max_world=2, even_divisions=True, several_optimizers=False)


def _run_lightning(case: Case) -> nn.Module:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class JobModule(lightning.LightningModule):  # type: ignore[misc]
        """The job as a LightningModule."""

        def __init__(self) -> None:
            super().__init__()
            self.model = case.model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return case.scalar_loss(self.model, batch, self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            optimizer = case.optimizer(self.model)
            scheduler = {"scheduler": case.scheduler(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    lightning.seed_everything(case.seed, workers=True, verbose=False)
    module = JobModule()
    checkpoints = []
    if case.save_every:
        checkpoints.append(
            ModelCheckpoint(dirpath=case.folder, every_n_train_steps=case.save_every, save_top_k=-1, save_last=True)
        )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=case.world_size,
        strategy="ddp" if case.world_size > 1 else "auto",
        max_steps=case.num_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulation_steps(case),
        gradient_clip_val=case.clip_norm,
        callbacks=checkpoints,
        enable_checkpointing=bool(checkpoints),
        default_root_dir=case.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, make_loader(case), ckpt_path="last" if checkpoints else None)
    trained: nn.Module = module.model
    return trained


# ----------------------------------------------------------------------------------------------------------------------
# Finds the trainer that a user names: an adapter, or `module:name` of a user's trainer.

__all__ = [
    "ADAPTERS",
    "LoopState",
    "accelerate_subject",
    "deepspeed_subject",
    "find_subject",
    "hf_subject",
    "lightning_subject",
    "plain_subject",
]

ADAPTERS: Mapping[str, Callable[[], Subject]] = {
    "plain": plain_subject,
    "accelerate": accelerate_subject,
    "lightning": lightning_subject,
    "hf": hf_subject,
    "deepspeed": deepspeed_subject,
}


def find_subject(name: str) -> Subject:
    """Return the trainer of this name.

    Args:
        name: a name of `ADAPTERS`, or `module:name` of a `Subject` or of a function `run(case)`, importable from the
            current folder.

    Example:
        >>> from drivetrain.proving.adapters import find_subject
        >>> find_subject("plain").name
        'plain loop'
    """
    if name in ADAPTERS:
        try:
            return ADAPTERS[name]()
        except ImportError as error:
            raise DrivetrainError(
                f"trainer {name} cannot be loaded: {error}", remedy="install its package beside Drivetrain"
            ) from error
    known = ", ".join(ADAPTERS)
    if ":" not in name:
        raise DrivetrainError(f"there is no trainer {name}", remedy=f"give one of {known}, or module:name of your own")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise DrivetrainError(
            f"trainer {name} cannot be loaded: {error}", remedy="give `module:name`, importable from this folder"
        ) from error
    if isinstance(found, Subject):
        return found
    if not callable(found):
        raise DrivetrainError(
            f"trainer {name} is a {type(found).__name__}", remedy="give a Subject or a function run(case)"
        )
    return Subject(found, getattr(found, "__name__", name))
