"""Prints how the source code is built: `python -m benchmarks.structure`.

docs/how-it-works/decisions.md compares these figures before and after a change of structure: how long functions and
classes are, which public class names stand for two things, which docstrings have no subject, how many files there are.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "drivetrain"
APART = ("recipes", "hf", "multi_gpu")  # not counted among the files of the runtime
NO_SUBJECT = re.compile(
    r"(Of|For|With|Without|In|On|At|From|By|As|After|Before|Between|Behind|Below|Beside|Under|Until|Instead|Into)\b"
)
Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Definition(NamedTuple):
    file: str
    node: Defined

    @property
    def num_lines(self) -> int:
        """The lines without the docstring: describing every parameter does not make a function long."""
        first = self.node.body[0]
        has_docstring = ast.get_docstring(self.node, clean=False) is not None
        described = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1 - described

    def __str__(self) -> str:
        return f"{self.node.name} ({self.file}:{self.node.lineno}, {self.num_lines} lines)"


def main() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    everything = [definition for file in files for definition in definitions(file)]
    functions = [each for each in everything if not isinstance(each.node, ast.ClassDef)]
    classes = [each for each in everything if isinstance(each.node, ast.ClassDef)]
    runtime = [file for file in files if file.relative_to(SOURCE).parts[0] not in APART]
    print(f"files without {', '.join(APART)}: {len(runtime)} of {len(files)}")
    print(f"longest function: {max(functions, key=lambda each: each.num_lines)}")
    print(f"longest class: {max(classes, key=lambda each: each.num_lines)}")
    twice = defined_twice(classes)
    print(f"public class names defined twice: {len(twice)}: {', '.join(sorted(twice))}")
    bare = list(without_subject(files))
    print(f"docstrings without a subject: {len(bare)}")
    if "--list" in sys.argv[1:]:
        print("\n".join(bare))


def definitions(file: Path) -> Iterator[Definition]:
    name = str(file.relative_to(SOURCE))
    for node in statements(file):
        if isinstance(node, Defined):
            yield Definition(name, node)


def statements(file: Path) -> Iterator[ast.AST]:
    """Yield the module and what it consists of, without expressions: nine nodes of ten, which define nothing."""
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    for node in waiting:  # it grows
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]


def defined_twice(classes: list[Definition]) -> set[str]:
    found = defaultdict(set)
    for each in classes:
        if not each.node.name.startswith("_"):
            found[each.node.name].add(each.file)
    return {name for name, where in found.items() if len(where) > 1}


def without_subject(files: list[Path]) -> Iterator[str]:
    """Yield the place and the beginning of each docstring that starts with a bare preposition."""
    for file in files:
        for node in statements(file):
            if isinstance(node, Defined | ast.Module):
                text = ast.get_docstring(node) or ""
                if NO_SUBJECT.match(text):
                    line = getattr(node, "lineno", 1)
                    yield f"{file.relative_to(SOURCE)}:{line}: {text.splitlines()[0][:100]}"


if __name__ == "__main__":
    main()
