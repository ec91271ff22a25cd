"""`dt.hf.job_from`: a Trainer's job means the same here, and what cannot be obeyed is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain as dt
from drivetrain.hf.from_trainer import OBEYED, WITHOUT_MEANING
from tests.hf.samples import samples, transformers
from tests.hf.test_packing import gpt2, llama

NUM_SAMPLES = 12


def padded(kind: str = "causal") -> list[dict[str, Any]]:
    """Samples of one length, as the Trainer's default collator needs them, with unequal numbers of labels."""
    rows = []
    for each in samples(kind, NUM_SAMPLES):
        missing = 10 - len(each["input_ids"])
        rows.append(
            {
                "input_ids": each["input_ids"] + [0] * missing,
                "attention_mask": [1] * len(each["input_ids"]) + [0] * missing,
                "labels": each["labels"] + [-100] * missing,
            }
        )
    return rows


def trainer_of(folder: Path, model: Any = None, **changes: Any) -> Any:
    parts = {name: changes.pop(name) for name in list(changes) if name in PARTS}
    values: dict[str, Any] = {
        "output_dir": str(folder / "hf"),
        "max_steps": 6,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    arguments = transformers.TrainingArguments(**{**values, **changes})
    kind = parts.pop("kind", transformers.Trainer)
    given = {"train_dataset": padded(), **parts}
    return kind(llama(torch.float64) if model is None else model, arguments, **given)


PARTS = {"train_dataset", "eval_dataset", "callbacks", "compute_metrics", "data_collator", "kind", "optimizers",
         "compute_loss_func"}  # fmt: skip


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "linear with warm-up": {"warmup_steps": 2},
    "cosine, part of the steps": {"lr_scheduler_type": "cosine", "warmup_steps": 0.34, "weight_decay": 0.1},
    "sgd, no clipping": {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"},
    "clipping": {"max_grad_norm": 0.05, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6},
    "label smoothing": {"label_smoothing_factor": 0.2},
    "epochs with a remainder": {
        "max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 1,
    },
    "polynomial": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_and_weights_are_the_trainers(tmp_path: Path, name: str) -> None:
    theirs = trainer_of(tmp_path, **SETTINGS[name])
    theirs.train()
    expected = [row["loss"] for row in theirs.state.log_history if "loss" in row]
    job, config = dt.hf.job_from(trainer_of(tmp_path, **SETTINGS[name]))
    settings = config.model_copy(update={"run": config.run.model_copy(update={"output_dir": tmp_path / "ours"})})
    result = dt.train(job, settings, quiet=True)
    found = [json.loads(line)["loss"] for line in (result.folder / "steps.jsonl").read_text().splitlines()]
    assert len(found) == len(expected) == 6
    assert found == pytest.approx(expected, abs=1e-6)  # the Trainer's loss is rounded to float32
    ours = result.model.state_dict()
    for key, weight in theirs.model.state_dict().items():
        torch.testing.assert_close(ours[key], weight, rtol=0, atol=2e-6)


def test_fields_that_are_obeyed(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path,
        eval_dataset=padded(),
        callbacks=[transformers.EarlyStoppingCallback(2, 0.1)],
        run_name="mine",
        seed=7,
        num_train_epochs=1.5,
        max_steps=-1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=2,
        load_best_model_at_end=True,
        per_device_eval_batch_size=3,
        train_sampling_strategy="group_by_length",
        dataloader_num_workers=2,
        gradient_checkpointing=True,
        logging_steps=5,
        report_to=["tensorboard"],
    )
    job, config = dt.hf.job_from(trainer)
    assert (job.name, job.seed, job.max_steps, job.epochs) == ("mine", 7, 5, None)
    assert (job.valid_every, job.checkpoint_every, job.keep_last, job.valid_batch) == (2, 4, 2, 3)
    assert job.early_stopping == dt.EarlyStopping(2, 0.1, "valid_loss", "min")
    assert job.best == dt.Aim("valid_loss", "min")
    assert job.source.lengths is not None
    assert config.run.output_dir == tmp_path / "hf"
    assert (config.data.num_workers, config.precision.dtype) == (2, "fp32")
    assert len(OBEYED) > 25


def overriding() -> dict[str, Any]:
    class Smoothed(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    return {"kind": Smoothed}


def called_back() -> dict[str, Any]:
    class Watching(transformers.TrainerCallback):  # type: ignore[misc]
        pass

    return {"callbacks": [Watching()]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 is not obeyed"),
        ({"eval_delay": 3}, "eval_delay=3 is not obeyed"),
        ({"optim": "adafactor"}, "optim='adafactor' is not known"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_dataset": padded()},
         "'reduce_lr_on_plateau' is not known"),
        (overriding, "Smoothed overrides compute_loss"),
        (called_back, r"Watching is not called(.|\n)*dt\.every"),
        ({"compute_metrics": lambda prediction: {}}, "compute_metrics is not obeyed"),
        ({"compute_loss_func": lambda *args, **kwargs: 0}, "compute_loss_func is not obeyed"),
        ({"eval_strategy": "steps", "eval_dataset": padded(), "metric_for_best_model": "accuracy"},
         "'accuracy' comes from compute_metrics"),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(tmp_path: Path, changes: Any, words: str) -> None:
    trainer = trainer_of(tmp_path, **(changes() if callable(changes) else changes))
    with pytest.raises(dt.ConfigError, match=words):
        dt.hf.job_from(trainer)
    assert not (tmp_path / "ours").exists()


def test_lengths_are_read_for_a_collator_of_ones_own(tmp_path: Path) -> None:
    def stacked(items: list[Any]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([item[name] for item in items]) for name in items[0]}

    data = torch.utils.data.Subset(padded(), range(8))  # type: ignore[arg-type, var-annotated]
    grouped = {"train_sampling_strategy": "group_by_length", "data_collator": stacked, "train_dataset": data}
    job, _ = dt.hf.job_from(trainer_of(tmp_path, **grouped))
    assert job.source.lengths is not None
    assert job.source.lengths.tolist() == [10] * 8


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **called_back(), eval_delay=3, optim="adafactor")
    with pytest.raises(dt.ConfigError) as raised:
        dt.hf.job_from(trainer)
    assert {problem.key for problem in raised.value.problems} == {"callbacks", "eval_delay", "optim"}


def test_weight_decay_by_another_rule_is_refused(tmp_path: Path) -> None:
    model = gpt2()
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    assert dt.hf.job_from(trainer_of(tmp_path, model))
    with pytest.raises(dt.ConfigError, match="treats scale unlike"):
        dt.hf.job_from(trainer_of(tmp_path, model, weight_decay=0.1))


def test_an_optimizer_of_ones_own_is_refused(tmp_path: Path) -> None:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dt.ConfigError, match="has an optimizer or schedule of its own"):
        dt.hf.job_from(trainer_of(tmp_path, model, optimizers=(optimizer, None)))


def test_a_collator_of_ones_own_is_used(tmp_path: Path) -> None:
    class Tokenizer:
        pad_token, pad_token_id, padding_side = "<pad>", 0, "right"
        is_fast = False
        chat_template = None

        def pad(self, items: Any, **options: Any) -> Any:
            longest = max(len(item["input_ids"]) for item in items)
            rows = [list(item["input_ids"]) + [0] * (longest - len(item["input_ids"])) for item in items]
            return {"input_ids": torch.tensor(rows)}

    collator = transformers.DataCollatorForLanguageModeling(Tokenizer(), mlm=False)
    data = [{"input_ids": each["input_ids"], "text": "left out"} for each in samples()]
    job: Any = dt.hf.job_from(trainer_of(tmp_path, train_dataset=data, data_collator=collator))[0]
    batch = job.collate(data[:3])
    assert batch["labels"].tolist() == batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100).tolist()


def test_every_field_of_the_arguments_is_known_or_refused() -> None:
    """A field that is renamed must not be forgotten in silence."""
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert fields | {"warmup_ratio"} >= OBEYED | WITHOUT_MEANING


def test_fields_that_mean_nothing_here_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, report_to="none", logging_first_step=True, bf16_full_eval=False
    )
    dt.hf.job_from(transformers.Trainer(llama(), arguments, train_dataset=samples()))
    assert "logging_first_step: not used" in "".join(capsys.readouterr())
