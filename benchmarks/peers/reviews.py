"""Reviews as word tokens and the configuration of a small BERT, shared by the scripts that classify texts."""

import random

import torch
from transformers import BertConfig

_GOOD = ["lovely", "bright", "funny", "moving", "clever", "warm", "splendid", "gripping"]
_BAD = ["dull", "grim", "boring", "clumsy", "flat", "cold", "tedious", "hollow"]
_OTHERS = ["the", "film", "story", "music", "cast", "ending", "script", "scenes", "camera"]
_words = ["[PAD]", "[CLS]", *_GOOD, *_BAD, *_OTHERS]


def _review(number):
    """Write a short review; its label is whether praise outweighs blame."""
    draw = random.Random(number)
    praise, blame = draw.choice([(3, 1), (2, 0), (1, 3), (0, 2)])
    words = draw.choices(_GOOD, k=praise) + draw.choices(_BAD, k=blame) + draw.choices(_OTHERS, k=draw.randint(3, 9))
    draw.shuffle(words)
    return {"input_ids": [1, *map(_words.index, words)], "labels": int(praise > blame)}


_samples = [_review(number) for number in range(800)]
train_set, valid_set = _samples[:640], _samples[640:]
config = BertConfig(
    vocab_size=len(_words),
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=64,
    num_labels=2,
    pad_token_id=0,
)


def pad(samples):
    """Collate as DataCollatorWithPadding does; that one needs a tokenizer."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}
