import os

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.peers.digits import make_model, train_set, valid_set


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


arguments = TrainingArguments(
    output_dir="many-trainer",
    num_train_epochs=5,
    per_device_train_batch_size=128 // int(os.environ.get("WORLD_SIZE", "1")),
    learning_rate=5e-3,
    lr_scheduler_type="constant",
    save_strategy="epoch",
    remove_unused_columns=False,
    label_names=["labels"],
    report_to="none",
)
trainer = Trainer(
    model=Classifier(),
    args=arguments,
    train_dataset=train_set,
    eval_dataset=valid_set,
    data_collator=collate,
    compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
)
trainer.train(resume_from_checkpoint=os.path.isdir("many-trainer") and get_last_checkpoint("many-trainer"))
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    print(metrics["eval_accuracy"])
