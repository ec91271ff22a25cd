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
    output_dir="digits-trainer",
    num_train_epochs=8,
    per_device_train_batch_size=64,
    per_device_eval_batch_size=256,
    learning_rate=2e-3,
    weight_decay=0.01,
    lr_scheduler_type="cosine",
    warmup_steps=20,
    max_grad_norm=1.0,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    remove_unused_columns=False,
    label_names=["labels"],
    report_to="none",
    disable_tqdm=True,
    seed=0,
)
trainer = Trainer(
    model=Classifier(),
    args=arguments,
    train_dataset=train_set,
    eval_dataset=valid_set,
    data_collator=collate,
    compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
)
trainer.train(resume_from_checkpoint=os.path.isdir("digits-trainer") and get_last_checkpoint("digits-trainer"))
metrics = trainer.evaluate()
print(metrics["eval_accuracy"], metrics["eval_loss"])
