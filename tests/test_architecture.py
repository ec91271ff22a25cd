"""The layer table, held by a test. A row imports only from rows below it; inside a package imports are acyclic."""

import ast
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from benchmarks.structure import Structure

PACKAGE = Path(__file__).parents[1] / "src" / "drivetrain"

# Rows of the design, lowest first. Packages of one row do not know each other.
LAYERS = (
    ("core",),
    ("hardware", "data", "moe"),
    ("job_checks",),
    ("job",),
    ("config", "plan"),
    ("strategies", "checkpoint", "monitor"),
    ("loop", "report"),
    ("run",),
    ("planning", "launch"),
    ("api", "verify"),
    ("proving",),
    ("recipes", "multi_gpu", "hf"),
    ("commands",),
    ("cli",),
    ("__main__",),
)
ROW = {package: number for number, row in enumerate(LAYERS) for package in row}

# The only places that may load modules late: the root, the command table, plugins and studies; and the processes of
# `verify`, whose parent must stay free of torch (docs/how-it-works/decisions.md); `prove`, which imports what its
# processes did; and what runs the user's script again, which may be a module.
MAY_LOAD_LATE = {
    "__init__.py", "cli.py", "commands/command.py", "commands/in_process.py", "launch/worker.py", "core/plugins.py",
    "proving/processes.py", "verify/child.py", "verify/zygote.py",
}  # fmt: skip


BY_NAME = ("import_module", "__import__", "run_module")  # functions that load a module


@dataclass(frozen=True)
class Import:
    file: str  # relative to the package
    line: int
    target: str  # `drivetrain.hardware.facts`
    is_late: bool  # inside a function, or by name at run time


def imports_of(package: Path) -> Iterator[Import]:
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        for node, is_late in _relevant_nodes(path.read_text(encoding="utf-8")):
            for target in _targets(node, file, package):
                yield Import(file, node.lineno, target, is_late)
            if _loads_by_name(node):
                yield Import(file, node.lineno, "(by name)", True)


@cache  # most files of a tree with a planted import are those of the package
def _relevant_nodes(code: str) -> list[tuple[ast.Import | ast.ImportFrom | ast.Call, bool]]:
    """Imports and calls, and whether each stands inside a function."""
    found: list[tuple[ast.Import | ast.ImportFrom | ast.Call, bool]] = []
    # Imports are statements: expressions, nine nodes of ten, are looked into only where one may load by name.
    skipped = () if any(name in code for name in BY_NAME) else (ast.expr, ast.expr_context)

    def visit(node: ast.AST, is_late: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Call) and _loads_by_name(node)):
            found.append((node, is_late))
        is_late = is_late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, skipped):
                visit(child, is_late)

    visit(ast.parse(code), False)
    return found


@cache  # to ask the disk for each import would take longer than to read all of them
def _modules(package: Path) -> frozenset[tuple[str, ...]]:
    """The packages and modules of a tree, as the parts of their names behind `drivetrain`."""
    paths = (path for path in package.rglob("*") if path.suffix == ".py" or path.is_dir())
    return frozenset({(), *(path.relative_to(package).with_suffix("").parts for path in paths)})


def _targets(node: ast.AST, file: str, package: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "drivetrain")
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = ["drivetrain", *file.split("/")[:-1]]
            base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
        if base.split(".")[0] != "drivetrain":
            return
        for alias in node.names:
            is_module = (*base.split(".")[1:], alias.name) in _modules(package)
            yield f"{base}.{alias.name}" if is_module or base == "drivetrain" else base


def _loads_by_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in BY_NAME


def package_of(file: str) -> str:
    first = file.split("/")[0]
    return first.removesuffix(".py")


