import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.peers.digits import make_model, train_set


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def forward(self, images, labels):
        logits = self.model(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def collate(items):
    images, labels = zip(*items)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


class HeadFirst(TrainerCallback):
    def on_step_begin(self, arguments, state, control, model, **others):
        model.model[0].requires_grad_(state.global_step >= 40)


class Histograms(TrainerCallback):
    def __init__(self):
        self.writer = SummaryWriter("logs")

    def on_epoch_end(self, arguments, state, control, model, **others):
        self.writer.add_histogram("head", model.model[2].weight, state.global_step)


class GoodEnough(TrainerCallback):
    def on_log(self, arguments, state, control, logs, **others):
        if "loss" in logs:
            self.loss = logs["loss"]
            control.should_training_stop = self.loss < 0.3


arguments = TrainingArguments(
    output_dir="hooks-trainer",
    num_train_epochs=10,
    per_device_train_batch_size=64,
    learning_rate=5e-3,
    lr_scheduler_type="constant",
    logging_steps=20,
    save_strategy="epoch",
    remove_unused_columns=False,
    report_to="none",
)
enough = GoodEnough()
trainer = Trainer(
    model=Classifier(),
    args=arguments,
    train_dataset=train_set,
    data_collator=collate,
    callbacks=[HeadFirst(), Histograms(), enough],
)
trainer.train(resume_from_checkpoint=os.path.isdir("hooks-trainer") and get_last_checkpoint("hooks-trainer"))
print(enough.loss)
