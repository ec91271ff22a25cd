"""LoRA on a Llama of 0.4 B, samples of 128 to 1,024 tokens: the model and the way of ours are those of the LoRA race.

By hand, a batch is padded to its longest sample; ours is a job of `dt.hf.job` with no flags, which packs samples.
"""

import dataclasses
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import lora_race
from benchmarks.contest import Competitor
from benchmarks.rivals import Pace, Workload
from benchmarks.zoo.bert import trimmed

WORDS = "LoRA of rank 16 on all matrices of a Llama of 0.4 billion weights, samples of 128 to 1,024 tokens"
NEEDS = ("transformers", "peft")
PACE = Pace(20, 8, 5)


def sizes(smoke: bool) -> lora_race.Race:
    return lora_race.TINY if smoke else dataclasses.replace(lora_race.Race(), num_steps=100)


def ours(smoke: bool) -> Competitor:
    return Competitor(
        "ours",
        "dt.train(dt.hf.job(model, samples)) with no flags",
        partial(lora_race.ours, sizes(smoke), {}),
        cap_seconds=180,
        alone=True,
        needs=NEEDS,
    )


def workload(smoke: bool) -> Workload:
    race = sizes(smoke)

    def data() -> tuple[Tensor, ...]:
        rows = [torch.tensor(sample["input_ids"]) for sample in race.samples()]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        tokens, lengths = batch
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        found: Tensor = model(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(~mask, -100)).loss
        return found

    return Workload(
        model=race.model,
        loss=loss,
        data=data,
        collate=trimmed,
        loader={} if smoke else {"num_workers": 4, "pin_memory": True, "persistent_workers": True},
        global_batch=lora_race.GLOBAL_BATCH,
        pace=Pace(2, 2, 2) if smoke else PACE,
        learning_rate=2e-4,
        job_steps=race.job_steps,
    )
