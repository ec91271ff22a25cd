from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

from benchmarks.peers.digits import make_model, train_set

set_seed(0)
project = ProjectConfiguration("hooks-accelerate", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(project_config=project, log_with="tensorboard")
accelerator.init_trackers("logs")
writer = accelerator.get_tracker("tensorboard", unwrap=True)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(train_set, batch_size=64, shuffle=True))
first, saved, is_good_enough = 0, sorted(Path("hooks-accelerate/checkpoints").glob("checkpoint_*")), False
if saved:
    accelerator.load_state(str(saved[-1]))
    first = int(saved[-1].name.split("_")[1]) + 1
    project.iteration = first
step, body = first * len(loader), accelerator.unwrap_model(model)[0]
for _ in range(first, 10):
    for images, labels in loader:
        body.requires_grad_(step >= 40)
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            is_good_enough = accelerator.reduce(loss.detach(), "mean").item() < 0.3
        if is_good_enough:
            break
    if accelerator.is_main_process:
        writer.add_histogram("head", accelerator.unwrap_model(model)[2].weight, step)
    accelerator.save_state()
    if is_good_enough:
        break
accelerator.end_training()
print(loss.item())
