"""A network that answers questions about an image: two encoders, cross-attention, a head per kind of answer."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.recipes.chest_xray_data import FINDINGS, HEADS

PADDING, UNKNOWN = 0, 1  # the first two rows of the embedding
IMAGE_BLIND, QUESTION_BLIND = "image-blind", "question-blind"


def at_least_float32(tensor: Any) -> torch.dtype:
    """Return float32, or float64 for a tensor of that type: `drivetrain prove` compares in float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


class XrayVQA(nn.Module):
    """Answers by every head at once: a dictionary of logits. The loss picks the head of the question.

    CheXpert labels are scored at every place of the image, and the best place counts. Questions see these scores, too.

    Args:
        backbone: What makes features of the image.
        num_words: Rows of the embedding of words.
        length: Words of a question.
        width: Of everything behind the encoders.
        num_layers: Of the question encoder and of the cross-attention, each.
        blind: A baseline that does not see the image, or the question.
    """

    def __init__(
        self, backbone: "Backbone", num_words: int, length: int, width: int, num_layers: int, blind: str | None = None
    ) -> None:
        super().__init__()
        self.blind = blind
        self.backbone = backbone.make()
        self.project = nn.Linear(backbone.width, width)
        self.places = nn.Parameter(torch.randn(backbone.num_places, width))
        self.findings = nn.Parameter(torch.randn(len(FINDINGS), width))  # what evidence of each adds to a place
        self.embed = nn.Embedding(num_words, width, padding_idx=PADDING)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.read = nn.ModuleList(Attention(width) for _ in range(num_layers))
        self.look = nn.ModuleList(Attention(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleDict({name: nn.Linear(width, len(answers)) for name, answers in HEADS.items()})
        self.chexpert = nn.Linear(backbone.width, len(FINDINGS))

    def forward(self, image: Tensor, words: Tensor) -> dict[str, Tensor]:
        if self.blind == IMAGE_BLIND:
            image = torch.zeros_like(image)
        elif self.blind == QUESTION_BLIND:
            words = torch.full_like(words, UNKNOWN)
        seen = self.backbone(image)
        evidence = self.chexpert(seen)  # of each finding at each place
        is_word = words != PADDING
        asked = self.embed(words) + self.positions
        for layer in self.read:
            asked = layer(asked, asked, is_word)
        visual = self.project(seen) + evidence.sigmoid() @ self.findings + self.places
        for layer in self.look:
            asked = layer(asked, visual)
        mask = is_word.unsqueeze(-1)
        pooled = self.norm((asked * mask).sum(1) / mask.sum(1).clamp(min=1))
        answers = {name: head(pooled) for name, head in self.heads.items()}
        return {**answers, "chexpert": evidence.amax(1)}


class Attention(nn.Module):
    """Attention with a residual connection, then a feed-forward layer: queries look at `others`."""

    def __init__(self, width: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key_value, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.norm, self.norm_others, self.norm_after = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, own: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
        query, (key, value) = self.query(self.norm(own)), self.key_value(self.norm_others(others)).chunk(2, dim=-1)
        query, key, value = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (query, key, value))
        keep = None if mask is None else mask[:, None, None, :]
        found = functional.scaled_dot_product_attention(query, key, value, keep)
        own = own + self.out(found.transpose(1, 2).flatten(2))
        after: Tensor = own + self.feed(self.norm_after(own))
        return after


class SmallCNN(nn.Module):
    """Convolutions that halve the image three times; features of (places, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        channels = (1, width // 4, width // 2, width)
        self.layers = nn.ModuleList(nn.Conv2d(before, after, 3, 2, 1) for before, after in pairwise(channels))
        for name, weight in self.named_parameters():
            if name.endswith("weight"):
                nn.init.kaiming_normal_(weight, nonlinearity="relu")

    def forward(self, image: Tensor) -> Tensor:
        features = (
            image.to(at_least_float32(self.layers[0].weight)) / 64 - 1
        )  # no normalization behind it: how bright a finding is tells its severity
        for layer in self.layers:
            features = functional.gelu(layer(features))
        return features.flatten(2).transpose(1, 2)


class HuggingFaceEncoder(nn.Module):
    """A vision model of transformers as the backbone; its features keep their places."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, folder: Path, mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
        super().__init__()
        from transformers import AutoModel

        model = AutoModel.from_pretrained(folder, local_files_only=True)
        self.model = getattr(model, "vision_model", model)  # of models for images and text, the half for images
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation).view(1, -1, 1, 1), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        pixels = (image.float() / 255 - self.mean) / self.deviation  # one gray channel becomes as many as these have
        hidden: Tensor = self.model(pixel_values=pixels).last_hidden_state
        return hidden if hidden.dim() == 3 else hidden.flatten(2).transpose(1, 2)


@dataclass(frozen=True)
class Backbone:
    """Makes features of images: a small network of this recipe, or a Hugging Face folder. Both are trained."""

    image: int  # pixels across
    width: int  # of the features
    num_places: int  # that get a position of their own; 1 where the backbone knows them
    folder: Path | None = None
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)

    def make(self) -> nn.Module:
        if self.folder is None:
            return SmallCNN(self.width)
        return HuggingFaceEncoder(self.folder, self.mean, self.deviation)


def find_backbone(folder: Path | None, image: int, width: int) -> Backbone:
    """Returns the small network for images of this size, or what the folder of Hugging Face's holds."""
    if folder is None:
        return Backbone(image, width, ((image + 7) // 8) ** 2)
    if not (folder / "config.json").is_file():
        allowed = "a local folder of Hugging Face's, with config.json and weights"
        raise ConfigError([Problem("--backbone", f"{folder} is none", str(folder), allowed=allowed)])
    try:
        from transformers import AutoConfig
    except ImportError:
        raise DrivetrainError(
            "--backbone names a folder of Hugging Face's, and transformers is not installed",
            remedy="pip install 'drivetrain[hf]'",
        ) from None
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config = getattr(config, "vision_config", config)
    found = folder / "preprocessor_config.json"
    said = json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {}
    half = (0.5, 0.5, 0.5)
    return Backbone(
        getattr(config, "image_size", None) or image,
        getattr(config, "hidden_size", None) or config.hidden_sizes[-1],
        1,
        folder,
        tuple(said.get("image_mean") or half),
        tuple(said.get("image_std") or half),
    )
