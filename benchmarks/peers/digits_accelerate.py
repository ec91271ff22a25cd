from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from benchmarks.peers.digits import make_model, train_set, valid_set

set_seed(0)
project = ProjectConfiguration("digits-accelerate", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(project_config=project)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=256)
schedule = get_cosine_schedule_with_warmup(optimizer, 20, 8 * len(train_loader))
model, optimizer, train_loader, valid_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, valid_loader, schedule
)
first, best, saved = 0, 0.0, sorted(Path("digits-accelerate/checkpoints").glob("checkpoint_*"))
if saved:
    accelerator.load_state(str(saved[-1]))
    first = int(saved[-1].name.split("_")[1]) + 1
    project.iteration = first
for _ in range(first, 8):
    model.train()
    for images, labels in train_loader:
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    losses, hits = [], []
    for images, labels in valid_loader:
        with torch.no_grad():
            outputs = model(images)
        outputs, labels = accelerator.gather_for_metrics((outputs, labels))
        losses.append(F.cross_entropy(outputs, labels, reduction="none"))
        hits.append(outputs.argmax(1) == labels)
    valid_loss, accuracy = torch.cat(losses).mean().item(), torch.cat(hits).float().mean().item()
    accelerator.print(f"valid_loss {valid_loss:.4f} accuracy {accuracy:.4f}")
    if accuracy > best:
        best = accuracy
        accelerator.save_model(model, "digits-accelerate/best")
    accelerator.save_state()
print(best, valid_loss)
