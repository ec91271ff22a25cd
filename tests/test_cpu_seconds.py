"""The table of CPU seconds: what takes long is written, read, and known by its file."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import cpu_seconds, warm_python


def test_what_takes_long_is_kept_until_it_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "tests" / "cpu_seconds.txt"
    table.parent.mkdir()
    (tmp_path / "tests" / "test_here.py").touch()
    known = ["9.0 tests/test_here.py::test_old", "3.0 tests/test_here.py::test_other", "2.0 tests/test_gone.py::test"]
    table.write_text("\n".join(known))
    monkeypatch.setattr(cpu_seconds, "FILE", table)
    cpu_seconds.write({"tests/test_here.py::test_old": [0.5, 0.1], "tests/test_here.py::test_short": [0.1, 0.1]})
    assert cpu_seconds.known() == {"tests/test_here.py::test_old": 0.6, "tests/test_here.py::test_other": 3.0}
    assert cpu_seconds.by_file(cpu_seconds.known()) == {"tests/test_here.py": pytest.approx(3.6)}
    assert cpu_seconds.function_of("tests/test_here.py::test_old[a::b]") == "tests/test_here.py::test_old"


def test_the_time_of_children_that_have_ended_is_counted() -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass"
    before, own = cpu_seconds.process_tree_seconds(), time.process_time()
    subprocess.run([sys.executable, "-c", code], check=True)
    took = cpu_seconds.process_tree_seconds() - before
    assert took - (time.process_time() - own) > 0.25


def test_the_server_of_warm_processes_is_there_before_anything_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(warm_python, "run", lambda words: done.append("server"))
    monkeypatch.setattr(cpu_seconds, "process_tree_seconds", lambda: done.append("count") or 0.0)
    cpu_seconds.Measuring().pytest_collection_finish()
    assert done == ["count", "server", "count"]


def test_tests_that_share_what_takes_long_to_make_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def item(name: str, **scopes: str) -> Any:
        fixtures = {
            fixture: [SimpleNamespace(baseid="" if fixture == "pool" else "test_page.py", scope=scope)]
            for fixture, scope in scopes.items()
        }
        return cast(Any, Item(f"test_page.py::{name}", SimpleNamespace(name2fixturedefs=fixtures)))

    monkeypatch.setattr(cpu_seconds, "known", lambda: {"test_page.py::test_first": 3.0})
    items = [
        item("test_first", site="module", own="function", pool="module"),
        item("test_second[a]", site="module"),
        item("test_alone", own="function"),
        item("test_of_the_pool", pool="module"),
    ]
    assert cpu_seconds.that_take_long(items) == set(items[:2])


@dataclass(frozen=True, eq=False)
class Item:
    nodeid: str
    _fixtureinfo: Any