def violations(package: Path) -> list[str]:
    """Everything in this tree that breaks the table, in words."""
    found = []
    graph: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        if package_of(file) not in ROW and file != "__init__.py":
            found.append(f"{file}: the package `{package_of(file)}` is not in the layer table")
        if "utils" in path.stem:
            found.append(f"{file}: there is no `utils`; name what it does")
    for entry in imports_of(package):
        where = f"{entry.file}:{entry.line}"
        if entry.is_late and entry.file not in MAY_LOAD_LATE:
            found.append(f"{where}: hidden import of {entry.target}")
        if entry.target == "(by name)" or entry.file == "__init__.py":
            continue  # the root only names what is public, and loads it when asked
        parts = entry.target.split(".")
        if parts[1:] == ["__version__"]:
            continue
        if len(parts) < 2 or parts[1] not in ROW:
            found.append(f"{where}: import through the root ({entry.target}); name the package")
            continue
        here, there = package_of(entry.file), parts[1]
        if here == there:
            graph.setdefault(_module_name(entry.file), set()).add(_existing_module(package, parts))
        elif ROW.get(there, 99) > ROW.get(here, -1):
            found.append(f"{where}: upward import of {there} (row {ROW[there]}) by {here} (row {ROW.get(here)})")
        elif ROW[there] == ROW.get(here):
            found.append(f"{where}: sideways import of {there} by {here} (both row {ROW[there]})")
    found += [f"import cycle inside a package: {' -> '.join(cycle)}" for cycle in _cycles(graph)]
    return found


def _module_name(file: str) -> str:
    return ".".join(["drivetrain", *file.removesuffix(".py").removesuffix("/__init__").split("/")])


def _existing_module(package: Path, parts: list[str]) -> str:
    for end in range(len(parts), 0, -1):
        if tuple(parts[1:end]) in _modules(package):
            return ".".join(parts[:end])
    return parts[0]


def _cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    found: list[list[str]] = []
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
            return
        if module in finished:
            return
        for target in sorted(graph.get(module, ())):
            visit(target, [*path, module])
        finished.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def test_every_import_points_downwards() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "code", "expected"),
    [
        ("core/errors.py", "from drivetrain.config import Config\n", "upward import of config (row 4) by core (row 0)"),
        ("core/errors.py", "import drivetrain.cli\n", "upward import of cli"),
        ("core/errors.py", "from ..commands.check import CheckOptions\n", "upward import of commands"),
        ("plan/rules.py", "from drivetrain.config import Config\n", "sideways import of config by plan (both row 4)"),
        ("api/measuring.py", "import drivetrain.verify.runner\n", "sideways import of verify by api (both row 9)"),
        (
            "commands/check.py",
            "def late():\n    from drivetrain.config import Config\n",
            "hidden import of drivetrain.config",
        ),
        (
            "commands/check.py",
            "import importlib\nimportlib.import_module('drivetrain.cli')\n",
            "hidden import of (by name)",
        ),
        ("commands/check.py", "from drivetrain import detect\n", "import through the root (drivetrain.detect)"),
        ("commands/check.py", "import drivetrain\n", "import through the root (drivetrain)"),
        ("config/schema.py", "from drivetrain.config.resolve import resolve\n", "import cycle inside a package"),
        ("config/schema.py", "if TYPE_CHECKING:\n    from drivetrain.cli import main\n", "upward import of cli"),
        ("attic.py", "", "the package `attic` is not in the layer table"),
        ("config/utils.py", "", "there is no `utils`"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, code: str, expected: str) -> None:
    tree = tmp_path / "drivetrain"
    shutil.copytree(PACKAGE, tree, ignore=shutil.ignore_patterns("__pycache__"))
    path = tree / file
    path.write_text((path.read_text(encoding="utf-8") if path.exists() else "") + "\n" + code, encoding="utf-8")
    found = violations(tree)
    assert any(expected in line for line in found), found


def test_strategies_share_no_code_that_knows_experts() -> None:
    """What all strategies share meets mixtures through `core/hook.py` only."""
    for file in ("strategies/base.py", "strategies/replicated.py"):
        assert not [each.target for each in imports_of(PACKAGE) if each.file == file and ".moe" in each.target]


def test_files_functions_and_classes_stay_few_and_short() -> None:
    found = Structure.of_source()
    assert len(found.runtime) <= 195
    assert found.longest_function.num_lines <= 60, found.longest_function
    assert found.longest_class.num_lines <= 350, found.longest_class
    assert found.defined_twice == []
