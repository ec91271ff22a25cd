import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from benchmarks.peers.digits import make_model, train_set, valid_set


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        outputs = self.model(images)
        self.log("valid_loss", F.cross_entropy(outputs, labels), sync_dist=True)
        self.log("valid_accuracy", (outputs.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        schedule = get_cosine_schedule_with_warmup(optimizer, 20, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(0)
best = ModelCheckpoint(dirpath="checkpoints", monitor="valid_accuracy", mode="max", save_last=True)
trainer = L.Trainer(max_epochs=8, gradient_clip_val=1.0, callbacks=[best], enable_progress_bar=False)
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=256)
trainer.fit(Classifier(), train_loader, valid_loader, ckpt_path="last")
print(best.best_model_score.item(), trainer.callback_metrics["valid_loss"].item())
