import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_cosine_schedule_with_warmup

from benchmarks.peers.reviews import config, pad, train_set, valid_set


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForSequenceClassification.from_config(config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def validation_step(self, batch, batch_idx):
        hits = self.model(**batch).logits.argmax(1) == batch["labels"]
        self.log("valid_accuracy", hits.float().mean(), batch_size=len(hits), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        schedule = get_cosine_schedule_with_warmup(optimizer, 8, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(0)
best = ModelCheckpoint(dirpath="reviews-checkpoints", monitor="valid_accuracy", mode="max", save_last=True)
trainer = L.Trainer(max_epochs=4, gradient_clip_val=1.0, callbacks=[best], enable_progress_bar=False)
train_loader = DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=pad)
valid_loader = DataLoader(valid_set, batch_size=32, collate_fn=pad)
trainer.fit(Classifier(), train_loader, valid_loader, ckpt_path="last")
Classifier.load_from_checkpoint(best.best_model_path).model.save_pretrained("classifier")
print(best.best_model_score.item())
