"""Times tables as byte tokens and the configuration of a small Llama, shared by the scripts that train a model."""

from transformers import LlamaConfig

_lines = [f"{a} times {b} is {a * b}.\n" for a in range(1, 24) for b in range(1, 24)]
_samples = [{"input_ids": list(line.encode())} for line in _lines]
train_set, valid_set = _samples[:-49], _samples[-49:]
config = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=10,
)
