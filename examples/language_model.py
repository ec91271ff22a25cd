"""Train a small language model on the characters of a text. Needs the extra `hf`.

python examples/language_model.py                    # on a text that the script makes
python examples/language_model.py --text book.txt
"""

import argparse
from pathlib import Path

from transformers import LlamaConfig

import drivetrain as dt

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, help="a text file (default: times tables)")
given = parser.parse_args()

made = "".join(f"{a} times {b} is {a * b}.\n" for a in range(1, 30) for b in range(1, 30))
lines = (given.text.read_text(encoding="utf-8") if given.text else made).splitlines(keepends=True)
samples = [{"input_ids": list(line.encode())[:256]} for line in lines if line.strip()]  # one token for each byte

config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    pad_token_id=0,
    eos_token_id=10,
)
job = dt.hf.job(
    config,
    samples[: -len(samples) // 10],
    name="language-model",
    valid=samples[-len(samples) // 10 :],
    lr=1e-3,
    global_batch=32,
    epochs=4,
    ema=0.99,
)

if __name__ == "__main__":
    result = dt.train(job)
    print(f"validation loss per token {result.metrics['valid_loss']:.3f}, best {result.best.value:.3f}")
