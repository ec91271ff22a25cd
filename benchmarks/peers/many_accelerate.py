from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

from benchmarks.peers.digits import make_model, train_set, valid_set

set_seed(0)
project = ProjectConfiguration("many-accelerate", automatic_checkpoint_naming=True, total_limit=3)
loading = DataLoaderConfiguration(split_batches=True)  # processes share a batch of 128
accelerator = Accelerator(project_config=project, dataloader_config=loading)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
train_loader = DataLoader(train_set, batch_size=128, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=256)
model, optimizer, train_loader, valid_loader = accelerator.prepare(model, optimizer, train_loader, valid_loader)
first, saved = 0, sorted(Path("many-accelerate/checkpoints").glob("checkpoint_*"))
if saved:
    accelerator.load_state(str(saved[-1]))
    first = int(saved[-1].name.split("_")[1]) + 1
    project.iteration = first
for _ in range(first, 5):
    model.train()
    for images, labels in train_loader:
        accelerator.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    hits = []
    for images, labels in valid_loader:
        with torch.no_grad():
            found = model(images).argmax(1) == labels
        hits.append(accelerator.gather_for_metrics(found))
    accuracy = torch.cat(hits).float().mean().item()
    accelerator.save_state()
accelerator.print(accuracy)
