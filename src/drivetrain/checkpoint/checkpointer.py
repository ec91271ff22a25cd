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

import torch

from drivetrain.checkpoint.checkpoint import Checkpoint, CheckpointFolder, read_manifest
from drivetrain.checkpoint.errors import CheckpointDamagedError, CheckpointError, SaveFailure, SharedFileError
from drivetrain.checkpoint.files import (
    Files,
    set_aside_in,
    shared_draft_name,
    step_name,
)
from drivetrain.checkpoint.frozen import FrozenMovedError, FrozenReport, FrozenWeights, Split
from drivetrain.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    Part,
    RankTable,
    StoredFile,
    StoredTensor,
    file_name,
    merged_tensors,
    parts_problem,
)
from drivetrain.checkpoint.tensor_file import (
    CODES,
    RESERVED_NAME,
    Arrangement,
    Entry,
    arranged,
    encoded,
    not_finite,
    refuse_unstorable_meta,
    refuse_unstorable_shards,
)
from drivetrain.core.state import Shard
from drivetrain.core.value import Value
from drivetrain.core.world import World

T = TypeVar("T")


class RankReport(Value):
    """Tells rank 0 what a rank wrote, or why it could not."""

    failure: SaveFailure | None = None
    file: StoredFile | None = None  # none for a rank that has no data
    table: str = ""  # a RankTable, as JSON: compared as text to detect changes
    is_wanted: bool = True  # false: its step turned out to be bad
    not_finite: str = ""  # a tensor of this rank that must be finite and is not
    shared_file: StoredFile | None = None  # of frozen weights, where they are written in this save
    shared_table: str = ""
    moved: tuple[str, ...] = ()  # keys of frozen weights that could not be written, since they had changed meanwhile


Layout = tuple[tuple[Any, ...], ...]
# Returns the keys whose elements must be finite, from the meta of a state and the shapes of its tensors.
FiniteKeys = Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Collection[str]]


class _Known(NamedTuple):
    """Values that depend only on the layout of a state, kept from its last save. The next state usually has the same.

    A save runs beside training in an interpreter that runs one thread at a time: 592 tensors, as GPT-2 with AdamW has
    them, took 68 ms of it before this was kept.
    """

    layout: Layout
    file: Arrangement | None  # None: there is nothing to write
    table: str


class _Merged(NamedTuple):
    """The tables of all ranks, merged and found complete."""

    tables: list[str]
    files: set[str]
    tensors: dict[str, StoredTensor]


