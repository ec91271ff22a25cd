"""Models of different kinds, all trained right: no check may raise an alarm on any of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from drivetrain import Job, LossSum, WarmupCosine
from drivetrain.moe import MixtureOfExperts

NUM_SAMPLES = 40


def data(*shape: int) -> TensorDataset:
    own = torch.Generator().manual_seed(len(shape) + sum(shape))
    inputs = torch.randn(NUM_SAMPLES, *shape, generator=own)
    return TensorDataset(inputs, torch.randint(0, 3, (NUM_SAMPLES,), generator=own))


def classes(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def job(name: str, model: Callable[[], nn.Module], items: Any, loss: Any = classes, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "name": name,
        "model": model,
        "data": items,
        "loss": loss,
        "optimizer": lambda groups: torch.optim.AdamW(groups, lr=3e-3),
        "global_batch": 8,
        "max_steps": 200,
        "seed": 1,
        "schedule": WarmupCosine(warmup_steps=3, floor=0.1),
    }
    return Job(**{**values, **changes})


def mlp(activation: type[nn.Module] = nn.ReLU, norm: Any = None) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), *([norm] if norm else []), activation(), nn.Linear(16, 3))


def cnn(norm: Callable[[int], nn.Module] | None = None, pool: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        *([norm(6)] if norm else []),
        nn.ReLU(),
        pool or nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, groups=2),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 6, batch_first=True, **options)
        self.head = nn.Linear(12 if options.get("bidirectional") else 6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.rnn(inputs)[0][:, -1])
        return result


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.inputs, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.encoder(self.inputs(inputs)).mean(1))
        return result


class GraphNet(nn.Module):
    """Two rounds of message passing over a graph of its own per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, nodes: Tensor) -> Tensor:
        links = torch.softmax(nodes @ nodes.transpose(1, 2), -1)
        hidden = torch.relu(self.first(links @ nodes))
        hidden = torch.relu(self.second(links @ hidden))
        result: Tensor = self.head(hidden.sum(1))
        return result


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        mean, log_variance = self.encode(inputs).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1)
        rebuilt = (self.decode(drawn) - inputs).square().sum(-1)
        result: Tensor = (rebuilt + divergence).mean()
        return result


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        time = torch.rand(len(inputs), 1, dtype=inputs.dtype)
        noise = torch.randn_like(inputs)
        mixed = (1 - time) * inputs + time * noise
        result: Tensor = (self.net(torch.cat([mixed, time], 1)) - noise).square().mean()
        return result


class Experts(nn.Module):
    """A dense mixture: every expert computes, a gate weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        gates = torch.softmax(self.gate(inputs), -1)
        outputs = torch.stack([expert(inputs) for expert in self.experts], -1)
        return (outputs * gates.unsqueeze(1)).sum(-1)


class Routed(nn.Module):
    """Top-1 routing by the library's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = MixtureOfExperts(8, 4, 16)
        self.inputs, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.mixture(self.inputs(inputs)))
        return result


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.hidden(self.embedding(tokens))) @ self.embedding.weight.T
        return result


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        result: Tensor = self.head(inputs)
        return result


class Fourier(nn.Module):
    """Complex weights between a Fourier transform and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(0.3 * torch.randn(4, 4, dtype=torch.complex64))
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(torch.fft.irfft(torch.fft.rfft(inputs) @ self.spectrum, 6).relu())
        return result


class Siamese(nn.Module):
    """One network, used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        left, right = inputs.chunk(2, -1)
        result: Tensor = self.net(left) - self.net(right)
        return result


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.body(inputs)))
        return result


class Tokens(Dataset[Any]):
    def __init__(self) -> None:
        own = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, 11, (NUM_SAMPLES, 9), generator=own)
        self.lengths = torch.randint(2, 9, (NUM_SAMPLES,), generator=own)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        labels = self.tokens[number].clone()
        labels[self.lengths[number] :] = -100
        return {"input_ids": self.tokens[number], "labels": labels}


