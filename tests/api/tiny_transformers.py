"""Tiny random `transformers` models of many architectures, and padded batches for each kind of head."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH, SAMPLES = 31, 10, 24
_SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, **_SMALL}
_GROUPED = {**_DECODER, "num_key_value_heads": 1, "max_position_embeddings": 32}
_ENCODER = {**_DECODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    **_SMALL,
    **_NO_DROPOUT,
}

# Name of the configuration, of the model, what the head learns, and the sizes.
ARCHITECTURES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        "causal",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, **_SMALL}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", "causal", _GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", "causal", _GROUPED),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", "causal", _GROUPED),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", "causal", {**_GROUPED, "head_dim": 8}),
    "phi": ("PhiConfig", "PhiForCausalLM", "causal", {**_DECODER, "max_position_embeddings": 32}),
    "neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        "causal",
        {**_DECODER, "max_position_embeddings": 32, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        "causal",
        {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "word_embed_proj_dim": 16}
        | {"max_position_embeddings": 32, **_SMALL, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        "causal",
        {"hidden_size": 16, "n_layer": 2, "n_head": 2, **_SMALL, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", "causal", _GROUPED),
    "bert": ("BertConfig", "BertForMaskedLM", "masked", _ENCODER),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", "masked", {**_ENCODER, "pad_token_id": 0}),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", "masked", {**_ENCODER, "embedding_size": 16}),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", "masked", {**_ENCODER, "embedding_size": 16}),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        "masked",
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32, **_SMALL}
        | {"dropout": 0.0, "attention_dropout": 0.0},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        "seq2seq",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0, **_SMALL},
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", "seq2seq", _SEQ2SEQ),
    "marian": ("MarianConfig", "MarianMTModel", "seq2seq", _SEQ2SEQ),
    "bert tokens": ("BertConfig", "BertForTokenClassification", "tags", {**_ENCODER, "num_labels": 5}),
    "roberta tokens": ("RobertaConfig", "RobertaForTokenClassification", "tags", {**_ENCODER, "num_labels": 5}),
}
OTHER_HEADS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "bert question answering": ("BertConfig", "BertForQuestionAnswering", "spans", _ENCODER),
    "bert classification": ("BertConfig", "BertForSequenceClassification", "classes", {**_ENCODER, "num_labels": 3}),
    "mixtral with router loss": (
        "MixtralConfig",
        "MixtralForCausalLM",
        "causal",
        {**_GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
        | {"router_aux_loss_coef": 0.1},
    ),
}


def make(name: str) -> Callable[[], nn.Module]:
    """A factory of the model, with eager attention; in float64, which experts' kernels do not have."""

    def factory() -> nn.Module:
        import transformers

        config, model, _, sizes = (ARCHITECTURES | OTHER_HEADS)[name]
        made = getattr(transformers, model)(getattr(transformers, config)(**sizes, attn_implementation="eager"))
        result: nn.Module = made if name.startswith("mixtral") else made.double()
        return result

    return factory


class Padded(Dataset[dict[str, Tensor]]):
    """Token sequences of unequal length, padded at their end, with what a head needs to learn from them."""

    def __init__(self, head: str) -> None:
        generator = torch.Generator().manual_seed(4)
        self.head = head
        self.tokens = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        self.lengths = torch.randint(4, LENGTH + 1, (SAMPLES,), generator=generator)
        self.draws = torch.rand(SAMPLES, LENGTH, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = int(self.lengths[index])
        tokens, mask = self.tokens[index].clone(), torch.zeros(LENGTH, dtype=torch.int64)
        tokens[length:], mask[:length] = 0, 1
        labels = tokens.masked_fill(mask == 0, -100)
        if self.head == "masked":
            labels = labels.masked_fill((self.draws[index] > 0.4) & (torch.arange(LENGTH) > 0), -100)
        if self.head == "tags":
            labels = labels.where(labels < 0, labels % 5)
        item = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        if self.head == "spans":
            del item["labels"]
            item |= {"start_positions": torch.tensor(index % 4), "end_positions": torch.tensor(index % 3 + 1)}
        if self.head == "classes":
            item["labels"] = torch.tensor(index % 3)
        return item


@contextmanager
def _computing_in_float64() -> Iterator[None]:
    """Many models and losses turn to float32 on the way, whatever their weights are: here that means float64."""
    single, narrowed = torch.float32, Tensor.float
    torch.float32, Tensor.float = torch.float64, Tensor.double  # type: ignore[misc, method-assign]
    try:
        yield
    finally:
        torch.float32, Tensor.float = single, narrowed  # type: ignore[misc, method-assign]


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss, as its documentation has it."""
    if next(model.parameters()).dtype is not torch.float64:
        result: Tensor = model(**batch).loss
        return result
    with _computing_in_float64():
        return model(**batch).loss  # type: ignore[no-any-return]


def data_of(name: str) -> Padded:
    return Padded((ARCHITECTURES | OTHER_HEADS)[name][2])
