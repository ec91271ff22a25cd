"""What the main process writes of a run: its files, and the terminal."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import yaml

from drivetrain.core.records import StepRecord
from drivetrain.core.run_folder import RunFolder
from drivetrain.data.division import Division
from drivetrain.monitor.console import RunConsole
from drivetrain.run.setup import Setup


class Books:
    """What the main process writes of a run: its files, and the terminal. Nothing on the others."""

    def __init__(self, run: Setup, folder: RunFolder | None, division: Division, resumed_from: int) -> None:
        self._run, self._folder, self._resumed_from = run, folder, resumed_from
        job = run.job
        self._console = RunConsole(job.num_steps, job.steps_per_epoch, resumed_from, quiet=run.quiet)
        if folder is None:
            return
        self._steps, self._events = folder.log("steps.jsonl"), folder.log("events.jsonl")
        self._metrics = folder.log("metrics.jsonl")
        self._steps.keep_up_to(resumed_from)
        self._metrics.keep_up_to(resumed_from)
        folder.write("hardware.json", run.hardware.to_json())
        folder.write("config.yaml", yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False))
        plan: dict[str, Any] = {
            "world_size": run.world.size,
            "micro_batch": division.micro_batch,
            "global_batch": job.global_batch,
        }
        plan |= {"strategy": run.strategy, "precision": run.settings.precision.value, "device": str(run.world.device)}
        folder.write("plan.yaml", yaml.safe_dump(plan, sort_keys=False))
        self.event("resume" if resumed_from else "start", step=resumed_from, **plan)

    def __enter__(self) -> "Books":
        run, settings = self._run, self._run.settings
        if not run.quiet:
            size = f"{run.world.size} × {run.world.device}" if run.world.size > 1 else str(run.world.device)
            how = f"{settings.precision.value}: {settings.precision.reason}"
            verb = f"going on from step {self._resumed_from} of" if self._resumed_from else "training"
            self._console.say(
                f"[bold]{run.name}[/]: {verb} {run.job.num_steps} steps of {run.job.global_batch} samples"
            )
            self._console.say(f"  device     {size}\n  precision  {how}\n  folder     {run.path}")
        self._console.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._console.__exit__(*error)
        if self._folder is not None:
            if error[1] is not None:
                self.event("stopped by an error", error=f"{type(error[1]).__name__}: {error[1]}")
            self._steps.close()
            self._metrics.close()
            self._events.close()

    def write(self, record: StepRecord) -> None:
        if self._folder is not None:
            self._steps.append(record)
            self._console.show(record)

    def flush(self) -> None:
        if self._folder is not None:
            self._steps.flush()
            self._metrics.flush()

    def metrics(self, step: int, epoch: int, values: Mapping[str, float], seconds: float) -> None:
        if self._folder is None:
            return
        self._metrics.append({"step": step, "epoch": epoch, **values, "seconds": seconds})
        shown = "   ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        self.say(f"            {shown}")

    def say(self, text: str) -> None:
        if self._folder is not None:
            self._console.say(text)

    def finish(self, finished: bool, steps: int, because: str = "") -> None:
        if self._folder is None:
            return
        self.event("finish" if finished else "stop", step=steps, **{"because": because} if because else {})
        if because:
            self.say(f"stopped at step {steps}: {because}")
        elif not finished:
            self.say(f"stopped at step {steps} of {self._run.job.num_steps}; the same command goes on from there")
        if finished:
            self._folder.finish({"steps": steps})

    def event(self, kind: str, **facts: Any) -> None:
        if self._folder is None:
            return
        self._events.append({"event": kind, "time": datetime.now(UTC).isoformat(), **facts})
        self._events.flush()
