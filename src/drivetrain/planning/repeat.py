"""Tests whether steps repeat bit by bit: in two fresh processes where these can make the job, else twice in this one.

A fresh process gets the job as a restart would: it runs the target again (the recipe, the function, or the script up to
its first `dt.train`). Each has its own empty compile caches, since kernels are chosen by timing when they are compiled.
"""

import gc
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.core.isolation import untouched
from drivetrain.core.launchers import CHANNEL, without_launcher
from drivetrain.plan.knobs import Way
from drivetrain.plan.repeat import Bits, RepeatTrial
from drivetrain.planning.first_steps import FirstSteps
from drivetrain.run.command_context import target_to_rerun
from drivetrain.run.session import Session

CHILD = "drivetrain.commands.repeat_child"
LONGEST_SECONDS = 600.0  # that a process may take for one answer
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class ChildError(Exception):
    """Raised if a process does not answer, with the reason."""


class Child:
    """A fresh process that makes the job again, and answers questions about its first steps."""

    def __init__(self, run: Session, target: str, folder: Path) -> None:
        folder.mkdir()
        self._log = folder / "output.txt"
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        self._rest = b""
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
        caches = {name: str(folder / cache) for name, cache in CACHES.items()}
        environment = {**without_launcher(os.environ), **caches, "PYTHONPATH": path}
        environment.pop(CHANNEL, None)  # the supervisor listens to this process
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILD, str(theirs_in), str(theirs_out)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs_in, theirs_out),
            )
        os.close(theirs_in)
        os.close(theirs_out)
        config = run.config.model_dump(mode="json")
        self.tell({
            "target": target,
            "argv": sys.argv,
            "config": config,
            "identity": run.job.identity(),
            "weighting": run.weighting.model_dump(mode="json"),
        })  # fmt: skip

    def tell(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # a process that is gone does not answer: that says why
            os.write(self._to, json.dumps(message).encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        """Return the answer of the process. The host waits here for it."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while b"\n" not in self._rest:
            ready = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise ChildError(f"a fresh process took more than {LONGEST_SECONDS:.0f} s")
            read = os.read(self._from, 1 << 20)
            if not read:
                raise ChildError(f"a fresh process ended without an answer{self._last_words()}")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise ChildError(found["error"])
        return found

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return f": {lines[-1][:200]}" if lines else ""
        return ""

    def close(self) -> None:
        for end in (self._to, self._from):
            with suppress(OSError):
                os.close(end)
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RepeatProbe:
    """Provides `attempt` and `cost_of` for `plan.repeat`."""

    def __init__(self, run: Session, model: nn.Module, micro_batch: int) -> None:
        """Prepare the probe. `micro_batch` samples fit several times: two processes run at the same time."""
        self._run, self._model, self._micro_batch = run, model, micro_batch
        self._target = target_to_rerun()
        self._folder = Path(tempfile.mkdtemp(prefix="drivetrain-repeat-"))
        self._children: list[Child] = []
        self._why_not_elsewhere = "" if self._target else "no other process can make this job"
        self._here: FirstSteps | None = None
        self._chosen: Way | None = None

    def attempt(self, way: Way) -> RepeatTrial:
        """Run the first steps of a way in two processes."""
        self._chosen = self._chosen or way
        if not self._why_not_elsewhere:
            try:
                return _trial(way, self._elsewhere(self._smaller(way)), 2)
            except ChildError as error:
                self._why_not_elsewhere = str(error)
                self._end_children()
        return _trial(way, self._twice_here(self._smaller(way)), 1)

    def _smaller(self, way: Way) -> Way:
        return way.but(micro_batch=min(way.micro_batch, self._micro_batch))

    @property
    def note(self) -> str:
        """The reason why a restart was not tried, where something went wrong with it."""
        return self._why_not_elsewhere if self._target else ""

    def cost_of(self, way: Way) -> float | None:
        """Return how much longer a step takes than the first way's, as a share; None if it cannot be timed."""
        assert self._chosen is not None
        ways = [self._smaller(self._chosen), self._smaller(way)]
        try:
            if self._children:
                child = self._children[0]
                child.tell({"seconds": [each.model_dump(mode="json") for each in ways]})
                fast, other = child.answer()["seconds"]
            else:
                assert self._here is not None
                with untouched(self._run.world.device):
                    fast, other = self._here.seconds(ways)
        except (ChildError, KeyError, RuntimeError):
            return None
        return float(other / fast - 1)

    def close(self) -> None:
        self._end_children()
        self._here = None
        gc.collect()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_children(self) -> None:
        for child in self._children:
            child.close()
        self._children = []

    def _elsewhere(self, way: Way) -> list[Bits]:
        if not self._children:
            self._children = [Child(self._run, self._target, self._folder / name) for name in ("first", "second")]
            for child in self._children:
                child.answer()
        for child in self._children:
            child.tell({"bits": way.model_dump(mode="json")})
        return [Bits.model_validate(child.answer()["bits"]) for child in self._children]

    def _twice_here(self, way: Way) -> list[Bits]:
        self._here = self._here or FirstSteps(self._run, self._model)
        found: list[Bits] = []
        for name in ("first", "second"):
            with untouched(self._run.world.device), _own_caches(self._folder / f"{name}-{len(found)}"):
                if way.compile_mode is not None:
                    torch.compiler.reset()
                found.append(self._here.bits(way))
        return found


def _trial(way: Way, found: list[Bits], processes: int) -> RepeatTrial:
    problem = next((bits.problem for bits in found if bits.problem), "")
    if problem:
        return RepeatTrial(way=way, problem=problem, processes=processes)
    is_same_here = all(bits.repeats_here for bits in found)
    difference = found[0].difference(found[1])
    if not difference and not is_same_here:
        difference = "the same steps once more in one process"
    return RepeatTrial(
        way=way, repeats=not difference, difference=difference, repeats_here=is_same_here, processes=processes
    )


@contextmanager
def _own_caches(folder: Path) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in CACHES}
    os.environ.update({name: str(folder / cache) for name, cache in CACHES.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
