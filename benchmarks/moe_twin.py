"""A transformer with a mixture of experts in every block, beside a dense one of as many active parameters.

Both are `dt.train(job)` with no flags. A token takes two of 16 experts; the dense twin's feed-forward layer is as wide
as the two together, so that both compute as much for a token, the router aside. What the mixture loses against its
twin is what routing, counting and products of uneven size cost. The model FLOP utilization (MFU) counts six FLOP for
each active parameter that is multiplied, and those of attention, against the peak of the data sheet.

A step has half a million tokens, as in training such models: what updating takes is in proportion to all experts,
however few tokens a step has. With 32 rows a step it was a sixteenth of that, and the mixture lost 6.6 points.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.contest import Circumstances, Competitor, Contest, Limit, Measured
from benchmarks.rivals import Pace, Workload, ours
from drivetrain.hardware import detect
from drivetrain.moe import MixtureOfExperts

NAME = "moe-twin"
TOP = 2


@dataclass(frozen=True)
class Sizes:
    """The sizes of both: the real ones, or tiny ones that run anywhere."""

    kinds: int = 32_768
    length: int = 1024
    width: int = 1024
    layers: int = 12
    heads: int = 16
    experts: int = 16
    hidden: int = 1408  # of an expert
    rows: int = 512  # of a step
    num_samples: int = 1024

    def flop_per_token(self) -> float:
        """Count forward and backward: six FLOP of each weight that is multiplied, and attention that looks back."""
        block = 4 * self.width**2 + 3 * self.width * TOP * self.hidden
        weights = self.layers * block + self.kinds * self.width
        return 6.0 * weights + 6.0 * self.layers * self.width * self.length


TINY = Sizes(16, 8, 8, 2, 2, 4, 8, 16, 96)


class Gated(nn.Module):
    """The dense feed-forward layer: what two experts compute, in one."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, up = self.wide(tokens).chunk(2, -1)
        result: Tensor = self.narrow(functional.silu(gate) * up)
        return result


class Block(nn.Module):
    def __init__(self, sizes: Sizes, *, is_mixture: bool) -> None:
        super().__init__()
        width, self.heads = sizes.width, sizes.heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.inner: nn.Module = (
            MixtureOfExperts(width, sizes.experts, sizes.hidden, k=TOP, kind="gated")
            if is_mixture
            else Gated(width, TOP * sizes.hidden)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        parts = self.qkv(self.before(hidden)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(found.transpose(1, 2).reshape(rows, length, width))
        result: Tensor = hidden + self.inner(self.between(hidden))
        return result


class Twin(nn.Module):
    """The transformer, with either kind of feed-forward layer."""

    def __init__(self, sizes: Sizes, *, is_mixture: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(sizes.kinds, sizes.width), nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, is_mixture=is_mixture) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.kinds, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens = batch[0]
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def workload(sizes: Sizes, *, is_mixture: bool) -> Workload:
    def data() -> tuple[Tensor, ...]:
        drawn = torch.Generator().manual_seed(0)
        return (torch.randint(0, sizes.kinds, (sizes.num_samples, sizes.length + 1), generator=drawn),)

    return Workload(
        model=lambda: Twin(sizes, is_mixture=is_mixture),
        loss=loss_of,
        data=data,
        global_batch=sizes.rows,
        pace=Pace(2, 2, 2) if sizes == TINY else Pace(3, 2, 4),
        job_steps=40 if sizes == TINY else 1_250,
    )


def measure(sizes: Sizes, told: Circumstances, *, is_mixture: bool) -> Measured:
    """Train one of the two, and say its MFU; the mixture also says what it has less than its twin."""
    found = ours(workload(sizes, is_mixture=is_mixture))
    seconds = sorted(found.seconds)[len(found.seconds) // 2]
    peak = detect().gpus[0].peaks.get("bf16") if detect().gpus else None
    if peak is None:
        return found
    rate, dense = sizes.rows * sizes.length / seconds, told.known.get("dense") if is_mixture else None
    return dataclasses.replace(found, facts={**found.facts, **utilization(sizes, rate, dense, peak.value)})


def utilization(sizes: Sizes, rate: float, dense: float | None, peak_tflops: float) -> dict[str, float]:
    """Return the MFU at so many tokens per second, and how many points it is below that of a rate of the dense twin."""
    percent = 100 * sizes.flop_per_token() * 1e-12 / peak_tflops
    lost = {} if dense is None else {"mfu_points_lost": round(percent * (dense - rate), 2)}
    return {"mfu_percent": round(percent * rate, 2), **lost}


def contest(name: str = NAME, smoke: bool = False) -> Contest:
    sizes = TINY if smoke else Sizes()
    return Contest(
        name=name,
        module=__name__,
        workload={**dataclasses.asdict(sizes), "top": TOP, "data": "random"},
        unit="tokens/s",
        units_per_step=sizes.rows * sizes.length,
        competitors=(
            Competitor(
                "dense", f"dense: one layer as wide as {TOP} experts; dt.train(job) with no flags",
                lambda told: measure(sizes, told, is_mixture=False), cap_seconds=200, alone=True,
            ),
            Competitor(
                "ours", f"a mixture: {sizes.experts} experts, top {TOP}; dt.train(job) with no flags",
                lambda told: measure(sizes, told, is_mixture=True), cap_seconds=240, alone=True,
            ),
        ),
        order=("dense", "ours", "dense", "ours"),
        limits=(Limit("points of MFU that the mixture loses", "mfu_points_lost", 5.0),),
    )  # fmt: skip
