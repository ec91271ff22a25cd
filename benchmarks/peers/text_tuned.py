import os

import torch

from benchmarks.peers.text import (
    batch_size,
    device,
    is_bf16,
    is_compiled,
    learning_rate,
    loss_of,
    make_model,
    max_steps,
    save_every,
    train_set,
)

torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
model = make_model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
loss_fn = torch.compile(loss_of) if is_compiled else loss_of
data = train_set.tensors[0].to(device)
per_epoch = len(data) // batch_size
step = 0
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt", map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
    torch.set_rng_state(state["rng"].cpu())
    if device == "cuda":
        torch.cuda.set_rng_state(state["cuda_rng"].cpu())
while step < max_steps:
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).to(device)
    for chosen in order.split(batch_size)[place:]:
        with torch.autocast(device, torch.bfloat16, enabled=is_bf16):
            loss = loss_fn(model, data[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            state["rng"] = torch.get_rng_state()
            if device == "cuda":
                state["cuda_rng"] = torch.cuda.get_rng_state()
            torch.save(state, "checkpoint.new")
            os.replace("checkpoint.new", "checkpoint.pt")
        if step == max_steps:
            break
