import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, get_cosine_schedule_with_warmup

from benchmarks.peers.tables import config, train_set, valid_set


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def validation_step(self, batch, batch_idx):
        tokens = (batch["labels"][:, 1:] != -100).sum().item()
        self.log("valid_loss", self.model(**batch).loss, batch_size=tokens, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        schedule = get_cosine_schedule_with_warmup(optimizer, 6, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(0)
best = ModelCheckpoint(dirpath="tables-checkpoints", monitor="valid_loss", save_last=True)
trainer = L.Trainer(max_epochs=4, gradient_clip_val=1.0, callbacks=[best], enable_progress_bar=False)
pack = DataCollatorWithFlattening()
train_loader = DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=pack)
valid_loader = DataLoader(valid_set, batch_size=32, collate_fn=pack)
trainer.fit(LanguageModel(), train_loader, valid_loader, ckpt_path="last")
print(trainer.callback_metrics["valid_loss"].item())
