import os

import torch
from lightning.fabric import Fabric
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

fabric = Fabric(devices=1, precision="bf16-mixed" if is_bf16 else "32-true")
fabric.launch()
fabric.seed_everything(0, workers=True)
if is_tuned:
    torch.set_float32_matmul_precision("high")
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=is_tuned)
model, optimizer = fabric.setup(torch.compile(model) if is_compiled else model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(train_set, batch_size=batch_size, shuffle=True, pin_memory=is_pinned))
state = {"model": model, "optimizer": optimizer, "step": 0}
if os.path.exists("checkpoint.ckpt"):
    fabric.load("checkpoint.ckpt", state)
while state["step"] < max_steps:
    for (words,) in loader:
        loss = loss_of(model, words)
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        state["step"] += 1
        if state["step"] % save_every == 0:
            fabric.save("checkpoint.new", state)
            os.replace("checkpoint.new", "checkpoint.ckpt")
        if state["step"] == max_steps:
            break
