"""Weights & Biases: online where a user is logged in, else in a folder to be synced later."""

import html
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.logged import Histogram, Image, Media
from drivetrain.monitor.tracking import Metrics, Tracker, TrackerStart

START_SECONDS = 30.0  # that `wandb.init` may take before it raises


def prepare(start: TrackerStart) -> Callable[[], Tracker]:
    import wandb

    def make() -> Tracker:
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _is_logged_in(wandb) else "offline")
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "drivetrain"),
            name=start.run_name,
            id=_wandb_id(start.folder),
            resume="allow" if mode == "online" else None,
            dir=str(start.folder),
            mode=mode,
            config=dict(start.config),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=START_SECONDS),
        )
        if run is None:
            raise DrivetrainError("wandb.init gave no run")
        if mode == "offline" and "WANDB_MODE" not in os.environ:
            start.report(f"wandb: not logged in, so it writes to {start.folder / 'wandb'}; `wandb sync` uploads that")
        return WandbTracker(run)

    return make


class WandbTracker:
    """Writes a run of Weights & Biases, online where a user is logged in, else in a folder to be synced later."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def media(self, name: str, value: Media, step: int) -> None:
        import wandb

        if isinstance(value, Image):
            made: Any = wandb.Image(value.as_bytes().numpy())
        elif isinstance(value, Histogram):
            counts, edges = map(np.array, value.counted())
            made = wandb.Histogram(np_histogram=(counts, edges))
        else:
            made = wandb.Html(f"<pre>{html.escape(value.text)}</pre>")
        self._run.log({name: made}, step=step)

    def finish(self, metrics: Metrics) -> None:
        self._run.summary.update({f"final/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        self._run.finish()


def _is_logged_in(wandb: Any) -> bool:
    """Return whether a user is logged in, without asking: a prompt on the terminal would block the tracker for good."""
    try:
        return bool(wandb.login(prompt=False))
    except Exception:  # noqa: BLE001 - no key, no network, no server: all the same
        return False


def _wandb_id(folder: Path) -> str:
    """Return the run's id, which is the same for a run that is continued."""
    path = folder / "wandb.id"
    if not path.exists():
        path.write_text(secrets.token_hex(8) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
