"""Lightning's Trainer, driven as its documentation shows.

A `LightningModule` returns the job's loss from `training_step`, `configure_optimizers` returns optimizer and schedule
(`interval: step`), the Trainer gets `accumulate_grad_batches`, `gradient_clip_val` and `strategy="ddp"`. Checkpoints
are written by `ModelCheckpoint(every_n_train_steps=..., save_last=True)`, and runs are continued with
`fit(ckpt_path="last")`.
"""

from typing import Any

from torch import nn

from drivetrain.proving.adapters.common import accumulation_steps, make_loader
from drivetrain.proving.case import Case, Subject


def lightning_subject() -> Subject:
    """Return Lightning's Trainer as a trainer to prove."""
    import lightning  # noqa: F401  (loaded before processes are forked)

    return Subject(_run, "Lightning", max_world=2, even_divisions=True, several_optimizers=False)


def _run(case: Case) -> nn.Module:
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
