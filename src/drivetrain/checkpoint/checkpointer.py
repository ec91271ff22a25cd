"""Saves, finds and prunes the checkpoints of one run. A checkpoint is valid or it does not exist.

    checkpoints/step-00000120/rank-00000.safetensors, …, manifest.json
    checkpoints/frozen-0123456789abcdef/rank-00000.safetensors, …

A save writes into a new hidden folder: every rank its file, then rank 0 the manifest. One rename makes it a checkpoint,
and only when that is on the disk are older ones removed; a removal starts with a rename, too. So a crash at any point
leaves whole checkpoints and hidden leftovers, which the next start removes. A step that exists already is never
replaced: between the two renames that it takes, a crash would leave neither.

Frozen weights are in a separate folder, which checkpoints share (`frozen.py`). It is written, renamed and on the
disk before the manifest that names it is written, and removed when no checkpoint that is left names it.

All ranks use one shared folder and call every collective method together. An error on one rank is raised on all.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from drivetrain.checkpoint.checkpoint import Checkpoint, CheckpointFolder, read_manifest
from drivetrain.checkpoint.files import (
    CheckpointDamagedError,
    CheckpointError,
    Files,
    SaveFailure,
    SharedFileError,
    Written,
    set_aside_in,
    shared_draft_name,
    step_name,
)
from drivetrain.checkpoint.frozen import FrozenAgreement, FrozenMovedError, FrozenReport, FrozenWeights, Split
from drivetrain.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileTable,
    Handed,
    Manifest,
    StoredFile,
    StoredTensor,
    Tables,
    file_name,
    merged,
)
from drivetrain.checkpoint.tensor_file import (
    encoded,
    not_finite,
    refuse_unstorable_meta,
    refuse_unstorable_shards,
)
from drivetrain.core.state import Shard
from drivetrain.core.value import Value
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


class RankReport(Value):
    """Tells rank 0 what a rank wrote, or why it could not."""

    failure: SaveFailure | None = None
    file: StoredFile | None = None  # none for a rank that has no data
    even_hash: str = ""
    table: str = ""  # a RankTable, as JSON
    is_wanted: bool = True  # false: its step turned out to be bad
    not_finite: str = ""  # a tensor of this rank that must be finite and is not
    shared_file: StoredFile | None = None  # of frozen weights, where they are written in this save
    shared_even_hash: str = ""
    shared_table: str = ""
    moved: tuple[str, ...] = ()  # keys of frozen weights that could not be written, since they had changed meanwhile


class HandedIn(Value):
    """Tells rank 0 what a rank is going to save, or why it cannot."""

    failure: SaveFailure | None = None
    step: int
    num_bytes: int = 0
    even_hash: str = ""  # of the list of tensors that are divided evenly over all ranks
    frozen: FrozenReport = FrozenReport()


class _Draft(NamedTuple):
    """A save in progress, the same on all ranks."""

    step: int
    path: Path
    shared: str  # the folder of frozen weights, where they are written in this save
    needed_bytes: int
    free_bytes: int
    follows_rules: bool  # ranks divide tensors alike; otherwise each lists its parts
    doing: str  # for messages


class Checkpointer:
    """Made by all ranks of the run that writes here, together. Makes the folder; removes the leftovers of a crash.

    Readers beside a run that may be saving use `Checkpoint.latest_in`, which changes nothing.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        keep_last: int = 3,
        *,
        files: Files | None = None,
        must_be_finite: FiniteKeys = lambda meta, shapes: (),
        refuse_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the folder.

        Args:
            folder: The folder of the run's checkpoints.
            world: The ranks that save together.
            keep_last: How many checkpoints stay, besides pinned ones.
            files: The operations on the disk.
            must_be_finite: Returns the keys of a state in which no element may be NaN or infinite. A state with one is
                never committed: going on from it would fail for ever.
            refuse_lost: Raises on rank 0 if the folder at this path is not the one of this run any more.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        self.folder = folder
        self.problems: list[str] = []  # problems that did not stop the run, as text; only grows
        self._world, self._keep_last, self._files = world, keep_last, files or Files()
        self._must_be_finite = must_be_finite
        self._disk = CheckpointFolder(folder, self._files, self.problems, refuse_lost)
        self._pinned: set[int] = set()
        self._closed = False
        self._tables = Tables(world.rank, world.size)
        self._agreement = Agreement(world, folder)
        self.frozen = FrozenWeights()
        self.problems += self._agreement.decided_by_main(self._disk.prepare, "checkpoints cannot be kept")

    def save(self, step: int, shards: Sequence[Shard], meta: Mapping[str, Any]) -> Path:
        """Save a checkpoint; collective. When this returns, it is on the disk.

        The parts that all ranks hand in must hold every element of every tensor exactly once; `meta` (JSON) is taken
        from rank 0. A CheckpointError, raised on all ranks, means that there is no such checkpoint, and that the ones
        before it are as they were.
        """
        self.save_if_wanted(step, shards, meta, None, until_copied=lambda: None, is_wanted=lambda: True)
        return self.folder / step_name(step)

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Precompute what depends on the layout of these shards, for the first save; not collective."""
        known = self._tables.of(shards)
        if self._world.size == 1:  # otherwise it takes the tables of all ranks
            files = {file_name(0)} if known.file else set()
            self._tables.merged(Handed([known.even_hash], [known.others], files), known)

    def save_if_wanted(
        self,
        step: int,
        shards: Sequence[Shard],
        meta: Mapping[str, Any],
        split: Split | None = None,
        *,
        until_copied: Callable[[], None],
        is_wanted: Callable[[], bool],
    ) -> bool:
        """Save from a background thread; collective. Return False if there is no checkpoint because a rank wants none.

        With a `split` of the state, `shards` are copies of what it says is written; without, they are the whole state.
        `until_copied` returns when the shards hold what they should, and is called before they are read; `is_wanted`
        says whether the step was good, and is called when this rank's file is on the disk. Both may wait.
        """
        self._refuse_closed()
        if split is None:
            split = self.frozen.split(shards, wait=True, beside=False)
            shards = split.written
        draft = self._begin(step, shards, split, meta)
        table: FileTable | None = None
        try:
            until_copied()
            report, table = self._write(draft, self.frozen.to_be_written(split, shards), meta)
            if to_share := self.frozen.to_be_stored(split):
                report = report.model_copy(update=self._write_shared(draft, to_share))
        except Exception as error:  # noqa: BLE001  (the other ranks wait for this one's word, whatever it is)
            moved = (error.key,) if isinstance(error, FrozenMovedError) else ()
            failure = SaveFailure.of(error, self.folder, draft.doing, draft.needed_bytes, draft.free_bytes)
            report = RankReport(failure=failure, moved=moved)
        report = report.model_copy(update={"is_wanted": is_wanted()})
        gathered = self._world.gather_to_main(report.model_dump(mode="json"))
        reports = [RankReport.model_validate(each) for each in gathered]
        verdict = self._agreement.decided_by_main(lambda: self._verdict(draft, reports), draft.doing)
        self.frozen.note_moved(step, set(verdict["moved"]))
        if not verdict["is_wanted"]:
            return False
        done = self._agreement.decided_by_main(
            lambda: self._commit(draft, reports, table, split, meta), draft.doing, draft.needed_bytes, draft.free_bytes
        )
        self.problems += done["problems"]
        if draft.shared:
            files = {name: StoredFile.model_validate(file) for name, file in done["shared_files"].items()}
            tensors = {key: StoredTensor.model_validate(tensor) for key, tensor in done["shared_tensors"].items()}
            self.frozen.note_stored(step, draft.shared, files, tensors)
        return True

    def num_bytes_in_drafts(self) -> int:
        """Return how much the saves in progress have written, whichever rank did it; not collective, never raises."""
        return self._disk.num_bytes_in_drafts()

    def over(self, world: World) -> Self:
        """Return a view of the same checkpoints, pins and problems over another process group: for another thread."""
        other = copy.copy(self)
        other._world, other._agreement = world, Agreement(world, self.folder)
        other._tables = self._tables.of_world(world.rank, world.size)
        return other

    def latest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, the same on all ranks; None if there never was one. Collective.

        Every byte is compared with its hash, the files divided among the ranks. A damaged checkpoint is renamed to
        `….corrupt` and named in `problems`, and the one before it is examined. If only damaged ones are left, that is
        an error: starting from scratch would silently throw away a run. So is one of a newer format, which stays as it
        is.
        """
        self._refuse_closed()
        finder = Finder(self._world, self._disk, self.problems, self._must_be_finite)
        checkpoint = finder.latest()
        if checkpoint is not None:
            self.frozen.resume(checkpoint.manifest)
        return checkpoint

    def give_up_on(self, step: int, reason: str) -> bool:
        """Set the checkpoint of a step aside if there is an older one, which `latest` returns then; collective.

        Args:
            step: The step, of a checkpoint that is whole.
            reason: Why it is of no use, in words.

        Returns:
            Whether there is an older one.
        """
        self._refuse_closed()
        return Finder(self._world, self._disk, self.problems, self._must_be_finite).give_up_on(step, reason)

    def steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, as this rank sees the folder; ascending.

        They are not verified.
        """
        return self._disk.steps()

    def discard_after(self, step: int) -> list[int]:
        """Remove the checkpoints of later steps, pinned ones too; return their steps, ascending. Collective.

        Used for going back: the steps after `step` are going to be trained again, and saved under the same names. All
        are renamed, newest first, before the first is removed; a crash leaves whole ones only. Must not be called
        during a save.
        """
        self._refuse_closed()
        removed: list[int] = self._agreement.decided_by_main(
            lambda: self._disk.discard_after(step), f"checkpoints after step {step} cannot be removed"
        )
        self._pinned.difference_update(removed)
        return removed

    def pin(self, step: int) -> None:
        """Never prune this step; rank 0's pins count.

        A pin lives as long as this object. Only saves prune: pinning again after a restart, before the first save,
        loses nothing.
        """
        self._pinned.add(step)

    def unpin(self, step: int) -> None:
        """Allow the next save to prune this step."""
        self._pinned.discard(step)

    def close(self) -> None:
        """Refuse saves after this. Every save that returned is on the disk already."""
        self._closed = True

    # Saving

    def _begin(self, step: int, shards: Sequence[Shard], split: Split, meta: Mapping[str, Any]) -> _Draft:
        """Make a folder to write into. Nothing is written before all ranks have something storable."""
        doing = f"step {step} cannot be saved"
        own = self._handed_in(step, shards, split, meta, doing)
        gathered = self._world.gather_to_main(own.model_dump(mode="json"))
        handed = [HandedIn.model_validate(each) for each in gathered]
        needed_bytes = sum(each.num_bytes for each in handed)
        agreed = self._agreement.decided_by_main(lambda: _agreed(handed).model_dump(mode="json"), doing)
        self.frozen.agree(step, FrozenAgreement.model_validate(agreed))

        def begin() -> tuple[str, str, int, int, bool]:
            shares = bool(self.frozen.to_be_stored(split))
            follows_rules = len({each.even_hash for each in handed}) == 1
            return *self._disk.begin(step, shares=shares), needed_bytes, follows_rules

        name, shared, free_bytes, needed_bytes, follows_rules = self._agreement.decided_by_main(
            begin, doing, needed_bytes
        )
        return _Draft(step, self.folder / name, shared, needed_bytes, free_bytes, follows_rules, doing)

    def _handed_in(
        self, step: int, shards: Sequence[Shard], split: Split, meta: Mapping[str, Any], doing: str
    ) -> HandedIn:
        """Return what this rank is going to save, or why it cannot."""
        try:
            if not 0 <= step < 10**18:
                raise CheckpointError(f"expected a step from 0 on, got {step}", remedy="count steps from 0")
            if not self._tables.knows(shards):
                refuse_unstorable_shards(shards)
            to_share = self.frozen.to_be_stored(split)
            refuse_unstorable_shards(to_share)
            if self._world.is_main:
                refuse_unstorable_meta(meta)
            num_bytes = sum(shard.tensor.numel() * shard.tensor.element_size() for shard in (*shards, *to_share))
            report = self.frozen.report(split, self._lost_folders() if self._world.is_main else ())
            even_hash = ""
            if self._world.size > 1:
                # Frozen weights are among both on some ranks only: one may have seen a change that others have not.
                others = [shard for shard in shards if shard.key not in split.frozen]
                even_hash = self._tables.even_hash_of([*others, *split.frozen.values()])
        except Exception as error:  # noqa: BLE001  (the other ranks wait for this one's word, whatever it is)
            return HandedIn(failure=SaveFailure.of(error, self.folder, doing), step=step)
        return HandedIn(step=step, num_bytes=num_bytes, even_hash=even_hash, frozen=report)

    def _lost_folders(self) -> list[str]:
        """Return the shared folders that are not as written. Only sizes are compared: hashes take too long."""
        lost = []
        for name, files in self.frozen.folders.items():
            try:
                whole = all((self.folder / name / file).stat().st_size == of.size for file, of in files.items())
            except FileNotFoundError:
                whole = False
            except OSError:  # says nothing about the files
                whole = True
            if not whole:
                lost.append(name)
                self.problems.append(f"{self.folder / name} is gone or damaged: its frozen weights are written again")
        return lost

    def _write(
        self, draft: _Draft, shards: Sequence[Shard], meta: Mapping[str, Any]
    ) -> tuple[RankReport, FileTable | None]:
        """Write this rank's file, unless its numbers are not fit to be saved."""
        if bad := self._not_finite(shards, meta):
            return RankReport(not_finite=bad), None
        table = self._tables.of(shards, follows_rules=draft.follows_rules)
        file = None
        if table.file is not None:
            held = [shard.tensor for shard in shards if shard.tensor.numel()]
            chunks = encoded(table.file, held.__getitem__)
            file = _stored(self._files.write_file(draft.path / file_name(self._world.rank), chunks))
        return RankReport(even_hash=table.even_hash, table=table.others, file=file), table

    def _not_finite(self, shards: Sequence[Shard], meta: Mapping[str, Any]) -> str:
        """Return what makes this rank's part of a state one that must not be saved; empty if nothing does."""
        keys = self._must_be_finite(meta, {shard.key: tuple(shard.global_shape) for shard in shards})
        for shard in shards:
            if shard.key in keys and (found := not_finite(shard.tensor)):
                return f"{shard.key} holds {found}"
        return ""

    def _write_shared(self, draft: _Draft, shards: Sequence[Shard]) -> dict[str, Any]:
        """Write this rank's file of frozen weights; return fields of its report. Each is copied when its turn comes."""
        table = self._tables.tabled(shards, draft.shared, follows_rules=draft.follows_rules)
        file = None
        if table.file is not None:
            held = [shard for shard in shards if shard.tensor.numel()]
            path = self.folder / shared_draft_name(draft.shared) / file_name(self._world.rank)
            chunks = encoded(table.file, lambda number: self.frozen.stored_copy(held[number]))
            file = _stored(self._files.write_file(path, chunks))
        return {"shared_even_hash": table.even_hash, "shared_table": table.others, "shared_file": file}

    def _verdict(self, draft: _Draft, reports: Sequence[RankReport]) -> dict[str, Any]:
        """Return on rank 0 what the ranks found out while they wrote; remove the draft if one of them wants none."""
        is_wanted = all(report.is_wanted for report in reports)
        if not is_wanted:
            self._disk.discard(draft.step, draft.path, draft.shared, renamed=False)
        return {"is_wanted": is_wanted, "moved": sorted({key for report in reports for key in report.moved})}

    def _commit(
        self,
        draft: _Draft,
        reports: Sequence[RankReport],
        table: FileTable | None,
        split: Split,
        meta: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Turn a folder of files into a checkpoint on rank 0, or remove it if that fails."""
        final, step, shared = self.folder / step_name(draft.step), draft.step, draft.shared
        renamed = False
        try:
            _refuse_unfit(step, reports)
            assert table is not None
            written = {file_name(rank): report.file for rank, report in enumerate(reports) if report.file}
            handed = Handed([report.even_hash for report in reports], [r.table for r in reports], set(written))
            tensors = self._tables.merged(handed, table)
            frozen, folders = self.frozen.shared_by(split), dict(self.frozen.folders)
            new: dict[str, StoredTensor] = {}
            if shared:
                folders[shared], new = self._newly_shared(draft, reports, split)
                frozen |= new
                self._disk.publish_shared(shared)
            used = {folder for tensor in frozen.values() for folder in tensor.folders}
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                step=step,
                world_size=self._world.size,
                shared={folder: files for folder, files in folders.items() if folder in used},
                meta=dict(meta),
                files=written,
                frozen=self.frozen.checksums_of(frozen),
                moved=tuple(sorted(self.frozen.moved)),
                tensors={**tensors, **frozen},
            )
            self._files.write_file(draft.path / MANIFEST_NAME, [manifest.sealed()])
            self._files.fsync_folder(draft.path)
            self._files.rename(draft.path, final)
            renamed = True
            self._files.fsync_folder(self.folder)
        except BaseException:
            self._disk.discard(step, draft.path, shared, renamed)
            raise
        problems = self._disk.prune(self._keep_last, {*self._pinned, step})
        problems += self._disk.prune_shared(used, lambda name: self.frozen.folders.pop(name, None))
        return {
            "problems": problems,
            "shared_files": {name: file.model_dump() for name, file in folders.get(shared, {}).items()},
            "shared_tensors": {key: tensor.model_dump(mode="json") for key, tensor in new.items()},
        }

    def _newly_shared(
        self, draft: _Draft, reports: Sequence[RankReport], split: Split
    ) -> tuple[dict[str, StoredFile], dict[str, StoredTensor]]:
        """Return the files of frozen weights that ranks wrote in a save, by name, and the tensors in them."""
        files = {file_name(rank): report.shared_file for rank, report in enumerate(reports) if report.shared_file}
        own = self._tables.tabled(self.frozen.to_be_stored(split), draft.shared, follows_rules=draft.follows_rules)
        # A rank without a part of any of them has nothing to say.
        told = [report for report in reports if report.shared_table]
        names = {f"{draft.shared}/{name}" for name in files}
        hashes = [report.shared_even_hash for report in told]
        return files, merged(Handed(hashes, [report.shared_table for report in told], names), own)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CheckpointError(f"the checkpoints in {self.folder} were closed", remedy="close after the last save")


def _agreed(handed: Sequence[HandedIn]) -> FrozenAgreement:
    """Return what ranks that all save the same step agree on about frozen weights; raise if they do not, or cannot."""
    if found := SaveFailure.joined([each.failure for each in handed]):
        raise found.error()
    steps = sorted({each.step for each in handed})
    if len(steps) > 1:
        raise CheckpointError(
            f"the ranks save different steps: {', '.join(map(str, steps))}",
            remedy="this is a mistake in the training loop: ranks have to save together",
        )
    return FrozenAgreement.of([each.frozen for each in handed])


def _refuse_unfit(step: int, reports: Sequence[RankReport]) -> None:
    """Raise if a rank could not write its file, or has numbers that must not be saved."""
    if failure := SaveFailure.joined([report.failure for report in reports]):
        raise failure.error()
    for rank, report in enumerate(reports):
        if report.not_finite:
            raise _poisoned(step, report.not_finite, rank if len(reports) > 1 else None)


def _stored(written: Written) -> StoredFile:
    return StoredFile(size=written.size, sha256=written.sha256, piece_bytes=written.piece_bytes)


def _poisoned(step: int, found: str, rank: int | None) -> CheckpointError:
    where = "" if rank is None else f" on rank {rank}"
    return CheckpointError(
        f"step {step} cannot be saved: {found}{where}, and whatever goes on from it fails",
        remedy="run again under the same name: it goes on from the checkpoint before; a lower learning rate, or"
        " clip_norm, where it happens again. If such values belong there, --no-check-finite",
    )
