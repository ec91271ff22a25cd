"""LoRA on a Llama of 0.4 B, samples of 128 to 1,024 tokens: ours with no flags, against the Trainer of transformers.

What counts is tokens of samples; padding does not. Rates are over the steps after the first 40; how long the first step
and the first 40 take is told beside, from the call of `dt.train` or `trainer.train()` on, planning and compiling
included. All train with a global batch of 16 samples on one device. Weights are drawn; nothing is downloaded.
"""

import dataclasses
import tempfile
import time
from functools import partial
from typing import Any

import numpy as np
import torch

import drivetrain as dt
from benchmarks.contest import Aim, Circumstances, Competitor, Contest, Limit, Measured
from benchmarks.rivals import plan_facts, step_seconds, the_device, wait

SEED, GLOBAL_BATCH, WARM_STEPS = 0, 16, 40
NAME = "lora-race"


@dataclasses.dataclass(frozen=True)
class Race:
    """The sizes: the real ones, or tiny ones that run anywhere."""

    num_samples: int = 4096
    shortest: int = 128
    longest: int = 1024
    num_steps: int = 120
    warm_steps: int = WARM_STEPS
    job_steps: int = 2000  # that the job has; the race ends after `num_steps`
    vocabulary: int = 32000
    hidden: int = 1024
    intermediate: int = 4096
    layers: int = 24
    heads: int = 16
    rank: int = 16

    def lengths(self) -> Any:
        return np.random.default_rng(SEED).integers(self.shortest, self.longest + 1, self.num_samples)

    def samples(self) -> list[dict[str, list[int]]]:
        drawn = np.random.default_rng(SEED + 1)
        return [{"input_ids": drawn.integers(3, self.vocabulary, length).tolist()} for length in self.lengths()]

    def model(self) -> Any:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(SEED)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
        lora = LoraConfig(
            r=self.rank, lora_alpha=2 * self.rank, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        return get_peft_model(LlamaForCausalLM(config), lora)


TINY = Race(96, 8, 64, 8, 4, 8, 64, 16, 32, 2, 2, 2)


def ours(race: Race, options: dict[str, Any], told: Circumstances) -> Measured:
    """Train by `dt.train(dt.hf.job(…))`; `options` go to the job."""
    model, data = race.model(), race.samples()
    with tempfile.TemporaryDirectory() as folder:
        job = dt.hf.job(
            model,
            data,
            name="race",
            max_steps=race.job_steps,
            global_batch=GLOBAL_BATCH,
            seed=SEED,
            hooks=[dt.every(race.num_steps, lambda context: dt.Verdict(stop=True))],
            **options,
        )
        began = time.time()
        result = dt.train(job, dt.configure(output_dir=folder, report=False))
        whole = time.time() - began
        steps = step_seconds(result.folder)
        facts = plan_facts(result.folder, began)
    stream: Any = job.source.order(GLOBAL_BATCH, SEED, shuffle=True)
    per_epoch = -(-race.num_samples // GLOBAL_BATCH)
    tokens = []
    for step in range(race.num_steps):
        epoch, number = divmod(step, per_epoch)
        start = number * GLOBAL_BATCH
        chosen = stream.samples(epoch, start, min(start + GLOBAL_BATCH, race.num_samples))
        tokens.append(int(race.lengths()[chosen].sum()))
    moments = facts["seconds_until_start"] + np.cumsum(steps)
    return _measured(race, moments, tokens, {**facts, "rows": list(job.source.notes), "whole_seconds": whole})


def trainer(race: Race, flags: dict[str, Any], told: Circumstances) -> Measured:
    """Train by `Trainer(…).train()` with these flags; batches are padded to their longest sample."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    device, moments, tokens = the_device(), list[float](), list[int]()

    def collate(items: list[Any]) -> dict[str, torch.Tensor]:
        rows = [torch.tensor(item["input_ids"]) for item in items]
        tokens.append(sum(map(len, rows)))
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Waits for the device at the three moments that are told, and at no other."""

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step in (1, race.warm_steps, race.num_steps):
                wait(device)
            moments.append(time.perf_counter() - began)

    named = {field.name for field in dataclasses.fields(TrainingArguments)}
    grouped = {"train_sampling_strategy": "group_by_length"}
    if flags.get("train_sampling_strategy") and "train_sampling_strategy" not in named:  # as older ones call it
        flags = {name: value for name, value in flags.items() if name not in grouped} | {"group_by_length": True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=race.num_steps,
            per_device_train_batch_size=GLOBAL_BATCH,
            learning_rate=2e-4,
            seed=SEED,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **flags,
        )
        made = Trainer(race.model(), arguments, train_dataset=race.samples(), data_collator=collate)
        made.add_callback(Clock())
        began = time.perf_counter()
        made.train()
        whole = time.perf_counter() - began
    return _measured(race, np.array(moments), tokens, {"whole_seconds": whole})


def _measured(race: Race, moments: Any, tokens: list[int], facts: dict[str, Any]) -> Measured:
    """Return the seconds per step of the average number of tokens, and what the beginning took."""
    seconds = float(moments[race.num_steps - 1] - moments[race.warm_steps - 1])
    counted = sum(tokens[race.warm_steps : race.num_steps])
    told = {
        "first_step_seconds": round(float(moments[0]), 2),
        f"seconds_until_{race.warm_steps}_steps": round(float(moments[race.warm_steps - 1]), 2),
        "tokens_per_second": round(counted / seconds),
        **{name: round(value, 2) if isinstance(value, float) else value for name, value in facts.items()},
    }
    if torch.cuda.is_available():
        told["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return Measured([seconds * _tokens_per_step(race) / counted], told)


def _tokens_per_step(race: Race) -> float:
    return float(race.lengths().mean() * GLOBAL_BATCH)


BEST_FLAGS = {"bf16": True, "torch_compile": True, "train_sampling_strategy": "group_by_length"}


def contest(name: str = NAME, smoke: bool = False) -> Contest:
    race = TINY if smoke else Race()
    best: dict[str, Any] = {**BEST_FLAGS, **({"torch_compile": False, "use_cpu": True} if smoke else {})}
    needs = ("transformers", "peft", "accelerate")
    rival = {"needs": needs, "cap_seconds": 340.0, "alone": True}
    mine: dict[str, Any] = {"needs": needs[:2], "cap_seconds": 240.0, "alone": True}
    return Contest(
        name=name,
        module=__name__,
        workload={**dataclasses.asdict(race), "global_batch": GLOBAL_BATCH},
        unit="tokens/s",
        units_per_step=_tokens_per_step(race),
        competitors=(
            Competitor("ours", "dt.train(dt.hf.job(model, samples)) with no flags", partial(ours, race, {}), **mine),
            Competitor(
                "ours-grouped", "the same with group_by_length=True", partial(ours, race, {"group_by_length": True}),
                **mine,
            ),
            Competitor(
                "ours-padded", "the same with packing=False", partial(ours, race, {"packing": False}), **mine
            ),
            Competitor(
                "trainer-best",
                "transformers.Trainer, bf16=True, torch_compile=True, train_sampling_strategy='group_by_length'",
                # It compiles for six minutes: for the first length, for any length, and once more.
                partial(trainer, race, best), **{**rival, "cap_seconds": 560.0},  # type: ignore[arg-type]
            ),
            Competitor(
                "trainer-eager",
                "transformers.Trainer, bf16=True, train_sampling_strategy='group_by_length', not compiled",
                partial(trainer, race, {**best, "torch_compile": False}), **rival,  # type: ignore[arg-type]
            ),
            Competitor(
                "trainer-defaults",
                "transformers.Trainer, defaults",
                partial(trainer, race, {"use_cpu": True} if smoke else {}), **rival,  # type: ignore[arg-type]
            ),
        ),
        order=("ours", "trainer-defaults", "trainer-eager", "trainer-best", "ours-grouped"),
        aims=(
            Aim("the Trainer with its best flags", ("trainer-eager", "trainer-best"), 1.0),
            Aim("the Trainer with its defaults", ("trainer-defaults",), 2.0),
        ),
        limits=(Limit("seconds until the first step is done", "first_step_seconds", 60.0),),
    )  # fmt: skip
