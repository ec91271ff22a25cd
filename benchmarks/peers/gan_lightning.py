import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.peers.gan import Gan, loss_d, loss_g, told_apart, train_set


class GanModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Gan()
        self.automatic_optimization = False

    def training_step(self, images, batch_idx):
        for name, loss, optimizer in zip(("d", "g"), (loss_d, loss_g), self.optimizers()):
            self.toggle_optimizer(optimizer)
            value = loss(self.model, images)
            self.log(f"loss_{name}", value)
            optimizer.zero_grad()
            self.manual_backward(value)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [
            torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999))
            for part in (self.model.disc, self.model.gen)
        ]


L.seed_everything(0)
module = GanModule()
saved = ModelCheckpoint(dirpath="gan-checkpoints", save_last=True)
trainer = L.Trainer(max_epochs=10, callbacks=[saved], enable_progress_bar=False)
trainer.fit(module, DataLoader(train_set, batch_size=64, shuffle=True), ckpt_path="last")
print(told_apart(module.model.eval()))
