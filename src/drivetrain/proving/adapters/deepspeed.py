"""DeepSpeed, driven as its Getting Started guide shows.

`deepspeed.initialize` makes the engine from a configuration; the loop calls `backward` and `step` of the engine for
every micro-batch, and the engine decides when a step is due. `save_checkpoint` gets the number of batches as
client state; a run that is continued advances its loader to there. The loader is torch's own with a
`DistributedSampler`, as DeepSpeed's own loader makes it.
"""

from itertools import count, islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from drivetrain.proving.adapters.common import accumulation_steps
from drivetrain.proving.case import Case, Subject


def deepspeed_subject(stages: tuple[int, ...] = (0, 2)) -> Subject:
    """Return DeepSpeed as a trainer to prove.

    Args:
        stages: the stages of ZeRO that several processes are tried with; one process runs stage 0.
    """
    import deepspeed  # noqa: F401  (loaded before processes are forked)

    return Subject(
        _run,
        "DeepSpeed",
        strategies=tuple(f"zero-{stage}" for stage in stages),
        max_world=2,
        double=False,  # its reduction without ZeRO takes no float64
        even_divisions=True,
        several_optimizers=False,
    )


def _run(case: Case) -> Any:
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
