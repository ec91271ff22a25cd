from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from benchmarks.peers.sums import make_model, pad, train_set, valid_set

set_seed(0)
project = ProjectConfiguration("sums-accelerate", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(project_config=project)
model = make_model()
optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=5e-3)
train_loader = DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=pad)
valid_loader = DataLoader(valid_set, batch_size=32, collate_fn=pad)
schedule = get_cosine_schedule_with_warmup(optimizer, 10, 4 * len(train_loader))
model, optimizer, train_loader, valid_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, valid_loader, schedule
)
first, saved = 0, sorted(Path("sums-accelerate/checkpoints").glob("checkpoint_*"))
if saved:
    accelerator.load_state(str(saved[-1]))
    first = int(saved[-1].name.split("_")[1]) + 1
    project.iteration = first
for _ in range(first, 4):
    model.train()
    for batch in train_loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    total, count = 0.0, 0
    for batch in valid_loader:
        with torch.no_grad():
            loss = model(**batch).loss
        tokens = (batch["labels"][:, 1:] != -100).sum()
        losses, numbers = accelerator.gather_for_metrics((loss * tokens, tokens))
        total, count = total + losses.sum().item(), count + numbers.sum().item()
    valid_loss = total / count
    accelerator.print(f"valid_loss {valid_loss:.4f}")
    accelerator.save_state()
accelerator.unwrap_model(model).save_pretrained("adapter")
print(valid_loss)
