import drivetrain as dt
from benchmarks.peers.reviews import config, train_set, valid_set

job = dt.hf.job(
    config,
    train_set,
    task="sequence-classification",
    name="reviews",
    valid=valid_set,
    metrics={"accuracy": lambda output, batch: output.logits.argmax(1) == batch["labels"]},
    lr=2e-3,
    global_batch=32,
    epochs=4,
    best=dt.Aim("valid_accuracy"),
)
result = dt.train(job)
dt.hf.export(result, "classifier")
print(result.best.value)
