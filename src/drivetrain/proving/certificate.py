"""The result of `prove`: one value with every check, written as JSON and printed as a table."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from drivetrain.core.run_folder import write_atomically
from drivetrain.proving.classify import Classification

FORMAT = 1
Status = Literal["ok", "job", "failed", "unknown", "skipped"]
_GRAVITY = ("ok", "skipped", "unknown", "job", "failed")
MARKS: Mapping[str, str] = {"ok": "✓", "job": "job", "failed": "✗", "unknown": "?", "skipped": "–"}


@dataclass(frozen=True)
class Check:
    """One thing that was compared in one configuration.

    `ok`: equal; `job`: it differs, and cannot be otherwise with this job; `failed`: it differs; `unknown`: rounding
    alone may explain it, or nothing can be said; `skipped`: not done, for the reason in `detail`.
    """

    configuration: str
    what: str
    status: Status
    error: float | None = None  # relative
    limit: float | None = None  # what rounding explains
    detail: str = ""
    verdict: Classification | None = None


@dataclass
class Certificate:
    """The outcome of a proof. `ok` is true if nothing failed and every difference is the job's own.

    Attributes:
        job: the job's name.
        trainer: the trainer that was tried.
        facts: what was found out about the job, and what was compared with what.
        checks: every check, in the order in which they were made.
        notes: what the reader must know: what was reduced, left out or could not be told.
    """

    job: str
    trainer: str
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    path: Path | None = None

    @property
    def ok(self) -> bool:
        return not any(check.status == "failed" for check in self.checks)

    @property
    def verdicts(self) -> list[Classification]:
        """The different verdicts: failures first, then those that are due to the job."""
        found: dict[tuple[str, str], Classification] = {}
        for check in sorted(self.checks, key=lambda check: check.status != "failed"):
            if check.verdict is not None:
                found.setdefault((check.verdict.kind, check.verdict.where), check.verdict)
        return list(found.values())

    def to_json(self) -> str:
        values = asdict(self)
        values.pop("path")
        return json.dumps({"format": FORMAT, "ok": self.ok, **values}, indent=2, default=str)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # /dev/null, a pipe: written to, never replaced
            path.write_text(self.to_json() + "\n", encoding="utf-8")
            self.path = path
            return
        self.path = write_atomically(path, self.to_json() + "\n")

    def show(self, console: Console) -> None:
        """Print a line for every configuration with what was compared in it; differences are explained below."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left", show_header=False)
        table.title = f"{self.job}, trained by {self.trainer}"
        table.add_column(justify="center")
        table.add_column(overflow="fold", max_width=42)
        table.add_column(overflow="fold")
        for row in dict.fromkeys(check.configuration for check in self.checks):
            own = [check for check in self.checks if check.configuration == row]
            worst = max(own, key=lambda check: _GRAVITY.index(check.status)).status
            cells = (check.what if check.status == "ok" else f"{MARKS[check.status]} {check.what}" for check in own)
            table.add_row(MARKS[worst], row, ", ".join(cells))
        console.print(table)
        console.print()
        told = set()
        for check in self.checks:
            words = str(check.verdict) if check.verdict is not None else check.detail
            if check.status != "ok" and words and words not in told:
                told.add(words)
                line = f"{MARKS[check.status]} {check.configuration}, {check.what}: {words}"
                console.print(line, soft_wrap=True, markup=False)
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True, markup=False)
        result = "nothing differs that rounding does not explain" if self.ok else "NOT proven: see above"
        if self.ok and any(check.status == "job" for check in self.checks):
            result = "the trainer is right; what differs is the job's own"
        elif self.ok and any(check.status == "unknown" for check in self.checks):
            result = "nothing differs that rounding does not explain, in what could be compared"
        console.print(f"{result} ({len(self.checks)} checks, {self.seconds:.0f} s)")
