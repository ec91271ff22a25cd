"""Classify texts with a Hugging Face model, from a configuration: nothing is downloaded. Needs the extra `hf`.

python examples/text_classification.py
"""

import random
import re

from transformers import BertConfig

import drivetrain as dt

GOOD = ["lovely", "bright", "funny", "moving", "clever", "warm", "splendid", "gripping"]
BAD = ["dull", "grim", "boring", "clumsy", "flat", "cold", "tedious", "hollow"]
THINGS = ["the", "film", "story", "music", "cast", "ending", "script", "scenes", "camera"]


def review(number):
    """Write a short review; its label is whether praise outweighs blame."""
    draw = random.Random(number)
    praise, blame = draw.choice([(3, 1), (2, 0), (1, 3), (0, 2)])
    words = draw.choices(GOOD, k=praise) + draw.choices(BAD, k=blame) + draw.choices(THINGS, k=draw.randint(3, 9))
    draw.shuffle(words)
    return {"text": " ".join(words), "label": int(praise > blame)}


vocabulary = {word: number for number, word in enumerate(["[PAD]", "[CLS]", "[UNK]", *GOOD, *BAD, *THINGS])}


def encode(sample):
    words = re.findall(r"\w+", sample["text"].lower())
    return {"input_ids": [1, *(vocabulary.get(word, 2) for word in words)], "labels": sample["label"]}


config = BertConfig(
    vocab_size=len(vocabulary),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    num_labels=2,
    pad_token_id=0,
)
samples = [encode(review(number)) for number in range(1200)]

job = dt.hf.job(
    config,
    samples[:1000],
    task="sequence-classification",
    name="text-classification",
    valid=samples[1000:],
    metrics={"accuracy": lambda output, batch: output.logits.argmax(1) == batch["labels"]},
    lr=1e-3,
    global_batch=32,
    epochs=3,
    best=dt.Aim("valid_accuracy"),
)

if __name__ == "__main__":
    result = dt.train(job)
    dt.hf.export(result, "text-classifier")  # a folder that from_pretrained opens
    print(f"accuracy {result.best.value:.3f}")
