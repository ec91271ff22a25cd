import drivetrain as dt
from benchmarks.peers.tables import config, train_set, valid_set

job = dt.hf.job(
    config,
    train_set,
    name="tables",
    valid=valid_set,
    packing=True,
    lr=5e-3,
    global_batch=32,
    epochs=4,
)
result = dt.train(job)
print(result.metrics["valid_loss"])
