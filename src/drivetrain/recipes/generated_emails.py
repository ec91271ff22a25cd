"""Generates emails whose label depends on the order of words and on what they are about, with a known ceiling.

The question is: is the *invoice* approved in the end? An email holds two decisions about the invoice and two about
something else, in any order, between other words. The last decision about the invoice is the label. A reader of single
words can only count how many decisions are positive.
"""

import random
from math import comb

POSITIVE, NEGATIVE = ("approve", "accept", "confirm"), ("decline", "reject", "refuse")
ASKED, OTHERS = "invoice", ("contract", "budget", "schedule", "travel")
NUM_ASKED, NUM_OTHERS = 2, 2  # decisions about the invoice, and about something else
NOISE = 0.02  # the part of the labels that is turned around
LABELS = ("declined", "approved")
_SYLLABLES = ("ba", "do", "ki", "lu", "me", "no", "pa", "ri", "so", "tu", "va", "ze")
FILLER = tuple(first + second for first in _SYLLABLES for second in _SYLLABLES)


def generate(count: int, length: int, seed: int) -> list[tuple[str, int]]:
    """Returns emails of `length` words at most (half of it at least), each with its label: 1 is approved."""
    draw = random.Random(seed)
    return [_email(draw, length) for _ in range(count)]


def _email(draw: random.Random, length: int) -> tuple[str, int]:
    about = [ASKED] * NUM_ASKED + [draw.choice(OTHERS)] * NUM_OTHERS
    draw.shuffle(about)
    verdicts = [draw.randrange(2) for _ in about]
    decisions = [
        f"{draw.choice((NEGATIVE, POSITIVE)[verdict])} {thing}" for verdict, thing in zip(verdicts, about, strict=True)
    ]
    num_filler = draw.randint(length // 2, length) - 2 * len(decisions)
    parts = [*decisions, *draw.choices(FILLER, k=max(0, num_filler))]
    places = sorted(draw.sample(range(len(parts)), len(decisions)))  # decisions keep their order among the other words
    others = iter(parts[len(decisions) :])
    words = dict(zip(places, decisions, strict=True))
    text = " ".join(words[place] if place in words else next(others) for place in range(len(parts)))
    label = [verdict for verdict, thing in zip(verdicts, about, strict=True) if thing == ASKED][-1]
    return text, label if draw.random() >= NOISE else 1 - label


def ceiling() -> float:
    """Returns the best accuracy that any reader can reach: all but the labels that were turned around."""
    return 1 - NOISE


def bag_of_words_ceiling() -> float:
    """Returns the best accuracy of a reader who knows how often each word occurs, and nothing of their order.

    Of n decisions, k are positive; the one that counts is any of the n with the same probability.
    """
    total = NUM_ASKED + NUM_OTHERS
    without_noise: float = sum(comb(total, k) / 2.0**total * max(k, total - k) / total for k in range(total + 1))
    return without_noise * (1 - NOISE) + (1 - without_noise) * NOISE
