import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from benchmarks.peers.sums import make_model, pad, train_set, valid_set


class Adapted(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def validation_step(self, batch, batch_idx):
        tokens = (batch["labels"][:, 1:] != -100).sum().item()
        self.log("valid_loss", self.model(**batch).loss, batch_size=tokens, sync_dist=True)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=5e-3)
        schedule = get_cosine_schedule_with_warmup(optimizer, 10, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(0)
module = Adapted()
best = ModelCheckpoint(dirpath="sums-checkpoints", monitor="valid_loss", save_last=True)
trainer = L.Trainer(max_epochs=4, gradient_clip_val=1.0, callbacks=[best], enable_progress_bar=False)
train_loader = DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=pad)
valid_loader = DataLoader(valid_set, batch_size=32, collate_fn=pad)
trainer.fit(module, train_loader, valid_loader, ckpt_path="last")
module.model.save_pretrained("adapter")
print(trainer.callback_metrics["valid_loss"].item())