class Ragged(Dataset[Any]):
    """Sequences of unequal length, for a collate function that pads."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        own = torch.Generator().manual_seed(number)
        return torch.randint(0, 11, (2 + number % 7,), generator=own)


def padded(items: list[Tensor]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=0)
    labels = nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "labels": labels}


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100)


def token_sum(model: nn.Module, batch: Any) -> LossSum:
    logits, labels = model(batch["input_ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    total = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return LossSum(total, (labels != -100).sum())


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    result: Tensor = model(batch[0])
    return result


def squared(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[0][:, :3])


def summed(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


OWN: dict[str, Callable[[], Job]] = {
    "mlp": lambda: job("mlp", mlp, data(6)),
    "mlp-tanh": lambda: job("mlp-tanh", partial(mlp, nn.Tanh), data(6), clip_norm=0.5),
    "mlp-layer-norm": lambda: job("mlp-layer-norm", lambda: mlp(norm=nn.LayerNorm(16)), data(6), weight_decay=0.1),
    "mlp-rms-norm": lambda: job("mlp-rms-norm", lambda: mlp(norm=nn.RMSNorm(16)), data(6)),
    "mlp-dropout": lambda: job("mlp-dropout", lambda: mlp(norm=nn.Dropout(0.3)), data(6)),
    "mlp-sgd": lambda: job("mlp-sgd", mlp, data(6), optimizer=sgd),
    "mlp-rmsprop": lambda: job("mlp-rmsprop", mlp, data(6), optimizer=lambda g: torch.optim.RMSprop(g, lr=1e-3)),
    "mlp-adagrad": lambda: job("mlp-adagrad", mlp, data(6), optimizer=lambda g: torch.optim.Adagrad(g, lr=1e-2)),
    "mlp-squared": lambda: job("mlp-squared", mlp, data(6), squared),
    "mlp-summed": lambda: job("mlp-summed", mlp, data(6), summed, optimizer=sgd, clip_norm=1.0),
    "mlp-smoothed": lambda: job("mlp-smoothed", mlp, data(6), smoothed),
    "linear": lambda: job("linear", lambda: nn.Linear(6, 3), data(6), optimizer=sgd),
    "residual": lambda: job("residual", Residual, data(6)),
    "siamese": lambda: job("siamese", Siamese, data(6)),
    "frozen": lambda: job("frozen", Frozen, data(6)),
    "cnn": lambda: job("cnn", cnn, data(2, 8, 8)),
    "cnn-group-norm": lambda: job("cnn-group-norm", lambda: cnn(partial(nn.GroupNorm, 2)), data(2, 8, 8)),
    "cnn-instance-norm": lambda: job("cnn-instance-norm", lambda: cnn(nn.InstanceNorm2d), data(2, 8, 8)),
    "cnn-batch-norm": lambda: job("cnn-batch-norm", lambda: cnn(nn.BatchNorm2d), data(2, 8, 8)),
    "cnn-batch-norm-sum": lambda: job("cnn-batch-norm-sum", lambda: cnn(nn.BatchNorm2d), data(2, 8, 8), summed),
    "cnn-average": lambda: job("cnn-average", lambda: cnn(pool=nn.AvgPool2d(2)), data(2, 8, 8)),
    "rnn": lambda: job("rnn", lambda: Recurrent(nn.RNN), data(5, 4)),
    "lstm": lambda: job("lstm", lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2), data(5, 4)),
    "gru": lambda: job("gru", lambda: Recurrent(nn.GRU, bidirectional=True), data(5, 4)),
    "attention": lambda: job("attention", Attention, data(5, 4)),
    "attention-dropout": lambda: job("attention-dropout", lambda: Attention(0.1), data(5, 4)),
    "graph": lambda: job("graph", GraphNet, data(5, 4)),
    "vae": lambda: job("vae", Vae, data(6), own_loss),
    "diffusion": lambda: job("diffusion", Diffusion, data(6), own_loss),
    "experts": lambda: job("experts", Experts, data(6)),
    "fourier": lambda: job("fourier", Fourier, data(6), clip_norm=0.5),
    "routed": lambda: job("routed", Routed, data(6)),
    "tied": lambda: job("tied", Tied, Tokens(), token_mean),
    "counted": lambda: job("counted", Tied, Tokens(), token_sum),
    "ragged": lambda: job("ragged", Tied, Ragged(), token_mean, collate=padded),
}

# Tiny random configurations of different architectures: causal, masked, sequence-to-sequence, classifying.
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1}
T5_SIZES = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
BART_SIZES = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2_SIZES),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**SIZES, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "phi": ("PhiConfig", "PhiForCausalLM", SIZES),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**SIZES, "head_dim": 8, "num_key_value_heads": 1}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES),
    "opt": ("OPTConfig", "OPTForCausalLM", {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", SIZES),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "bert": ("BertConfig", "BertForMaskedLM", SIZES),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**SIZES, "max_position_embeddings": 40}),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 32},
    ),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**SIZES, "embedding_size": 16}),
    "bert-tokens": ("BertConfig", "BertForTokenClassification", {**SIZES, "num_labels": 40}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {**T5_SIZES, "decoder_start_token_id": 0}),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART_SIZES),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", BART_SIZES),
}


class Sentences(Dataset[Any]):
    """Token sequences padded to one length, with a mask, and labels of -100 where there is nothing."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        own = torch.Generator().manual_seed(number)
        tokens = torch.randint(3, 40, (8,), generator=own)
        length = 3 + number % 6
        mask = (torch.arange(8) < length).long()
        return {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.where(mask == 1, tokens, -100)}


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    result: Tensor = model(**batch).loss
    return result


def transformer(name: str) -> Job:
    import transformers

    config_name, model_name, sizes = ARCHITECTURES[name]

    # Resolved here, so that the processes of a proof, which are forked, need not import them again.
    configuration, architecture = getattr(transformers, config_name), getattr(transformers, model_name)

    def make() -> nn.Module:
        made: nn.Module = architecture(configuration(**sizes))
        return made

    return job(name, make, Sentences(), model_loss)
