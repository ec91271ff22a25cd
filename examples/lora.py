"""Fine-tune a language model with LoRA, and write the adapter. Needs the extra `hf`.

python examples/lora.py                          # a small model, made here
python examples/lora.py --model path/to/llama    # a folder that save_pretrained wrote
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import drivetrain as dt

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a local folder")
given = parser.parse_args()

if given.model:
    base = AutoModelForCausalLM.from_pretrained(given.model)
else:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, pad_token_id=0, eos_token_id=10, **size))

model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
samples = [{"input_ids": list(f"{a} plus {b} is {a + b}\n".encode())} for a in range(30) for b in range(30)]

job = dt.hf.job(model, samples[:-90], name="lora", valid=samples[-90:], lr=1e-3, global_batch=32, epochs=2)

if __name__ == "__main__":
    result = dt.train(job)
    dt.hf.export(result, "adapter")  # a folder that peft opens
    print(f"validation loss {result.metrics['valid_loss']:.3f}")
