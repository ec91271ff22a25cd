"""Classifies emails by a bidirectional LSTM: by their words, and the order of these.

`drivetrain train email-sequence` learns from generated emails; `--data mails.csv` from files of your own.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain.api.training import Result, export
from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.schedules import WarmupCosine
from drivetrain.data.files import BadInput, read_table
from drivetrain.job import Job
from drivetrain.recipes.facts import RecipeFacts, facts_of
from drivetrain.recipes.generated_emails import LABELS, bag_of_words_ceiling, ceiling, generate
from drivetrain.recipes.recipe import Recipe

BASELINE = "bag-of-words"
VOCABULARY = "vocabulary.json"
PADDING, UNKNOWN = 0, 1  # the first two rows of the embedding
WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class EmailSize:
    """The sizes of data and model. The small one takes a minute on two cores."""

    num_train: int
    num_valid: int
    length: int  # words that are read of an email
    vocabulary: int
    embedding: int
    hidden: int
    batch: int
    epochs: int


SIZES = {
    "small": EmailSize(4000, 1000, 50, 1000, 48, 48, 64, 5),
    "full": EmailSize(200_000, 10_000, 200, 30_000, 128, 256, 512, 5),
}


def job(config: Config) -> Job:
    size, baseline = SIZES[config.recipe.size], config.recipe.baseline
    if baseline not in (None, BASELINE):
        raise ConfigError([Problem("--baseline", f"email-sequence has no {baseline!r}", baseline, allowed=BASELINE)])
    train, valid, labels = _emails(config, size)
    words = vocabulary_of([text for text, _ in train], size.vocabulary)
    num_cut = sum(len(words_of(text)) > size.length for text, _ in (*train, *valid))
    lines = [f"data: {len(train):,} emails to learn from, {len(valid):,} held out, {len(words):,} words known"]
    if num_cut:
        lines.append(f"data: {num_cut:,} emails are longer than {size.length} words; the rest of each is not read")
    known = {"ceiling": ceiling(), "bag_of_words_ceiling": bag_of_words_ceiling()} if config.data.path is None else {}
    rate = config.optimizer.learning_rate or 5e-3
    batch = min(size.batch, len(train))
    return Job(
        name="email-sequence" if baseline is None else f"email-sequence-{baseline}",
        model=lambda: (BagOfWords if baseline else EmailLSTM)(len(words) + 2, len(labels), size.embedding, size.hidden),
        data=encode(train, words, size.length),
        valid=encode(valid, words, size.length) if valid else None,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        metrics={"accuracy": lambda logits, batch: logits.argmax(1) == batch[1]} if valid else {},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        global_batch=None if config.batch_asked.is_set else batch,
        default_batch=batch,
        epochs=config.budget.epochs or size.epochs,
        max_steps=config.budget.max_steps,
        seed=config.run.seed,
        schedule=WarmupCosine(warmup_steps=20),
        clip_norm=1.0,
        hooks=[RecipeFacts(lines, {VOCABULARY: {"words": words, "labels": labels, "length": size.length}}, **known)],
    )


class EmailLSTM(nn.Module):
    """Reads an email forwards to its last word and backwards to its first, and classifies both states."""

    def __init__(self, num_words: int, num_classes: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_words, embedding, padding_idx=PADDING)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True, bidirectional=True)
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(2 * hidden, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(words))
        forwards, backwards = states.chunk(2, dim=-1)
        last = (words != PADDING).sum(1).sub(1).view(-1, 1, 1).expand(-1, 1, forwards.shape[-1])
        both = torch.cat([forwards.gather(1, last).squeeze(1), backwards[:, 0]], dim=1)
        logits: Tensor = self.out(self.drop(both))
        return logits


class BagOfWords(nn.Module):
    """The baseline: knows how often each word occurs, and nothing of their order."""

    def __init__(self, num_words: int, num_classes: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(num_words, embedding, mode="sum", padding_idx=PADDING)
        self.hidden, self.out = nn.Linear(embedding, hidden), nn.Linear(hidden, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.out(functional.relu(self.hidden(self.embed(words))))
        return logits


Emails = list[tuple[str, int]]


def _emails(config: Config, size: EmailSize) -> tuple[Emails, Emails, tuple[str, ...]]:
    """Returns emails to learn from, held-out ones, and the names of the labels."""
    if config.data.path is None:
        train = generate(size.num_train, size.length, seed=0)
        return train, generate(size.num_valid, size.length, seed=1), LABELS
    labels = config.recipe.labels
    emails = read_emails(config.data.path, config.recipe.text_column, config.recipe.label_column, labels)
    return *split(emails), labels


def read_emails(path: Path, text_column: str, label_column: str, labels: tuple[str, ...]) -> Emails:
    """Reads texts and the numbers of their labels from a table. Rows that cannot be learned from are an error."""
    bad = BadInput()
    found = []
    for row in read_table(path, (text_column, label_column), bad):
        text, label = row[text_column], row[label_column].strip()
        if not text.strip():
            bad.add(path, "the text is empty", line=row.line)
        elif label not in labels:
            bad.add(path, f"the label {label!r} is none of {', '.join(labels)}", line=row.line)
        else:
            found.append((text, labels.index(label)))
    bad.raise_if_any("correct these rows, or remove them; --text-column, --label-column and --labels say what is read")
    return found


def split(emails: Emails) -> tuple[Emails, Emails]:
    """Holds out a tenth of the texts, by their hash: a text that occurs twice is never on both sides."""
    texts = sorted({text for text, _ in emails}, key=lambda text: (crc32(text.encode()), text))
    held_out = set(texts[: max(1, len(texts) // 10)]) if len(texts) > 1 else set()
    return [each for each in emails if each[0] not in held_out], [each for each in emails if each[0] in held_out]


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def vocabulary_of(texts: list[str], most: int) -> list[str]:
    """Returns the `most` frequent words; of equally frequent ones those that come first in the alphabet."""
    counts = Counter(word for text in texts for word in words_of(text))
    return sorted(counts, key=lambda word: (-counts[word], word))[:most]


def encode(emails: Emails, words: list[str], length: int) -> TensorDataset:
    """Returns numbers of words, padded to `length` so that no email depends on its neighbors, and labels."""
    numbers = {word: number for number, word in enumerate(words, start=2)}
    table = torch.full((len(emails), length), PADDING)
    for row, (text, _) in zip(table, emails, strict=True):
        found = torch.tensor([numbers.get(word, UNKNOWN) for word in words_of(text)[:length]])
        row[: len(found)] = found
    return TensorDataset(table, torch.tensor([label for _, label in emails]))


def show(result: Result) -> None:
    """Prints the accuracy on held-out emails beside what can be reached, and exports the weights."""
    facts = facts_of(result.folder)
    export(result)
    if "valid_accuracy" in result.metrics:
        print(f"\n{result.metrics['valid_accuracy']:.1%} of the held-out emails are classified correctly.")
    if "ceiling" in facts:
        print(
            f"At most {facts['ceiling']:.1%} can be: the other labels are noise. Without the order of the words at "
            f"most {facts['bag_of_words_ceiling']:.1%} can (--baseline {BASELINE} trains that)."
        )
    print(f"Weights (model.safetensors) and {VOCABULARY} are in {result.folder}.")


RECIPE = Recipe(
    make=job,
    about="a bidirectional LSTM that classifies emails",
    show=show,
    reads=(
        "data.path",
        "recipe.size",
        "recipe.baseline",
        "recipe.text_column",
        "recipe.label_column",
        "recipe.labels",
    ),
)
