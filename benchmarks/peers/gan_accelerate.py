from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

from benchmarks.peers.gan import Gan, loss_d, loss_g, told_apart, train_set

set_seed(0)
project = ProjectConfiguration("gan-accelerate", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(project_config=project)
model = Gan()
optimizers = [torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in (model.disc, model.gen)]
loader = DataLoader(train_set, batch_size=64, shuffle=True)
model.disc, model.gen, *optimizers, loader = accelerator.prepare(model.disc, model.gen, *optimizers, loader)
first, saved = 0, sorted(Path("gan-accelerate/checkpoints").glob("checkpoint_*"))
if saved:
    accelerator.load_state(str(saved[-1]))
    first = int(saved[-1].name.split("_")[1]) + 1
    project.iteration = first
for _ in range(first, 10):
    for images in loader:
        for loss, part, optimizer in zip((loss_d, loss_g), (model.disc, model.gen), optimizers):
            value = loss(model, images)
            optimizer.zero_grad()
            accelerator.backward(value, inputs=list(part.parameters()))
            optimizer.step()
    accelerator.print(f"generator {value.item():.4f}")
    accelerator.save_state()
print(told_apart(model.eval()))
