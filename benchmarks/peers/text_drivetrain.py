import torch

import drivetrain as dt
from benchmarks.peers.text import batch_size, learning_rate, loss_of, make_model, max_steps, save_every, train_set

job = dt.Job(
    name="text",
    model=make_model,
    data=train_set,
    loss=lambda model, batch: loss_of(model, batch[0]),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
    clip_norm=1.0,
    global_batch=batch_size,
    max_steps=max_steps,
    checkpoint_every=save_every,
)
result = dt.train(job)
