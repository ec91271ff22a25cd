from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, get_cosine_schedule_with_warmup

from benchmarks.peers.tables import config, train_set, valid_set

set_seed(0)
project = ProjectConfiguration("tables-accelerate", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(project_config=project)
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
pack = DataCollatorWithFlattening()
train_loader = DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=pack)
valid_loader = DataLoader(valid_set, batch_size=32, collate_fn=pack)
schedule = get_cosine_schedule_with_warmup(optimizer, 6, 4 * len(train_loader))
model, optimizer, train_loader, valid_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, valid_loader, schedule
)
first, best, saved = 0, float("inf"), sorted(Path("tables-accelerate/checkpoints").glob("checkpoint_*"))
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
    if valid_loss < best:
        best = valid_loss
        accelerator.save_model(model, "tables-accelerate/best")
    accelerator.save_state()
print(valid_loss)
