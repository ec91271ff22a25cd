"""Other trainers under `drivetrain prove`: small jobs, each trainer driven as its own documentation shows.

`python -m benchmarks prove-trainers [--only accelerate,hf]` runs every trainer in a process of its own and keeps the
verdicts; `python -m benchmarks.prove_trainers NAME` runs one and prints them. What it found is on
docs/benchmarks/prove-trainers.md; `benchmarks/prove_trainers_by_hand.py` shows the same without the prover.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import torch
from tests.proving.jobs import Sentences, mlp, token_job, vector_job, vectors
from torch import Tensor, nn

from drivetrain import Job
from drivetrain.proving import Extent, Subject, prove_subject
from drivetrain.proving.adapters import (
    accelerate_subject,
    deepspeed_subject,
    hf_subject,
    lightning_subject,
    plain_subject,
)

SUBJECTS: dict[str, Callable[[], Subject]] = {
    "plain": plain_subject,
    "accelerate": accelerate_subject,
    "accelerate-options": partial(accelerate_subject, use_seedable_sampler=True, split_batches=True),
    "lightning": lightning_subject,
    "hf": hf_subject,
    "deepspeed": deepspeed_subject,
}
PACKAGES = ("torch", "accelerate", "lightning", "transformers", "deepspeed")
PATIENT = Extent(time_limit_seconds=300.0, budget_seconds=1e6)  # no batch is cut because a machine is slow
DIVISIONS = replace(PATIENT, num_steps=8, repeats=False, only=("micro-batches", "processes"))
TWO = replace(PATIENT, num_steps=12, divisions=False)
ONE = replace(PATIENT, num_steps=12, divisions=False, max_world=1)


class Padded(Sentences):
    """The same sentences as inputs of a transformers model, which shifts labels itself."""

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens, length = self.tokens[number], int(self.lengths[number]) + 1
        is_text = torch.arange(len(tokens)) < length
        return {
            "input_ids": tokens,
            "attention_mask": is_text.long(),
            "labels": torch.where(is_text, tokens, -100),
        }


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=13, max_position_embeddings=16, **sizes))
    return model


def library_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def jobs() -> dict[str, tuple[Job, Sequence[Extent]]]:
    """Return the jobs by name, each with what is tried of it. A step has 8 samples."""
    llama = partial(token_job, global_batch=8, model=tiny_llama, data=Padded(), loss=library_loss)
    return {
        "mean over valid tokens": (token_job(global_batch=8), (DIVISIONS,)),
        "transformers model with its own loss": (llama(name="llama"), (DIVISIONS,)),
        "mean over samples, 45 samples": (vector_job(global_batch=8, data=vectors(45)), (DIVISIONS,)),
        "dropout, 48 samples": (
            vector_job(name="dropout", global_batch=8, data=vectors(48), model=partial(mlp, 0.3)),
            (TWO, ONE),
        ),
    }


def run_one(name: str) -> dict[str, Any]:
    """Prove one trainer on every job, in this process."""
    import transformers

    transformers.LlamaForCausalLM  # noqa: B018  (loaded before processes are forked)
    subject = SUBJECTS[name]()
    found: dict[str, Any] = {}
    for words, (job, extents) in jobs().items():
        checks = []
        for extent in extents:
            certificate = prove_subject(job, subject, extent, lambda text: print(f"  {text}", file=sys.stderr))
            checks += [
                {
                    "configuration": check.configuration,
                    "what": check.what,
                    "status": check.status,
                    "verdict": str(check.verdict) if check.verdict else "",
                    "error": check.error,
                    "detail": check.detail.splitlines()[0] if check.detail else "",
                }
                for check in certificate.checks
            ]
        found[words] = {"ok": all(check["status"] in ("ok", "skipped") for check in checks), "checks": checks}
    return {"name": subject.name, "jobs": found}


def measure(only: Sequence[str], previous: dict[str, Any]) -> dict[str, Any]:
    """Return the trainers' verdicts, each from a separate process; those not asked for as they were kept."""
    found = dict(previous)
    for name in only or SUBJECTS:
        print(f"{name}:", flush=True)
        began = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-m", "benchmarks.prove_trainers", name]
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(ended.stdout.splitlines()[-1])
        found[name]["seconds"] = round(time.monotonic() - began, 1)
        for words, outcome in found[name]["jobs"].items():
            print(f"  {words}: {'proven' if outcome['ok'] else 'differs'}")
            for check in outcome["checks"]:
                if check["verdict"]:
                    print(f"    {check['configuration']}, {check['what']}: {check['verdict']}")
    return found


def versions() -> dict[str, str | None]:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {package: version(package) for package in PACKAGES}


if __name__ == "__main__":
    print(json.dumps(run_one(sys.argv[1])))
