import os

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.peers.text import (
    batch_size,
    is_bf16,
    is_compiled,
    is_tuned,
    learning_rate,
    loss_of,
    make_model,
    max_steps,
    save_every,
    train_set,
)


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def forward(self, words):
        return {"loss": loss_of(self.model, words)}


def collate(items):
    return {"words": torch.stack([words for (words,) in items])}


set_seed(0)
arguments = TrainingArguments(
    output_dir="checkpoints",
    max_steps=max_steps,
    per_device_train_batch_size=batch_size,
    learning_rate=learning_rate,
    weight_decay=0.01,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    bf16=is_bf16,
    tf32=(is_tuned and is_bf16) or None,
    torch_compile=is_compiled,
    save_steps=save_every,
    save_total_limit=2,
    remove_unused_columns=False,
    report_to="none",
    disable_tqdm=is_tuned,
    seed=0,
)
trainer = Trainer(model=WithLoss(), args=arguments, train_dataset=train_set, data_collator=collate)
trainer.train(resume_from_checkpoint=os.path.isdir("checkpoints") and get_last_checkpoint("checkpoints"))
