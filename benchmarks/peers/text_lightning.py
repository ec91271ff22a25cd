import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.peers.text import (
    batch_size,
    is_bf16,
    is_compiled,
    is_pinned,
    is_tuned,
    learning_rate,
    loss_of,
    make_model,
    max_steps,
    save_every,
    train_set,
)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()
        self.loss_fn = torch.compile(loss_of) if is_compiled else loss_of

    def training_step(self, batch, batch_idx):
        return self.loss_fn(self.model, batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, fused=is_tuned and not is_bf16
        )  # refused with bf16 and clipping


L.seed_everything(0, workers=True)
if is_tuned:
    torch.set_float32_matmul_precision("high")
trainer = L.Trainer(
    max_steps=max_steps,
    max_epochs=-1,
    devices=1,
    precision="bf16-mixed" if is_bf16 else "32-true",
    gradient_clip_val=1.0,
    logger=not is_tuned,
    enable_progress_bar=not is_tuned,
    enable_model_summary=not is_tuned,
    callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=save_every, save_last=True)],
)
loader = DataLoader(train_set, batch_size=batch_size, shuffle=True, pin_memory=is_pinned)
trainer.fit(Module(), loader, ckpt_path="last")
