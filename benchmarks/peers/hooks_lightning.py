import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from benchmarks.peers.digits import make_model, train_set


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=5e-3)


class HeadFirst(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        module.model[0].requires_grad_(trainer.global_step >= 40)


class Histograms(Callback):
    def on_train_epoch_end(self, trainer, module):
        module.logger.experiment.add_histogram("head", module.model[2].weight, trainer.global_step)


class GoodEnough(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.loss = outputs["loss"].item()
        if trainer.global_step % 20 == 0:
            trainer.should_stop = self.loss < 0.3


L.seed_everything(0)
saved, enough = ModelCheckpoint(dirpath="hooks-checkpoints", save_last=True), GoodEnough()
callbacks = [saved, HeadFirst(), Histograms(), enough]
trainer = L.Trainer(max_epochs=10, callbacks=callbacks, logger=TensorBoardLogger("logs"), enable_progress_bar=False)
trainer.fit(Classifier(), DataLoader(train_set, batch_size=64, shuffle=True), ckpt_path="last")
print(enough.loss)
