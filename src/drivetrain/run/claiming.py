"""The folder of a run: claimed at its start, made for a longer run, or begun with a checkpoint of another one."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.files import shared_in, step_name, steps_in
from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.goodput import stamp
from drivetrain.core.log import notice
from drivetrain.core.run_folder import (
    CHECKPOINTS,
    FORK,
    Extension,
    Fork,
    JsonLines,
    RunFolder,
    differences,
    has_steps,
    is_finished,
    is_held,
    is_script_killed,
    mark_script,
    read_extensions,
    read_job,
    steps_finished,
    write_atomically,
    yaml_text,
)
from drivetrain.core.schedules import FactorSchedule, is_factor
from drivetrain.job import Job

# ----------------------------------------------------------------------------------------------------------------------
# Makes a run longer than it was begun: `--extend`, with the learning rate as `--extend-schedule` says.
#
# A schedule that does not depend on the number of steps goes on by itself: the run is then the one that would have come
# of the longer job, to the bit. For any other, the steps done had a learning rate that the longer job would not have
# given them, and how to go on is the user's decision.

WAYS = {
    "floor": "keeps the rate at which the schedule ended",
    "stretch": "follows the schedule of the longer job from here on",
    "rewarm": "begins the schedule again for the steps that are added",
}
_MOST_COMPARED = 1000  # steps: those of a long run are compared at equal distances


@dataclass(frozen=True)
class ExtendedSchedule:
    """The factor of the learning rate over a run that was made longer, once or several times."""

    base: Any  # a schedule with `factor(step, num_steps)`
    extensions: tuple[Extension, ...]

    def __call__(self, step: int) -> float:
        return self._factor(step, len(self.extensions))

    def at_seam(self, step: int) -> tuple[float, float]:
        """Return the factors of the last of `step` steps that were done before the last extension, and of the next."""
        return self._factor(step - 1, len(self.extensions) - 1), self(step)

    def _factor(self, step: int, number: int) -> float:
        """Return the factor by the first `number` extensions."""
        if number == 0:
            return float(self.base.factor(step, self.extensions[0].before))
        last = self.extensions[number - 1]
        before, after = last.before or 0, last.after or 0
        if last.schedule in ("", "stretch"):
            return float(self.base.factor(step, after))
        if step < before:
            return self._factor(step, number - 1)
        if last.schedule == "floor":
            return self._factor(before, number - 1)
        return float(self.base.factor(step - before, after - before))


def depends_on_length(job: Job, extension: Extension) -> bool:
    """Return whether the longer job has another learning rate in a step that the shorter one has, too."""
    if job.optims:
        return any(depends_on_length(job.with_one(name), extension) for name in job.optims)
    before, after = extension.before, extension.after
    if before is None or after is None or not is_factor(job.schedule):
        return False  # a torch scheduler is not told the number of steps, nor is a plateau
    return any(
        job.lr_factor(step, before) != job.lr_factor(step, after)
        for step in {*range(0, before, max(1, before // _MOST_COMPARED)), before - 1}
    )


def settle_extension(job: Job, earlier: Sequence[Extension], new: Extension, way: str | None) -> Extension:
    """Return the extension with how its learning rate goes on; raise where that has to be asked for.

    Args:
        job: The longer job, with its own schedule.
        earlier: How the run was made longer before.
        new: How it is made longer now.
        way: One of `WAYS`, where the user chose.
    """
    if not depends_on_length(job, new) and not any(it.schedule for it in earlier):
        return new
    if way is None:
        raise DrivetrainError(
            f"the schedule ({job.identity()['schedule']}) depends on the number of steps, {new.before} until now and "
            f"{new.after} with --extend: what the learning rate does is not known",
            remedy="add --extend-schedule: " + "; ".join(f"{name} {words}" for name, words in WAYS.items()),
        )
    settled = replace(new, schedule=way)
    if way == "floor" and not any(
        ExtendedSchedule(schedule, (*earlier, settled))(new.before or 0) for schedule in _factors_of(job)
    ):
        raise DrivetrainError(
            "the schedule ends with a learning rate of 0, and --extend-schedule floor would keep it: it learns nothing",
            remedy="--extend-schedule stretch or rewarm; or a schedule with a floor in a new run",
        )
    return settled


def extended(job: Job, extensions: Sequence[Extension]) -> Job:
    """Return the job with the learning rate of a run that was made longer."""
    if not any(it.schedule for it in extensions):
        return job

    def longer(schedule: Any) -> Any:
        return ExtendedSchedule(schedule, tuple(extensions)) if isinstance(schedule, FactorSchedule) else schedule

    optimizer: Any = job.optimizer
    if job.optims:
        optimizer = {name: replace(optim, schedule=longer(optim.schedule)) for name, optim in job.optims.items()}
    return replace(job, schedule=longer(job.schedule), optimizer=optimizer)


def _factors_of(job: Job) -> list[FactorSchedule]:
    """Return the schedules that are a factor of the step: the job's, or those of its optimizers."""
    schedules = [job.settled_optim(name).schedule for name in job.optims] or [job.schedule]
    return [schedule for schedule in schedules if isinstance(schedule, FactorSchedule)]


