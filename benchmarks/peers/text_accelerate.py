from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

from benchmarks.peers.text import (
    batch_size,
    is_bf16,
    is_compiled,
    is_pinned,
    is_tuned,
    learning_rate,
    loss_of,
    make_model,
    max_steps,
    save_every,
    train_set,
)

set_seed(0)
project = ProjectConfiguration(".", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(
    mixed_precision="bf16" if is_bf16 else "no",
    project_config=project,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    dynamo_backend="inductor" if is_compiled else "no",
)
if is_tuned:
    torch.set_float32_matmul_precision("high")
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=is_tuned)
loader = DataLoader(train_set, batch_size=batch_size, shuffle=True, pin_memory=is_pinned)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step, saved = 0, sorted(Path("checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1]))
if saved:
    accelerator.load_state(str(saved[-1]))
    project.iteration = int(saved[-1].name.split("_")[1]) + 1
    step = project.iteration * save_every
while step < max_steps:
    epoch, place = divmod(step, len(loader))
    loader.set_epoch(epoch)
    batches = accelerator.skip_first_batches(loader, place) if place else loader
    for (words,) in batches:
        with accelerator.autocast():
            loss = loss_of(model, words)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % save_every == 0:
            accelerator.save_state()
        if step == max_steps:
            break
