import torch
import torch.nn.functional as F

import drivetrain as dt
from benchmarks.peers.digits import make_model, train_set


class HeadFirst(dt.Hook):
    every = 20

    def check(self, context):
        if context.step == 0:
            context.freeze("0.*")

    def __call__(self, context):
        if context.step == 40:
            context.unfreeze("0.*")


job = dt.Job(
    name="hooks",
    model=make_model,
    data=train_set,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3),
    global_batch=64,
    epochs=10,
    hooks=[
        HeadFirst(),
        dt.every("epoch", lambda context: dt.log("head", dt.Histogram(context.model[2].weight))),
        dt.every(20, lambda context: dt.Verdict(stop=context.loss < 0.3)),
    ],
)
print(dt.train(job).last.loss)
