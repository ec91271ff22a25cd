"""The CPU seconds of tests: those that take long start first, and `make quick` leaves them out.

`make test-seconds` measures them and writes `cpu_seconds.txt` anew: a line for every test function whose cases take
more than `LONG_SECONDS` on average, with the seconds of all of its cases. CPU time, of child processes too, says the
same on a busy machine.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm_python

FILE = Path(__file__).with_name("cpu_seconds.txt")
LONG_SECONDS = 0.2
PROPERTY = "cpu seconds"


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def known() -> dict[str, float]:
    """The seconds of each function that takes long."""
    rows = (line.split(" ", 1) for line in FILE.read_text(encoding="utf-8").splitlines())
    return {name: float(seconds) for seconds, name in rows}


def by_file(seconds: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, value in seconds.items():
        found[name.partition("::")[0]] += value
    return found


def that_take_long(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return those that take long, and those that share a fixture of their file with them."""
    seconds, items = known(), list(items)
    long = {item for item in items if function_of(item.nodeid) in seconds}
    shared = {fixture for item in long for fixture in _shared_fixtures(item)}
    return long | {item for item in items if shared & _shared_fixtures(item)}


def _shared_fixtures(item: pytest.Item) -> set[tuple[str, str]]:
    """Return the fixtures that tests of a file share: the file and the name of each."""
    file = item.nodeid.partition("::")[0]
    found = getattr(item, "_fixtureinfo", None)
    defined = {} if found is None else found.name2fixturedefs
    return {
        (file, name) for name, those in defined.items() if those[-1].baseid == file and those[-1].scope != "function"
    }


def process_tree_seconds() -> float:
    """The CPU time of this process and of all that descend from it, ended ones included."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):  # noqa: PTH208  (hundreds of times faster)
        if not entry.isdigit():
            continue
        try:
            line = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        fields = line.rpartition(") ")[2].split()
        children[int(fields[1])].append(int(entry))
        ticks[int(entry)] = sum(map(int, fields[11:15]))
    total, waiting = 0, [os.getpid()]
    while waiting:
        process = waiting.pop()
        total += ticks.get(process, 0)
        waiting += children[process]
    return total / os.sysconf("SC_CLK_TCK")


class Measuring:
    """The plugin of `--measure-cpu`: in a worker it measures, in the process that started them it writes the file."""

    def __init__(self) -> None:
        self._before = process_tree_seconds()
        self._found: dict[str, list[float]] = defaultdict(list)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        if call.when == "teardown":
            before, self._before = self._before, process_tree_seconds()
            item.user_properties.append((PROPERTY, self._before - before))
        return (yield)

    def pytest_collection_finish(self) -> None:
        warm_python.run(["-c", ""])  # its server imports torch: that is not part of the first test that needs it
        self._before = process_tree_seconds()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY and isinstance(value, float):
                self._found[function_of(report.nodeid)].append(value)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        write(self._found)


def write(found: dict[str, list[float]]) -> None:
    long = {name: sum(cases) for name, cases in found.items() if sum(cases) > LONG_SECONDS * len(cases)}
    there = FILE.parents[1]
    kept = {  # what was not run now, unless its file is gone
        name: seconds
        for name, seconds in known().items()
        if name not in found and (there / name.partition("::")[0]).exists()
    }
    lines = [f"{seconds:.1f} {name}\n" for name, seconds in sorted((kept | long).items())]
    FILE.write_text("".join(lines), encoding="utf-8")
