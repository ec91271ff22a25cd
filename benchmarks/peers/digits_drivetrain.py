import torch
import torch.nn.functional as F

import drivetrain as dt
from benchmarks.peers.digits import make_model, train_set, valid_set

job = dt.Job(
    name="digits",
    model=make_model,
    data=train_set,
    valid=valid_set,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    metrics={"accuracy": lambda output, batch: output.argmax(1) == batch[1]},
    optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
    schedule=dt.WarmupCosine(warmup_steps=20),
    clip_norm=1.0,
    global_batch=64,
    epochs=8,
    best=dt.Aim("valid_accuracy"),
)
result = dt.train(job)
print(result.best.value, result.metrics["valid_loss"])
