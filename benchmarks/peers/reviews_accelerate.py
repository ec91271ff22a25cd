from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_cosine_schedule_with_warmup

from benchmarks.peers.reviews import config, pad, train_set, valid_set

set_seed(0)
project = ProjectConfiguration("reviews-accelerate", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(project_config=project)
model = AutoModelForSequenceClassification.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
train_loader = DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=pad)
valid_loader = DataLoader(valid_set, batch_size=32, collate_fn=pad)
schedule = get_cosine_schedule_with_warmup(optimizer, 8, 4 * len(train_loader))
model, optimizer, train_loader, valid_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, valid_loader, schedule
)
first, best, saved = 0, 0.0, sorted(Path("reviews-accelerate/checkpoints").glob("checkpoint_*"))
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
    hits = []
    for batch in valid_loader:
        with torch.no_grad():
            found = model(**batch).logits.argmax(1) == batch["labels"]
        hits.append(accelerator.gather_for_metrics(found))
    accuracy = torch.cat(hits).float().mean().item()
    accelerator.print(f"accuracy {accuracy:.4f}")
    if accuracy > best:
        best = accuracy
        accelerator.unwrap_model(model).save_pretrained("classifier")
    accelerator.save_state()
print(best)
