"""Made-up text and a GPT with dropout, shared by the scripts of this folder that are measured side by side.

Each word is followed by one of four others, so there is something to learn. The sizes, and whether the scripts set
the flags that their trainer's documentation recommends for speed, come from the variable SIDE_BY_SIDE, as JSON.
"""

import json
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Size:
    """A job: a GPT, its data, and how long it is trained."""

    vocabulary: int
    context: int
    width: int
    depth: int
    batch: int
    num_samples: int
    steps: int
    save_every: int


SIZES = {
    "tiny": Size(vocabulary=16, context=8, width=8, depth=1, batch=4, num_samples=400, steps=400, save_every=1000),
    "small": Size(vocabulary=2048, context=32, width=64, depth=2, batch=8, num_samples=800, steps=240, save_every=60),
    "large": Size(
        vocabulary=8192, context=1024, width=768, depth=12, batch=16, num_samples=480, steps=100, save_every=40
    ),
}
_told = json.loads(os.environ.get("SIDE_BY_SIDE", "{}"))
size = SIZES[_told.get("size", "small")]
max_steps = _told.get("steps", size.steps)
save_every = _told.get("save_every", size.save_every)
batch_size = size.batch
learning_rate = 3e-4 if size.width > 512 else 3e-3
device = "cuda" if torch.cuda.is_available() else "cpu"
is_bf16 = device == "cuda"
is_tuned = _told.get("tuned", False)
is_pinned = is_tuned and device == "cuda"
is_compiled = is_pinned and _told.get("compiled", True)  # slower on a CPU, where it was measured


def _text():
    generator = torch.Generator().manual_seed(0)
    followers = torch.randint(0, size.vocabulary, (size.vocabulary, 4), generator=generator)
    words = [torch.randint(0, size.vocabulary, (size.num_samples,), generator=generator)]
    for _ in range(size.context):
        words.append(followers[words[-1], torch.randint(0, 4, (size.num_samples,), generator=generator)])
    return torch.stack(words, 1)


train_set = TensorDataset(_text())


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        width, heads = size.width, max(1, size.width // 64)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.words, self.places = nn.Embedding(size.vocabulary, width), nn.Embedding(size.context, width)
        self.blocks = nn.TransformerEncoder(layer, size.depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, size.vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.context), persistent=False)

    def forward(self, words):
        hidden = self.words(words) + self.places.weight
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def make_model():
    return Gpt()


def loss_of(model, words):
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
