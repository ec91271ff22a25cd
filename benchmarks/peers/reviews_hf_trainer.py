import os

from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.peers.reviews import config, pad, train_set, valid_set

arguments = TrainingArguments(
    output_dir="reviews-trainer",
    num_train_epochs=4,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=32,
    learning_rate=2e-3,
    weight_decay=0.01,
    lr_scheduler_type="cosine",
    warmup_steps=8,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    report_to="none",
)
trainer = Trainer(
    model=AutoModelForSequenceClassification.from_config(config),
    args=arguments,
    train_dataset=train_set,
    eval_dataset=valid_set,
    data_collator=pad,
    compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
)
trainer.train(resume_from_checkpoint=os.path.isdir("reviews-trainer") and get_last_checkpoint("reviews-trainer"))
trainer.save_model("classifier")
print(trainer.evaluate()["eval_accuracy"])
