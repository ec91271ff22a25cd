"""Tokenized samples of unequal length, as lists, for tiny models of transformers."""

from importlib import import_module
from typing import Any

import torch

from tests.api.tiny_transformers import VOCABULARY

NUM_SAMPLES = 12


class Package:
    """Imported when it is used: the two take seconds, in every process that only collects these tests."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks every object of a module for some of these
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


transformers, peft = Package("transformers"), Package("peft")


def tiny_llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0, eos_token_id=2, **sizes
    )


def samples(kind: str = "causal", count: int = NUM_SAMPLES) -> list[dict[str, Any]]:
    """Samples of 2 to 10 tokens. Of labels for tokens, some are -100: a different number in each sample."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(count):
        length = int(torch.randint(2, 11, (), generator=generator))
        tokens = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        masked = int(torch.randint(0, length, (), generator=generator))
        labels: Any = [-100] * masked + tokens[masked:]
        if kind == "tags":
            labels = [label if label < 0 else label % 5 for label in labels]
        if kind == "seq2seq":
            labels = tokens[: length // 2 + 1]
        if kind == "classes":
            labels = index % 3
        made.append({"text": "left out", "input_ids": tokens, "labels": labels})
    return made
