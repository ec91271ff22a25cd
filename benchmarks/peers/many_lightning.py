import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.peers.digits import make_model, train_set, valid_set


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        hits = self.model(batch[0]).argmax(1) == batch[1]
        self.log("valid_accuracy", hits.float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=5e-3)


L.seed_everything(0)
saved = ModelCheckpoint(dirpath="many-checkpoints", save_last=True)
trainer = L.Trainer(max_epochs=5, callbacks=[saved], enable_progress_bar=False)
train_loader = DataLoader(train_set, batch_size=128 // trainer.world_size, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=256)
trainer.fit(Classifier(), train_loader, valid_loader, ckpt_path="last")
if trainer.is_global_zero:
    print(trainer.callback_metrics["valid_accuracy"].item())
