import os

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.peers.sums import make_model, pad, train_set, valid_set

arguments = TrainingArguments(
    output_dir="sums-trainer",
    num_train_epochs=4,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=32,
    learning_rate=5e-3,
    weight_decay=0.01,
    lr_scheduler_type="cosine",
    warmup_steps=10,
    max_grad_norm=1.0,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    label_names=["labels"],
    report_to="none",
    disable_tqdm=True,
    seed=0,
)
trainer = Trainer(
    model=make_model(), args=arguments, train_dataset=train_set, eval_dataset=valid_set, data_collator=pad
)
trainer.train(resume_from_checkpoint=os.path.isdir("sums-trainer") and get_last_checkpoint("sums-trainer"))
trainer.save_model("adapter")
print(trainer.evaluate()["eval_loss"])
