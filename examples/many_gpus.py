"""The same script on one device, on every GPU of a machine, and on a cluster: it names none of them.

python examples/many_gpus.py                                               # one device
drivetrain launch examples/many_gpus.py                                    # every GPU here
torchrun --nproc-per-node 8 examples/many_gpus.py                          # the same, by torchrun
drivetrain launch examples/many_gpus.py --slurm --num-nodes 2 --num-gpus 8 # writes the job script for SLURM
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import drivetrain as dt

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

job = dt.Job(
    name="many-gpus",
    model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
    data=TensorDataset(images[:1500], labels[:1500]),
    valid=TensorDataset(images[1500:], labels[1500:]),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    metrics={"accuracy": lambda output, batch: output.argmax(1) == batch[1]},
    optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
    global_batch=128,  # over all devices, however many there are
    epochs=5,
)

if __name__ == "__main__":
    result = dt.train(job)
    if result.is_main:
        print(f"accuracy {result.metrics['valid_accuracy']:.3f} after {result.steps} steps")
