"""Your own loop, with validation, the best checkpoint and early stopping.

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import drivetrain as dt

digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images, labels = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
run = dt.drive(
    model,
    torch.optim.AdamW(model.parameters(), lr=2e-3),
    TensorDataset(images[:1500], labels[:1500]),
    name="own-loop",
    global_batch=64,
    epochs=20,
    schedule=dt.WarmupCosine(warmup_steps=20),
    valid=TensorDataset(images[1500:], labels[1500:]),
    loss=loss,  # of the validation
    metrics={"accuracy": lambda output, batch: output.argmax(1) == batch[1]},
    best=dt.Aim("valid_accuracy"),
    early_stopping=dt.EarlyStopping(patience=5),
)
for batch in run:
    noisy = batch[0] + 0.1 * torch.randn_like(batch[0])
    value = loss(run.model, (noisy, batch[1]))
    run.log("confidence", torch.exp(-value))
    run.backward(value)
    run.step()

if run.world.is_main and run.best is not None:
    print(f"best accuracy {run.best.value:.3f} at step {run.best.step}, after {run.steps} steps")
    dt.export(run.folder, run.folder / "best.safetensors", which="best")
