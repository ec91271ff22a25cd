"""The folder of a run's checkpoints on the disk: drafts, renames, removals. Used by the main process alone."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from drivetrain.checkpoint.checkpoint import read_manifest
from drivetrain.checkpoint.errors import CheckpointError
from drivetrain.checkpoint.files import (
    Files,
    draft_name,
    leftovers_in,
    set_aside_in,
    shared_draft_name,
    shared_in,
    shared_name,
    shared_trash_name,
    step_name,
    steps_in,
    trash_name,
)


class CheckpointFolder:
    """Makes, renames and removes the folders of checkpoints. Whatever fails is a problem to report or an OSError."""

    def __init__(self, path: Path, files: Files, problems: list[str]) -> None:
        self.path, self._files, self._problems = path, files, problems

    def prepare(self) -> list[str]:
        """Make the folder and remove leftovers of a crash. Only names made by a save or removal are touched."""
        self.path.mkdir(mode=0o775, parents=True, exist_ok=True)
        problems = []
        for path in leftovers_in(self.path):
            try:
                self._files.remove_tree(path)
            except OSError as error:
                problems.append(f"{path}, left by a crash, could not be removed: {error.strerror}")
        return problems

    def steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, not verified; ascending."""
        return steps_in(self.path)

    def begin(self, step: int, *, shares: bool) -> tuple[str, str, int]:
        """Make a folder to write into, and one for frozen weights if they are to be written.

        Returns the names of both, and the bytes that were free before.
        """
        final = self.path / step_name(step)
        if final.exists() or final.is_symlink():
            raise CheckpointError(
                f"{final} is there already, and is left as it is",
                remedy="save each step once; to save it anew, move that folder away",
                path=final,
            )
        name = draft_name(step)
        free_bytes = shutil.disk_usage(self.path).free
        self._files.make_folder(self.path / name)
        if not shares:
            return name, "", free_bytes
        shared = shared_name()
        try:
            self._files.make_folder(self.path / shared_draft_name(shared))
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.remove_tree(self.path / name)
            raise
        return name, shared, free_bytes

    def discard(self, step: int, draft: Path, shared: str, renamed: bool) -> None:
        """Remove everything that a failed save wrote. If even this fails, the first error is still the one reported."""
        try:
            if renamed:
                self._remove_checkpoint(step)
            else:
                self._files.remove_tree(draft)
            if shared and (self.path / shared).exists():
                self._remove_shared(shared)
            elif shared:
                self._files.remove_tree(self.path / shared_draft_name(shared))
        except OSError as error:
            self._problems.append(f"what is left of step {step} could not be removed: {error.strerror}")

    def prune(self, keep_last: int, kept: set[int]) -> list[str]:
        """Remove all but the last checkpoints and those to be kept.

        One that cannot be removed costs space, and does not end the run: returns what to report.
        """
        problems = []
        try:
            steps = self.steps()
        except OSError as error:
            return [f"old checkpoints could not be listed: {error.strerror}"]
        for step in steps[:-keep_last]:
            try:
                if step not in kept:
                    self._remove_checkpoint(step)
            except OSError as error:
                problems.append(f"{self.path / step_name(step)} could not be removed: {error.strerror}")
        return problems

    def prune_shared(self, used: set[str], forget: Callable[[str], object]) -> list[str]:
        """Remove shared folders that no checkpoint needs, and forget each; `used` are those of the newest checkpoint.

        Checkpoints that were set aside count: they may still be valuable. If one does not list what it needs, all
        folders stay.
        """
        problems = []
        try:
            others = [name for name in shared_in(self.path) if name not in used]
            if not others:
                return []
            for name in (*map(step_name, self.steps()), *set_aside_in(self.path)):
                used = used | read_manifest(self.path / name).shared.keys()
        except (OSError, CheckpointError):
            return []
        for name in others:
            if name in used:
                continue
            try:
                self._remove_shared(name)
                forget(name)
            except OSError as error:
                problems.append(f"{self.path / name} could not be removed: {error.strerror}")
        return problems

    def discard_after(self, step: int) -> list[int]:
        """Remove the checkpoints after `step`, and return their steps."""
        later = [found for found in self.steps() if found > step]
        trash = []
        for found in reversed(later):
            trash.append(self.path / trash_name(found))
            self._files.rename(self.path / step_name(found), trash[-1])
        self._files.fsync_folder(self.path)
        for path in trash:
            try:
                self._files.remove_tree(path)
            except OSError as error:
                self._problems.append(f"{path} could not be removed: {error.strerror}")
        return later

    def _remove_checkpoint(self, step: int) -> None:
        """Remove a checkpoint, after renaming it: a crash inside the removal must leave no half under a valid name."""
        trash = self.path / trash_name(step)
        self._files.rename(self.path / step_name(step), trash)
        self._files.remove_tree(trash)

    def _remove_shared(self, name: str) -> None:
        """Rename and remove a shared folder: a crash inside the removal must leave no half under a valid name."""
        trash = self.path / shared_trash_name(name)
        self._files.rename(self.path / name, trash)
        self._files.remove_tree(trash)

    def set_aside(self, name: str) -> str:
        """Rename a damaged checkpoint, and return what became of it, in words."""
        path = self.path / name
        number, target = 1, path.with_name(f"{name}.corrupt")
        while target.exists():
            number += 1
            target = path.with_name(f"{name}.corrupt-{number}")
        try:
            self._files.rename(path, target)
            self._files.fsync_folder(self.path)
        except OSError as error:
            return f"could not be set aside ({error.strerror})"
        return f"was set aside as {target.name}"

    def publish_shared(self, name: str) -> None:
        """Make a written folder of frozen weights a valid one. When this returns, it is on the disk."""
        draft = self.path / shared_draft_name(name)
        self._files.fsync_folder(draft)
        self._files.rename(draft, self.path / name)
        self._files.fsync_folder(self.path)