# ----------------------------------------------------------------------------------------------------------------------
# Claims the folder of a run, and notes in its events that a start has begun, and why it did not come to a step.

REQUEUES = "requeues.json"
REQUEUES_AT_MOST = 3


SOURCE = "source.json"


@dataclass(frozen=True)
class Script:
    """Holds what trains a run, and which runs the same process has trained before: several jobs of one script.

    A script that was killed in its second job, or before it, is started again from its first line. The run of the
    first job is finished, and is what the script asks for; without this record a new one would begin under another
    name.
    """

    target: str  # empty where it is not known, as in a notebook
    arguments: Sequence[str]
    earlier: Sequence[Path]  # folders that this process had

    def keep(self, folder: RunFolder) -> None:
        """Record it in the folder of a run."""
        there = folder.path.parent
        after = [path.name for path in self.earlier if path.parent == there and path != folder.path]
        facts = {"target": self.target, "arguments": list(self.arguments)}
        folder.write(SOURCE, json.dumps({**facts, "after": [it for it in after if is_finished(there / it)]}) + "\n")
        if self.target.endswith(".py"):
            mark_script(folder.path)

    def goes_on_after(self, path: Path, identity: Mapping[str, Any]) -> str:
        """Return the name of the run that this script trained last before it was interrupted; empty if it was not.

        It is the finished run in the folder that is given, or a later one.
        """
        checkpoints = path / CHECKPOINTS
        is_whole = checkpoints.is_dir() and max(steps_in(checkpoints), default=None) == steps_finished(path)
        if not self.target or path in self.earlier or not is_whole or differences(identity, read_job(path)):
            return ""
        found = (other.name for other in sorted(path.parent.iterdir()) if self._left(other, path.name))
        return next(found, "")

    def _left(self, other: Path, name: str) -> bool:
        """Return whether this script was interrupted in the run of a folder or behind it, after one that has a name."""
        try:
            source = json.loads((other / SOURCE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        is_ours = source.get("target") == self.target and source.get("arguments") == list(self.arguments)
        if not is_ours or name not in (other.name, *source.get("after", ())):
            return False
        return is_script_killed(other) if is_finished(other) else not is_held(other)


def claim_folder(
    job: Job, config: Config, name: str, script: Script, *, quiet: bool
) -> tuple[RunFolder, list[Extension]]:
    """Claim the folder of a job's run; return it with how the run was made longer, now and before."""
    # A checkpoint brings its own experts, whatever number is asked for.
    experts = {} if config.moe.experts is None else {"experts": config.moe.experts}
    identity, output_dir, start = job.identity() | experts, config.run.output_dir, config.checkpoint
    if job.source.sizes_vary:  # what a step was taken to need is not what it is
        recorded = read_job(output_dir / name) if has_steps(output_dir / name) else {}
        identity |= {"global_batch": recorded.get("global_batch", job.global_batch)}
    following = ""

    def passes_over(path: Path) -> bool:
        nonlocal following
        following = "" if start.fresh else script.goes_on_after(path, identity)
        return bool(following)

    folder = RunFolder.claim(
        output_dir, name, identity, fresh=start.fresh, extend=start.extends, passes_over=passes_over
    )
    if folder.moved_to is not None and not quiet:
        notice(f"the run that was {folder.path} is {folder.moved_to} now")
    if following and not quiet:
        own = folder.path.name
        why = f"{following}, which this script trained after it, is not"
        if is_finished(folder.path.with_name(following)):
            why = "this script was killed before its end" + (f", after {following}" if following != own else "")
        notice(
            f"{own} is finished, and {why}: "
            f"{own} is not trained again (--fresh, or dt.train(job, fresh=True), trains it anew)"
        )
    try:
        script.keep(folder)
        extensions = read_extensions(folder.path)
        count_requeue(folder)
        if folder.extension is not None:
            folder.extension = settle_extension(job, extensions, folder.extension, config.checkpoint.extend_schedule)
            extensions.append(folder.extension)
    except BaseException:
        folder.close()
        raise
    if folder.is_resumed:  # how an earlier start ended, such as by a refusal, is no longer the news
        _note(folder, {"event": "claim"})
    return folder, extensions


def count_requeue(folder: RunFolder, environ: Mapping[str, str] = os.environ) -> None:
    """Count in the folder how often SLURM requeued the job in vain, without a checkpoint in between, and refuse then.

    A job whose time is up before its first checkpoint would otherwise be requeued for ever.
    """
    job, start = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "0")
    if not job or not start.isdecimal():
        return
    path = folder.path / REQUEUES
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    checkpoints = folder.path / CHECKPOINTS
    step = max(steps_in(checkpoints), default=0) if checkpoints.is_dir() else 0
    in_vain = 0
    if before.get("job") == job and before["start"] == int(start):
        return  # the supervisor started the workers again
    if before.get("job") == job and step <= before["step"]:
        in_vain = before["in_vain"] + 1
    with suppress(DrivetrainError):  # a full disk: what follows is the news
        folder.write(REQUEUES, json.dumps({"job": job, "start": int(start), "step": step, "in_vain": in_vain}) + "\n")
    if in_vain >= REQUEUES_AT_MOST:
        since = f"the checkpoint of step {step}" if step else "its beginning"
        raise DrivetrainError(
            f"SLURM requeued job {job} {in_vain} times since {since}, and no checkpoint was written in between",
            remedy="a longer --time-limit, a signal earlier before it (--signal-seconds), or more frequent saves "
            "(--checkpoint-every); then submit it again: it goes on from there",
        )


def note_failure(folder: RunFolder, error: BaseException) -> None:
    """Note why a run did not begin."""
    facts: dict[str, Any] = {"event": "stopped by an error", "error": f"{type(error).__name__}: {error}"}
    if isinstance(error, DrivetrainError):
        facts = {"event": "refused", "error": error.message, "remedy": error.remedy}
    elif isinstance(error, KeyboardInterrupt):
        facts = {"event": "stop", "because": "Ctrl-C before it began; the same command begins it"}
    _note(folder, facts)


def note_over(path: Path) -> None:
    """Note that all of a run is done, its report included."""
    _append(path, {"event": "end", **stamp()})


def _note(folder: RunFolder, facts: dict[str, Any]) -> None:
    _append(folder.path, {**facts, "time": datetime.now(UTC).isoformat()})


def _append(path: Path, row: dict[str, Any]) -> None:
    with suppress(OSError):  # a full disk: what follows is the news
        log = JsonLines(path / "events.jsonl")
        log.append(row)
        log.close()


# ----------------------------------------------------------------------------------------------------------------------
# Forks a run: a new folder that begins with a checkpoint of another run, and its records up to there.
#
# Trained without a change, a fork does the steps that the other run did, to the bit. A job that differs may take it:
# with another learning rate, for instance, its optimizer has the new one and the moments of before.

RECORDS = ("steps.jsonl", "metrics.jsonl", "speed.jsonl", "gpu.jsonl")


def fork_run(source: Path, target: Path, step: int | None = None) -> int:
    """Make the folder of a run that goes on from a checkpoint of another one, and return the step.

    Files of checkpoints are linked, not copied, where the file system can: they are never changed.

    Args:
        source: The folder of the run that has the checkpoint.
        target: The folder to make.
        step: The step of the checkpoint. Default: the newest.
    """
    there = steps_in(source / CHECKPOINTS) if (source / CHECKPOINTS).is_dir() else []
    if not there or (step is not None and step not in there):
        known = f"it has those of steps {', '.join(map(str, sorted(there)))}" if there else "it has none"
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise DrivetrainError(f"{source} has {wanted} to fork from", remedy=f"{known}; train it first, or name another")
    if target.exists():
        raise DrivetrainError(f"{target} is there already", remedy="choose another name for the fork")
    step = max(there) if step is None else step
    draft = target.with_name(f".{target.name}.fork")  # a crash leaves no half of a fork under its name
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700, parents=True)
    checkpoints = source / CHECKPOINTS
    for name in (*(step_name(number) for number in there if number <= step), *shared_in(checkpoints)):
        shutil.copytree(checkpoints / name, draft / CHECKPOINTS / name, copy_function=_link)
    for name in RECORDS:
        if (source / name).exists():
            shutil.copyfile(source / name, draft / name)
            log = JsonLines(draft / name)
            log.keep_up_to(step)
            log.close()
    events = JsonLines(draft / "events.jsonl")
    events.append({"event": "fork", "words": f"from step {step} of {source}", "step": step})
    events.close()
    write_atomically(draft / "job.yaml", yaml_text(read_job(source)))
    write_atomically(draft / FORK, json.dumps(Fork(str(source), step)._asdict()) + "\n")
    draft.rename(target)
    return step


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
