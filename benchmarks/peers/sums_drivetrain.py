import torch

import drivetrain as dt
from benchmarks.peers.sums import make_model, train_set, valid_set

job = dt.hf.job(
    make_model(),
    train_set,
    name="sums",
    valid=valid_set,
    optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3),
    weight_decay=0.01,
    schedule=dt.WarmupCosine(warmup_steps=10),
    global_batch=32,
    epochs=4,
)
result = dt.train(job)
dt.hf.export(result, "adapter")
print(result.metrics["valid_loss"])
