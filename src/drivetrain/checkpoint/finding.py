"""Finds the newest valid checkpoint of a run, the same on all ranks; and how ranks agree on what one of them found."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.checkpoint.checkpoint import Checkpoint, CheckpointFolder, read_manifest
from drivetrain.checkpoint.errors import CheckpointDamagedError, CheckpointError, SaveFailure, SharedFileError
from drivetrain.checkpoint.files import set_aside_in, step_name
from drivetrain.core.world import World

T = TypeVar("T")
# Returns the keys whose elements must be finite, from the meta of a state and the shapes of its tensors.
FiniteKeys = Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Collection[str]]
CHECKED_SINCE = 3  # the format since which nothing is committed that is not finite


class Agreement:
    """Sends decisions and failures of one rank to all."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world, self._folder = world, folder

    def decided_by_main(
        self, decide: Callable[[], T], doing: str, needed_bytes: int | None = None, free_bytes: int | None = None
    ) -> T:
        """Return rank 0's result of `decide`, or raise its error, on all ranks. The result must be JSON."""
        answer: dict[str, Any] = {}
        if self._world.is_main:
            try:
                answer["value"] = decide()
            except Exception as error:  # noqa: BLE001  (the other ranks wait for this one's word, whatever it is)
                answer["failure"] = SaveFailure.of(error, self._folder, doing, needed_bytes, free_bytes).model_dump()
        answer = self._world.agree(answer)
        if "failure" in answer:
            raise SaveFailure.model_validate(answer["failure"]).error()
        value: T = answer["value"]
        return value

    def failures(self, own: SaveFailure | None) -> list[SaveFailure | None]:
        """Return every rank's failure, in rank order."""
        records = self._world.gather(own.model_dump() if own else None)
        return [SaveFailure.model_validate(record) if record else None for record in records]


class Finder:
    """Looks for a checkpoint to go on from. Used by all ranks together."""

    def __init__(self, world: World, disk: CheckpointFolder, problems: list[str], must_be_finite: FiniteKeys) -> None:
        self._world, self._disk, self._problems, self._must_be_finite = world, disk, problems, must_be_finite
        self._agreement = Agreement(world, disk.path)

    def latest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint; see `Checkpointer.latest`."""
        damaged: set[int] = set()
        incomplete: dict[int, str] = {}  # complete themselves, but their shared files are not
        while True:
            there = self._agreement.decided_by_main(self._disk.steps, "checkpoints cannot be listed")
            step = max((step for step in there if step not in damaged), default=None)
            if step is None:
                self._refuse_to_start_anew(damaged, list(incomplete.values()))
                return None
            checkpoint, own_failure = self._examine(step)
            failures = self._agreement.failures(own_failure)
            found = SaveFailure.joined(failures)
            if checkpoint is not None and found is None:
                # Out of the way of the steps to come. Where there is nothing to go on from, they are left as they are:
                # once the shared files are back, so are they.
                self._problems += [self._set_aside(later, reason) for later, reason in incomplete.items()]
                return checkpoint
            for failure in failures:
                if failure is not None and failure.kind not in ("damaged", "shared"):
                    raise failure.error()
            damaged.add(step)
            reason = found.message if found else ""
            if all(failure is None or failure.kind == "shared" for failure in failures):
                incomplete[step] = reason
            else:
                self._problems.append(self._set_aside(step, reason))

    def give_up_on(self, step: int, reason: str) -> bool:
        """Set a checkpoint aside if there is an older one; see `Checkpointer.give_up_on`."""
        name = step_name(step)

        def set_aside() -> str:
            there = self._disk.steps()
            return self._disk.set_aside(name) if step in there and min(there) < step else ""

        outcome = self._agreement.decided_by_main(set_aside, f"{name} cannot be set aside")
        if outcome:
            self._problems.append(f"{name} {outcome}: {reason}")
        return bool(outcome)

    def _examine(self, step: int) -> tuple[Checkpoint | None, SaveFailure | None]:
        """Verify this rank's share of a checkpoint: the manifest, and every n-th file."""
        path = self._disk.path / step_name(step)
        try:
            checkpoint = Checkpoint(path, read_manifest(path))
            if checkpoint.step != step:
                raise CheckpointDamagedError(f"{path} holds step {checkpoint.step}", path=path)
            files = checkpoint.files[self._world.rank :: self._world.size]
            checkpoint.verify(files)
            if checkpoint.format_version < CHECKED_SINCE:
                shapes = {key: info.shape for key, info in checkpoint.keys.items()}
                checkpoint.refuse_nan(files, self._must_be_finite(checkpoint.meta, shapes))
        except Exception as error:  # noqa: BLE001  (the other ranks wait for this one's word, whatever it is)
            return None, SaveFailure.of(error, path, "it cannot be verified")
        return checkpoint, None

    def _set_aside(self, step: int, reason: str) -> str:
        """Rename a damaged checkpoint instead of removing it: the rest of it may still be valuable."""
        name = step_name(step)
        outcome = self._agreement.decided_by_main(
            lambda: self._disk.set_aside(name), "a damaged checkpoint cannot be set aside"
        )
        return f"{name} is damaged and {outcome}: {reason}"

    def _refuse_to_start_anew(self, damaged: set[int], incomplete: Sequence[str]) -> None:
        folder = self._disk.path
        names = self._agreement.decided_by_main(lambda: set_aside_in(folder), "checkpoints cannot be listed")
        if incomplete:
            reasons = "".join(f"\n  {problem}" for problem in (*incomplete, *self._problems))
            raise SharedFileError(
                f"there is no valid checkpoint in {folder}: frozen weights that they share are missing or"
                f" damaged{reasons}",
                remedy="copy the folders frozen-… there from where these checkpoints come from; or move the checkpoints"
                " away to start anew",
                path=folder,
            )
        if names or damaged:
            reasons = "".join(f"\n  {problem}" for problem in self._problems)
            raise CheckpointError(
                f"there is no valid checkpoint in {folder}, only damaged ones:"
                f" {', '.join(names) or ', '.join(map(step_name, sorted(damaged)))}{reasons}",
                remedy="restore one from a copy; or move the damaged ones away to start anew",
                path=folder,
            )
