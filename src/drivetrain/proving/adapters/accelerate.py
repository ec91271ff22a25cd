"""Accelerate, driven as its guides "Performing gradient accumulation" and "Checkpointing" show.

The loop is that of `examples/complete_nlp_example.py` of Accelerate's repository: everything goes through `prepare`,
`accumulate` decides when gradients are reduced, `save_state` and `load_state` keep the run, and a run that is continued
within an epoch skips the batches that it has seen with `skip_first_batches`.
"""

from functools import partial
from itertools import count
from typing import Any

from torch import nn

from drivetrain.proving.adapters.common import accumulation_steps, last_numbered, make_loader
from drivetrain.proving.case import Case, Subject


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
    run = partial(_run, use_seedable_sampler=use_seedable_sampler, split_batches=split_batches)
    name = f"Accelerate ({chosen})" if chosen else "Accelerate"
    return Subject(run, name, max_world=2, even_divisions=True, several_optimizers=False)


def _run(case: Case, *, use_seedable_sampler: bool, split_batches: bool) -> nn.Module:
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
