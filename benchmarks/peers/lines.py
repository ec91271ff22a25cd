"""Counts lines of code of the scripts in this folder: `python -m benchmarks.peers.lines`.

Blank lines, comments, docstrings and imports are left out, and so are the modules with data and model, which all
scripts of a task share. Code that stands on several lines counts as these lines: all were formatted by one tool.
"""

import ast
from pathlib import Path

FOLDER = Path(__file__).parent
TASKS = {
    "digits": "image classification",
    "reviews": "text classification",
    "sums": "LoRA fine-tune",
    "tables": "language model, packed",
    "loop": "own loop, validated",
    "gan": "GAN",
    "hooks": "hooks",
    "many": "many GPUs",
}
TRAINERS = {
    "drivetrain": "Drivetrain",
    "hf_trainer": "Hugging Face Trainer",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "plain": "plain PyTorch",
}
CANNOT = {  # what a trainer is not made for
    ("loop", "hf_trainer"): "not possible: the loop is its own",
    ("gan", "hf_trainer"): "not possible: one loss, one optimizer",
}


def lines_of_code(text: str) -> int:
    """Return how many lines have code on them that is no import and no docstring."""
    counted: set[int] = set()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.stmt):
            counted |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = text.splitlines()
    is_code = {number for number, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")}
    return len((counted & is_code) - left_out)


def table() -> str:
    """Return the table of docs/guide/migrate.md."""
    rows = ["| | " + " | ".join(TRAINERS.values()) + " |", "|---" * (1 + len(TRAINERS)) + "|"]
    for task, words in TASKS.items():
        counts = []
        for trainer in TRAINERS:
            path = FOLDER / f"{task}_{trainer}.py"
            missing = CANNOT.get((task, trainer), "not written")
            counts.append(str(lines_of_code(path.read_text(encoding="utf-8"))) if path.exists() else missing)
        rows.append(f"| {words} | " + " | ".join(counts) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
