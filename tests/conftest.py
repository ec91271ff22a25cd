"""Shared by every test: a cache folder of its own, and hypothesis profiles."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, here and in every child: the models of the tests are too small for several threads, which
# would only wait for each other where several tests run at a time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import cpu_seconds, warm_python, warm_workers
from tests.gloo_pool import gloo_pool, pool_of_session
from tests.huge_pages import use_huge_pages
from tests.simulated_clock import simulated_clock

__all__ = ["gloo_pool", "pool_of_session", "simulated_clock"]

# Rewriting the asserts of all tests takes longer than importing torch: even where bytecode is not wanted
# (PYTHONDONTWRITEBYTECODE), it is kept here, in `__pycache__`; child processes write none.
sys.dont_write_bytecode = False

# Checkpoints are flushed to disk, and a slow disk takes most of the time of a test: where there is room in memory, the
# tests write there.
IN_MEMORY = Path("/dev/shm")
if IN_MEMORY.is_dir() and os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# Child processes, whatever folder they start in, find the package also where it is not installed.
os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)

# A shell that runs this in the background has it ignore Ctrl-C, and every child too: tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine makes examples slowly; that is no fault of what is tested. `make test` has the same examples each time:
# what fails there was broken by the change, not found by luck. `make soak` looks for new ones.
settings.register_profile(
    "default", max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.load_profile(PROFILE)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("drivetrain")
    group.addoption("--quick", action="store_true", help="leave out what takes long: see tests/cpu_seconds.py")
    group.addoption("--measure-cpu", action="store_true", help="write tests/cpu_seconds.txt anew")
    group.addoption("--warm", action="store_true", help="start the server of tests/warm_python.py at once, not at need")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported and collected, which stays: looking for garbage takes a third of that time
    if config.getoption("--measure-cpu"):
        config.pluginmanager.register(cpu_seconds.Measuring())
    if config.getoption("--warm"):
        warm_python.server_address()
    # Of pytest-xdist, in the process that starts its workers. FRESH_WORKERS=1 starts real ones, to compare.
    if (tx := getattr(config.option, "tx", None)) and warm_workers.may_fork():
        config.option.tx = [warm_workers.specification(config.add_cleanup)] * len(tx)
    if address := getattr(config, "workerinput", {}).get("warm python"):
        warm_python.use_server(address)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers of pytest-xdist share one server of Python processes, unless its time is to be counted for each test."""
    if not node.config.getoption("--measure-cpu"):
        node.workerinput["warm python"] = warm_python.server_address()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Property tests are part of the long runs, too. What takes long comes first: at the end, workers would wait."""
    seconds = cpu_seconds.known()
    by_file = cpu_seconds.by_file(seconds)
    items.sort(key=lambda item: -by_file[item.nodeid.partition("::")[0]])
    if config.getoption("--quick"):
        long = cpu_seconds.that_take_long(items)
        config.hook.pytest_deselected(items=list(long))
        items[:] = [item for item in items if item not in long]
    for item in items:
        if PROFILE == "soak" and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.soak)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    if hasattr(session.config, "workerinput"):
        use_huge_pages()  # a fork of a worker takes 9 ms instead of 17
    gc.enable()
    gc.set_threshold(20_000)  # looking for garbage after each 700 objects takes a twentieth of all the time


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """For tests of what is kept from the garbage collector."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is compiled and when: it is traced and differentiated, but no kernels are built."""
    monkeypatch.setattr("drivetrain.planning.planner.why_not_compiled", lambda device: "")
    monkeypatch.setattr(
        "drivetrain.strategies.compiling.CompileOptions.arguments", lambda options: {"backend": "aot_eager"}
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the rates that were measured for this user."""
    folder = tmp_path / "drivetrain-cache"
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(folder))
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One MiB, and 1000 names."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=1000", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("nothing may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
