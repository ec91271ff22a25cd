import torch

import drivetrain as dt
from benchmarks.peers.gan import Gan, loss_d, loss_g, told_apart, train_set

job = dt.Job(
    name="gan",
    model=Gan,
    data=train_set,
    loss={"d": loss_d, "g": loss_g},
    optimizer={
        "d": dt.Optim(lambda params: torch.optim.Adam(params, lr=2e-4, betas=(0.5, 0.999)), params="disc.*"),
        "g": dt.Optim(lambda params: torch.optim.Adam(params, lr=2e-4, betas=(0.5, 0.999)), params="gen.*"),
    },
    global_batch=64,
    epochs=10,
)
result = dt.train(job)
print(told_apart(result.model))
