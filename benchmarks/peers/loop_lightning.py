from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from benchmarks.peers.digits import make_model, train_set, valid_set

fabric = L.Fabric()
fabric.launch()
fabric.seed_everything(0)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=256)
schedule = get_cosine_schedule_with_warmup(optimizer, 20, 8 * len(train_loader))
model, optimizer = fabric.setup(model, optimizer)
train_loader, valid_loader = fabric.setup_dataloaders(train_loader, valid_loader)
state = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0, "best": 0.0, "since_best": 0}
if Path("loop-fabric/last.ckpt").exists():
    fabric.load("loop-fabric/last.ckpt", state)
while state["epoch"] < 8 and state["since_best"] < 3:
    model.train()
    for images, labels in train_loader:
        loss = F.cross_entropy(model(images + 0.1 * torch.randn_like(images)), labels)
        fabric.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    hits, count = torch.zeros((), device=fabric.device), 0
    for images, labels in valid_loader:
        with torch.no_grad():
            hits += (model(images).argmax(1) == labels).sum()
        count += len(labels)
    accuracy = (
        fabric.all_reduce(hits, reduce_op="sum") / fabric.all_reduce(torch.tensor(count), reduce_op="sum")
    ).item()
    is_best = accuracy > state["best"]
    state["best"] = max(accuracy, state["best"])
    state["since_best"] = 0 if is_best else state["since_best"] + 1
    state["epoch"] += 1
    fabric.save("loop-fabric/last.ckpt", state)
    if is_best:
        fabric.save("loop-fabric/best.ckpt", {"model": model})
print(state["best"])