class _Tables:
    """Tables of what is in which file, computed once for each layout of a state and kept."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: _Known | None = None
        self._merged: _Merged | None = None

    def of_rank(self, rank: int) -> "_Tables":
        """Return a copy for a rank of another process group."""
        other = copy.copy(self)
        other._rank = rank
        return other

    def knows(self, shards: Sequence[Shard]) -> bool:
        """Return whether the last state had the same layout."""
        return self._known is not None and self._known.layout == _layout(shards)

    def of(self, shards: Sequence[Shard]) -> _Known:
        """Return the table and the arrangement of this rank's file."""
        known = self._known
        if known is None or known.layout != _layout(shards):
            known = self._known = self.tabled(shards)
        return known

    def tabled(self, shards: Sequence[Shard], file: str = "") -> _Known:
        """Compute the table of a file."""
        file = file or file_name(self._rank)
        tensors: list[tuple[str, StoredTensor]] = []
        entries: list[Entry] = []
        taken = {RESERVED_NAME}
        for shard in shards:
            code, shape = CODES[shard.tensor.dtype], tuple(shard.tensor.shape)
            parts: tuple[Part, ...] = ()
            if shard.tensor.numel():  # an empty part needs no data; its tensor's type and shape are still listed
                name = _free_name(shard.key, taken)
                taken.add(name)
                entries.append(Entry(name, code, shape))
                parts = (Part(file=file, name=name, offsets=tuple(shard.offsets), shape=shape),)
            tensors.append((shard.key, StoredTensor(dtype=code, shape=tuple(shard.global_shape), parts=parts)))
        table = RankTable(tensors=tuple(tensors)).model_dump_json()
        return _Known(_layout(shards), arranged(entries) if entries else None, table)

    def merged(self, tables: list[str], files: set[str]) -> dict[str, StoredTensor]:
        """Return each tensor with the parts of all ranks, which have to hold every element once."""
        merged = self._merged
        if merged is None or merged.tables != tables or merged.files != files:
            tensors = merged_tensors([RankTable.from_json(table).tensors for table in tables])
            if problem := parts_problem(tensors, files):
                raise _not_whole(problem)
            merged = self._merged = _Merged(tables, files, tensors)
        return merged.tensors


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
    ) -> None:
        """Prepare the folder.

        Args:
            folder: The folder of the run's checkpoints.
            world: The ranks that save together.
            keep_last: How many checkpoints stay, besides pinned ones.
            files: The operations on the disk.
            must_be_finite: Returns the keys of a state in which no element may be NaN or infinite. A state with one is
                never committed: going on from it would fail for ever.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        self.folder = folder
        self.problems: list[str] = []  # problems that did not stop the run, as text; only grows
        self._world, self._keep_last, self._files = world, keep_last, files or Files()
        self._must_be_finite = must_be_finite
        self._disk = CheckpointFolder(folder, self._files, self.problems)
        self._pinned: set[int] = set()
        self._closed = False
        self._tables = _Tables(world.rank)
        self.frozen = FrozenWeights()
        self.problems += self._decided_by_main(self._disk.prepare, "checkpoints cannot be kept")

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
            self._tables.merged([known.table], {file_name(0)} if known.file else set())

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
        doing = f"step {step} cannot be saved"
        if split is None:
            split = self.frozen.split(shards, wait=True, beside=False)
            shards = split.written
        needed_bytes = self._agree_on_what_is_saved(step, shards, split, meta, doing)
        to_share = self.frozen.to_be_stored(split)
        name, shared, free_bytes = self._decided_by_main(
            lambda: self._disk.begin(step, shares=bool(to_share)), doing, needed_bytes
        )
        draft = self.folder / name
        try:
            until_copied()
            written = self.frozen.to_be_written(split, shards)
            bad = self._not_finite(written, meta)
            report = RankReport(not_finite=bad) if bad else self._write(draft, written)
            if to_share:
                report = report.model_copy(update=self._write_shared(shared, to_share))
        except Exception as error:  # noqa: BLE001  (the other ranks wait for this one's word, whatever it is)
            moved = (error.key,) if isinstance(error, FrozenMovedError) else ()
            report = RankReport(
                failure=SaveFailure.of(error, self.folder, doing, needed_bytes, free_bytes), moved=moved
            )
        report = report.model_copy(update={"is_wanted": is_wanted()})
        reports = [RankReport.from_json(text) for text in self._world.gather(report.model_dump_json())]
        self.frozen.note_moved(step, {key for report in reports for key in report.moved})
        if not all(report.is_wanted for report in reports):
            self._decided_by_main(lambda: self._disk.discard(step, draft, shared, renamed=False), doing)
            return False
        self.problems += self._decided_by_main(
            lambda: self._commit(step, draft, shared, reports, split, meta), doing, needed_bytes, free_bytes
        )
        if shared:
            self.frozen.note_stored(step, shared, *_newly_shared(reports))
        return True

    def num_bytes_in_drafts(self) -> int:
        """Return how much the saves in progress have written, whichever rank did it; not collective, never raises."""
        return self._disk.num_bytes_in_drafts()

    def over(self, world: World) -> Self:
        """Return a view of the same checkpoints, pins and problems over another process group: for another thread."""
        other = copy.copy(self)
        other._world = world
        other._tables = self._tables.of_rank(world.rank)
        return other

    def latest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, the same on all ranks; None if there never was one. Collective.

        Every byte is compared with its hash, the files divided among the ranks. A damaged checkpoint is renamed to
        `….corrupt` and named in `problems`, and the one before it is examined. If only damaged ones are left, that is
        an error: starting from scratch would silently throw away a run. So is one of a newer format, which stays as it
        is.
        """
        self._refuse_closed()
        damaged: set[int] = set()
        incomplete: dict[int, str] = {}  # complete themselves, but their shared files are not
        while True:
            there = self._decided_by_main(self.steps, "checkpoints cannot be listed")
            step = max((step for step in there if step not in damaged), default=None)
            if step is None:
                self._refuse_to_start_anew(damaged, list(incomplete.values()))
                return None
            checkpoint, own_failure = self._examine(step)
            failures = self._failures(own_failure)
            found = SaveFailure.joined(failures)
            if checkpoint is not None and found is None:
                # Out of the way of the steps to come. Where there is nothing to go on from, they are left as they are:
                # once the shared files are back, so are they.
                self.problems += [self._set_aside(later, reason) for later, reason in incomplete.items()]
                self.frozen.resume(checkpoint.manifest)
                return checkpoint
            for failure in failures:
                if failure is not None and failure.kind not in ("damaged", "shared"):
                    raise failure.error()
            damaged.add(step)
            reason = found.message if found else ""
            if all(failure is None or failure.kind == "shared" for failure in failures):
                incomplete[step] = reason
            else:
                self.problems.append(self._set_aside(step, reason))

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
        removed: list[int] = self._decided_by_main(
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

    def _agree_on_what_is_saved(
        self, step: int, shards: Sequence[Shard], split: Split, meta: Mapping[str, Any], doing: str
    ) -> int:
        """Return the bytes of all ranks' tensors. Nothing is written before all ranks have something storable."""
        failure, num_bytes, report = None, 0, FrozenReport()
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
        except Exception as error:  # noqa: BLE001  (the other ranks wait for this one's word, whatever it is)
            failure = SaveFailure.of(error, self.folder, doing)
        if found := SaveFailure.joined(self._failures(failure)):
            raise found.error()
        answers = self._world.gather([step, num_bytes, report.model_dump(mode="json")])
        steps = sorted({answer[0] for answer in answers})
        if len(steps) > 1:
            raise CheckpointError(
                f"the ranks save different steps: {', '.join(map(str, steps))}",
                remedy="this is a mistake in the training loop: ranks have to save together",
            )
        self.frozen.agree(step, [FrozenReport.model_validate(answer[2]) for answer in answers])
        return sum(answer[1] for answer in answers)

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

    def _write(self, draft: Path, shards: Sequence[Shard]) -> RankReport:
        """Write this rank's file."""
        known = self._tables.of(shards)
        if known.file is None:
            return RankReport(table=known.table)
        held = [shard.tensor for shard in shards if shard.tensor.numel()]
        written = self._files.write_file(draft / file_name(self._world.rank), encoded(known.file, held.__getitem__))
        return RankReport(table=known.table, file=StoredFile(size=written.size, sha256=written.sha256))

    def _not_finite(self, shards: Sequence[Shard], meta: Mapping[str, Any]) -> str:
        """Return what makes this rank's part of a state one that must not be saved; empty if nothing does."""
        keys = self._must_be_finite(meta, {shard.key: tuple(shard.global_shape) for shard in shards})
        for shard in shards:
            if shard.key in keys and (found := not_finite(shard.tensor)):
                return f"{shard.key} holds {found}"
        return ""

    def _write_shared(self, name: str, shards: Sequence[Shard]) -> dict[str, Any]:
        """Write this rank's file of frozen weights; return fields of its report. Each is copied when its turn comes."""
        file = file_name(self._world.rank)
        known = self._tables.tabled(shards, f"{name}/{file}")
        if known.file is None:
            return {"shared_table": known.table}
        held = [shard for shard in shards if shard.tensor.numel()]
        path = self.folder / shared_draft_name(name) / file
        chunks = encoded(known.file, lambda number: self.frozen.stored_copy(held[number]))
        written = self._files.write_file(path, chunks)
        return {
            "shared_table": known.table,
            "shared_file": StoredFile(size=written.size, sha256=written.sha256),
        }

    def _commit(
        self,
        step: int,
        draft: Path,
        shared: str,
        reports: Sequence[RankReport],
        split: Split,
        meta: Mapping[str, Any],
    ) -> list[str]:
        """Turn a folder of files into a checkpoint on rank 0, or remove it if that fails."""
        final = self.folder / step_name(step)
        renamed = False
        try:
            if failure := SaveFailure.joined([report.failure for report in reports]):
                raise failure.error()
            for rank, report in enumerate(reports):
                if report.not_finite:
                    raise _poisoned(step, report.not_finite, rank if len(reports) > 1 else None)
            written = {file_name(rank): report.file for rank, report in enumerate(reports) if report.file}
            tensors = self._tables.merged([report.table for report in reports], set(written))
            frozen, folders = self.frozen.shared_by(split), dict(self.frozen.folders)
            if shared:
                folders[shared], new = _newly_shared(reports)
                if problem := parts_problem(new, {f"{shared}/{file}" for file in folders[shared]}):
                    raise _not_whole(problem)
                frozen |= new
                self._disk.publish_shared(shared)
            used = {part.file.partition("/")[0] for tensor in frozen.values() for part in tensor.parts}
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
            self._files.write_file(draft / MANIFEST_NAME, [manifest.sealed()])
            self._files.fsync_folder(draft)
            self._files.rename(draft, final)
            renamed = True
            self._files.fsync_folder(self.folder)
        except BaseException:
            self._disk.discard(step, draft, shared, renamed)
            raise
        old = self._disk.prune(self._keep_last, {*self._pinned, step})
        return [*old, *self._disk.prune_shared(used, lambda name: self.frozen.folders.pop(name, None))]

    # Finding

    def _examine(self, step: int) -> tuple[Checkpoint | None, SaveFailure | None]:
        """Verify this rank's share of a checkpoint: the manifest, and every n-th file."""
        path = self.folder / step_name(step)
        try:
            checkpoint = Checkpoint(path, read_manifest(path))
            if checkpoint.step != step:
                raise CheckpointDamagedError(f"{path} holds step {checkpoint.step}", path=path)
            files = checkpoint.files[self._world.rank :: self._world.size]
            checkpoint.verify(files)
            if checkpoint.format_version < 3:  # since then nothing that is not finite is committed
                shapes = {key: info.shape for key, info in checkpoint.keys.items()}
                checkpoint.refuse_nan(files, self._must_be_finite(checkpoint.meta, shapes))
        except Exception as error:  # noqa: BLE001  (the other ranks wait for this one's word, whatever it is)
            return None, SaveFailure.of(error, path, "it cannot be verified")
        return checkpoint, None

    def _set_aside(self, step: int, reason: str) -> str:
        """Rename a damaged checkpoint instead of removing it: the rest of it may still be valuable."""
        name = step_name(step)
        outcome = self._decided_by_main(lambda: self._disk.set_aside(name), "a damaged checkpoint cannot be set aside")
        return f"{name} is damaged and {outcome}: {reason}"

    def give_up_on(self, step: int, reason: str) -> bool:
        """Set the checkpoint of a step aside if there is an older one, which `latest` returns then; collective.

        Args:
            step: The step, of a checkpoint that is whole.
            reason: Why it is of no use, in words.

        Returns:
            Whether there is an older one.
        """
        self._refuse_closed()
        name = step_name(step)

        def set_aside() -> str:
            there = self.steps()
            return self._disk.set_aside(name) if step in there and min(there) < step else ""

        outcome = self._decided_by_main(set_aside, f"{name} cannot be set aside")
        if outcome:
            self.problems.append(f"{name} {outcome}: {reason}")
        return bool(outcome)

    def _refuse_to_start_anew(self, damaged: set[int], incomplete: Sequence[str]) -> None:
        names = self._decided_by_main(lambda: set_aside_in(self.folder), "checkpoints cannot be listed")
        if incomplete:
            reasons = "".join(f"\n  {problem}" for problem in (*incomplete, *self.problems))
            raise SharedFileError(
                f"there is no valid checkpoint in {self.folder}: frozen weights that they share are missing or"
                f" damaged{reasons}",
                remedy="copy the folders frozen-… there from where these checkpoints come from; or move the checkpoints"
                " away to start anew",
                path=self.folder,
            )
        if names or damaged:
            reasons = "".join(f"\n  {problem}" for problem in self.problems)
            raise CheckpointError(
                f"there is no valid checkpoint in {self.folder}, only damaged ones:"
                f" {', '.join(names) or ', '.join(map(step_name, sorted(damaged)))}{reasons}",
                remedy="restore one from a copy; or move the damaged ones away to start anew",
                path=self.folder,
            )

    # Agreement

    def _decided_by_main(
        self, decide: Callable[[], T], doing: str, needed_bytes: int | None = None, free_bytes: int | None = None
    ) -> T:
        """Return rank 0's result of `decide`, or raise its error, on all ranks. The result must be JSON."""
        answer: dict[str, Any] = {}
        if self._world.is_main:
            try:
                answer["value"] = decide()
            except Exception as error:  # noqa: BLE001  (the other ranks wait for this one's word, whatever it is)
                answer["failure"] = SaveFailure.of(error, self.folder, doing, needed_bytes, free_bytes).model_dump()
        answer = self._world.agree(answer)
        if "failure" in answer:
            raise SaveFailure.model_validate(answer["failure"]).error()
        value: T = answer["value"]
        return value

    def _failures(self, own: SaveFailure | None) -> list[SaveFailure | None]:
        """Return every rank's failure, in rank order."""
        records = self._world.gather(own.model_dump() if own else None)
        return [SaveFailure.model_validate(record) if record else None for record in records]

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CheckpointError(f"the checkpoints in {self.folder} were closed", remedy="close after the last save")


def _newly_shared(reports: Sequence[RankReport]) -> tuple[dict[str, StoredFile], dict[str, StoredTensor]]:
    """Return the files of frozen weights that ranks wrote in a save, by name, and the tensors in them."""
    files = {file_name(rank): report.shared_file for rank, report in enumerate(reports) if report.shared_file}
    tables = [RankTable.from_json(report.shared_table).tensors for report in reports if report.shared_table]
    return files, merged_tensors(tables)


def _poisoned(step: int, found: str, rank: int | None) -> CheckpointError:
    where = "" if rank is None else f" on rank {rank}"
    return CheckpointError(
        f"step {step} cannot be saved: {found}{where}, and whatever goes on from it fails",
        remedy="run again under the same name: it goes on from the checkpoint before; a lower learning rate, or"
        " clip_norm, where it happens again. If such values belong there, --no-check-finite",
    )


def _not_whole(problem: str) -> CheckpointError:
    return CheckpointError(
        f"the parts that the ranks handed in do not make whole tensors: {problem}",
        remedy="hand in each element once: replicated tensors on one rank, sharded ones part by part",
    )


def _layout(shards: Sequence[Shard]) -> Layout:
    """Return everything that a save depends on except the numbers themselves."""
    return tuple(
        (shard.key, type(shard.tensor), *_kind(shard.tensor), shard.global_shape, shard.offsets) for shard in shards
    )


def _kind(tensor: Any) -> tuple[Any, ...]:
    """Return dtype, layout and shape; empty for anything that is not a tensor, whatever a user's state holds."""
    return (tensor.dtype, tensor.layout, tensor.shape) if isinstance(tensor, torch.Tensor) else ()


def _free_name(key: str, taken: set[str]) -> str:
    """Return the key, so that other tools show it; numbered where one rank holds several parts of it."""
    name, number = key, 1
    while name in taken:
        number += 1
        name = f"{key}#{number}"
    return name
