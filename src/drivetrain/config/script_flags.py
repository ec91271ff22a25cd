"""Which flags a script takes itself, as far as its text tells: argparse and click are given them in so many words."""

import ast
from pathlib import Path


def flags_in(script: Path) -> frozenset[str]:
    """Every text in it that is a flag. Empty where it cannot be read: whoever runs it says why."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return frozenset()
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    found = {part for text in texts if text.startswith("--") for part in text.replace("/", " ").split()}
    return frozenset(found | {f"--no-{flag[2:]}" for flag in found})
