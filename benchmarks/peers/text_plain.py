import os

import torch
from torch.utils.data import DataLoader

from benchmarks.peers.text import (
    batch_size,
    device,
    is_bf16,
    learning_rate,
    loss_of,
    make_model,
    max_steps,
    save_every,
    train_set,
)

torch.manual_seed(0)
model = make_model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
step = 0
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < max_steps:
    for (words,) in loader:
        with torch.autocast(device, torch.bfloat16, enabled=is_bf16):
            loss = loss_of(model, words.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, "checkpoint.new")
            os.replace("checkpoint.new", "checkpoint.pt")
        if step == max_steps:
            break
