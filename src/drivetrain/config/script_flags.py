"""Finds the flags that a script takes, as far as its text shows: argparse and click get them as literal strings."""

import ast
from pathlib import Path


def flags_in(script: Path) -> frozenset[str]:
    """Return every string in a script that is a flag. Empty where it cannot be read: running it reports why."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return frozenset()
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    found = {part for text in texts if text.startswith("--") for part in text.replace("/", " ").split()}
    return frozenset(found | {f"--no-{flag[2:]}" for flag in found})
