"""The Trainer of Hugging Face transformers, driven by `TrainingArguments` as its documentation shows.

The job's loss stands where the Trainer calls the model: `compute_loss` is the library's own, and so is everything it
does around it, such as counting labels and passing `num_items_in_batch` to models that take it. Runs are continued with
`resume_from_checkpoint` ("Checkpointing" in the guide to the Trainer). The `nn.Module` of a job that is no transformers
model is trained like any custom model: its loss is a mean per micro-batch (`loss_is_scaled_for_ga` in the docstring of
`Trainer`).
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from drivetrain.proving.adapters.common import accumulation_steps
from drivetrain.proving.case import Case, Subject

_TAGS, _WHOLE = "proving_tags", "proving_batch"


def hf_subject() -> Subject:
    """Return the Trainer of transformers as a trainer to prove."""
    import transformers  # loaded before processes are forked

    transformers.Trainer  # noqa: B018  (is loaded at first use)
    return Subject(_run, "Hugging Face Trainer", max_world=2, even_divisions=True, several_optimizers=False)


def _run(case: Case) -> nn.Module:
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
