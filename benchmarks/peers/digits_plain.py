import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.peers.digits import make_model, train_set, valid_set

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = make_model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader = DataLoader(train_set, batch_size=64, shuffle=True)
last = 8 * len(loader)


def factor(step):
    if step < 20:
        return (step + 1) / 20
    return 0.5 * (1 + math.cos(math.pi * (step - 20) / (last - 20)))


schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
path, first, best = Path("digits-plain.pt"), 0, 0.0
if path.exists():
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    first, best = state["epoch"], state["best"]
for epoch in range(first, 8):
    model.train()
    for images, labels in loader:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    total, hits = 0.0, 0
    with torch.no_grad():
        for images, labels in DataLoader(valid_set, batch_size=256):
            outputs, labels = model(images.to(device)), labels.to(device)
            total += F.cross_entropy(outputs, labels, reduction="sum").item()
            hits += (outputs.argmax(1) == labels).sum().item()
    valid_loss, accuracy = total / len(valid_set), hits / len(valid_set)
    print(f"epoch {epoch + 1}: valid_loss {valid_loss:.4f} accuracy {accuracy:.4f}")
    if accuracy > best:
        best = accuracy
        torch.save(model.state_dict(), "digits-plain-best.pt")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save({**state, "epoch": epoch + 1, "best": best}, path)
print(best, valid_loss)
