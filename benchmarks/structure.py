"""Prints how the source code is built: `python -m benchmarks.structure`.

docs/how-it-works/decisions.md compares these figures before and after a change of structure: how long functions and
classes are, which public class names stand for two things, which docstrings have no subject, how many files there are.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

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
        """Count the lines without the docstring: describing every parameter does not make a function long."""
        first = self.node.body[0]
        has_docstring = ast.get_docstring(self.node, clean=False) is not None
        described = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1 - described

    def __str__(self) -> str:
        return f"{self.node.name} ({self.file}:{self.node.lineno}, {self.num_lines} lines)"


@dataclass(frozen=True)
class Structure:
    """The files of the package, and what they define."""

    files: list[Path]
    runtime: list[Path]  # without what stands on top of the runtime
    functions: list[Definition]
    classes: list[Definition]

    @classmethod
    def of_source(cls) -> Self:
        files = sorted(SOURCE.rglob("*.py"))
        everything = [definition for file in files for definition in definitions(file)]
        return cls(
            files=files,
            runtime=[file for file in files if file.relative_to(SOURCE).parts[0] not in APART],
            functions=[each for each in everything if not isinstance(each.node, ast.ClassDef)],
            classes=[each for each in everything if isinstance(each.node, ast.ClassDef)],
        )

    @property
    def longest_function(self) -> Definition:
        return max(self.functions, key=lambda each: each.num_lines)

    @property
    def longest_class(self) -> Definition:
        return max(self.classes, key=lambda each: each.num_lines)

    @property
    def defined_twice(self) -> list[str]:
        """Return the names of public classes that stand in several files."""
        found = defaultdict(set)
        for each in self.classes:
            if not each.node.name.startswith("_"):
                found[each.node.name].add(each.file)
        return sorted(name for name, where in found.items() if len(where) > 1)


def main() -> None:
    found = Structure.of_source()
    print(f"files without {', '.join(APART)}: {len(found.runtime)} of {len(found.files)}")
    print(f"longest function: {found.longest_function}")
    print(f"longest class: {found.longest_class}")
    print(f"public class names defined twice: {len(found.defined_twice)}: {', '.join(found.defined_twice)}")
    bare = list(without_subject(found.files))
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


def without_subject(files: list[Path]) -> Iterator[str]:
    """Yield the place and the beginning of each docstring that starts with a bare preposition."""
    for file in files:
        for node in statements(file):
            if isinstance(node, Defined | ast.Module):
                text = ast.get_docstring(node) or ""
                if NO_SUBJECT.match(text):
                    line = getattr(node, "lineno", 1)
                    yield f"{file.relative_to(SOURCE.parents[1])}:{line}: {text.splitlines()[0][:100]}"


if __name__ == "__main__":
    main()
