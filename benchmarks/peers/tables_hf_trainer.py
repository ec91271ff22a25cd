import os

from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.peers.tables import config, train_set, valid_set

arguments = TrainingArguments(
    output_dir="tables-trainer",
    num_train_epochs=4,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=32,
    learning_rate=5e-3,
    weight_decay=0.01,
    lr_scheduler_type="cosine",
    warmup_steps=6,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    report_to="none",
)
trainer = Trainer(
    model=AutoModelForCausalLM.from_config(config),
    args=arguments,
    train_dataset=train_set,
    eval_dataset=valid_set,
    data_collator=DataCollatorWithFlattening(),
)
trainer.train(resume_from_checkpoint=os.path.isdir("tables-trainer") and get_last_checkpoint("tables-trainer"))
print(trainer.evaluate()["eval_loss"])
