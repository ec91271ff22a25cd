import torch
import torch.nn.functional as F

import drivetrain as dt
from benchmarks.peers.digits import make_model, train_set, valid_set

job = dt.Job(
    name="many",
    model=make_model,
    data=train_set,
    valid=valid_set,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    metrics={"accuracy": lambda output, batch: output.argmax(1) == batch[1]},
    optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3),
    global_batch=128,
    epochs=5,
)
result = dt.train(job)
if result.is_main:
    print(result.metrics["valid_accuracy"])
