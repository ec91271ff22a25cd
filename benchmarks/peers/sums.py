"""Sums as byte tokens and a small Llama with a LoRA adapter, shared by the scripts of this folder that fine-tune."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

_samples = [{"input_ids": list(f"{a} plus {b} is {a + b}\n".encode())} for a in range(30) for b in range(30)]
train_set, valid_set = _samples[:-100], _samples[-100:]


def make_model():
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, pad_token_id=0, eos_token_id=10, **size))
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))


def pad(samples):
    """Collate as DataCollatorForLanguageModeling does; that one needs a tokenizer."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
