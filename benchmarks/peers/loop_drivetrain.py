import torch
import torch.nn.functional as F

import drivetrain as dt
from benchmarks.peers.digits import make_model, train_set, valid_set


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


torch.manual_seed(0)
model = make_model()
run = dt.drive(
    model,
    torch.optim.AdamW(model.parameters(), lr=2e-3),
    train_set,
    name="loop",
    global_batch=64,
    epochs=8,
    schedule=dt.WarmupCosine(warmup_steps=20),
    valid=valid_set,
    loss=loss,
    metrics={"accuracy": lambda output, batch: output.argmax(1) == batch[1]},
    best=dt.Aim("valid_accuracy"),
    early_stopping=dt.EarlyStopping(patience=3),
)
for images, labels in run:
    run.backward(loss(run.model, (images + 0.1 * torch.randn_like(images), labels)))
    run.step()
print(run.best.value)
