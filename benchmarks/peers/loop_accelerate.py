from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from benchmarks.peers.digits import make_model, train_set, valid_set


class Progress:
    def __init__(self):
        self.epoch, self.best, self.since_best = 0, 0.0, 0

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


set_seed(0)
project = ProjectConfiguration("loop-accelerate", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(project_config=project)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=256)
schedule = get_cosine_schedule_with_warmup(optimizer, 20, 8 * len(train_loader))
model, optimizer, train_loader, valid_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, valid_loader, schedule
)
progress = Progress()
accelerator.register_for_checkpointing(progress)
saved = sorted(Path("loop-accelerate/checkpoints").glob("checkpoint_*"))
if saved:
    accelerator.load_state(str(saved[-1]))
    project.iteration = progress.epoch
while progress.epoch < 8 and progress.since_best < 3:
    model.train()
    for images, labels in train_loader:
        loss = F.cross_entropy(model(images + 0.1 * torch.randn_like(images)), labels)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    hits = []
    for images, labels in valid_loader:
        with torch.no_grad():
            found = model(images).argmax(1) == labels
        hits.append(accelerator.gather_for_metrics(found))
    accuracy = torch.cat(hits).float().mean().item()
    progress.epoch, progress.since_best = progress.epoch + 1, progress.since_best + 1
    if accuracy > progress.best:
        progress.best, progress.since_best = accuracy, 0
        accelerator.save_model(model, "loop-accelerate/best")
    accelerator.save_state()
print(progress.best)
