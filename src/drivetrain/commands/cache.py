"""`drivetrain cache`: carries what was planned and compiled on one machine to others of the same kind.

A file is a compressed tar archive: `manifest.json`, which says what kind of machine it is for, and the files of the
plan cache and of torch's compile caches. Compiled files are code that torch runs, some of them pickles. So a file of
somebody else is as good as a program of theirs; what is checked here is that it fits and stays inside the caches.
"""

import getpass
import json
import os
import platform
import re
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from drivetrain.commands.command import Command
from drivetrain.config import Positional, Resolved
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.value import Value, format_bytes, format_count
from drivetrain.hardware import Hardware, cache_folder, detect

COMMAND = Command(summary="Carries plans and compiled code to other machines of the same kind, in one file.")
EXAMPLES = (
    "drivetrain cache pack warm.tar.gz      after a run: what was planned and compiled here, in a file",
    "drivetrain cache unpack warm.tar.gz    on another machine of the same kind, before its first run",
)

FORMAT, MANIFEST = 1, "manifest.json"
MOST_FILES, MOST_BYTES, MOST_FILE_BYTES, MOST_MANIFEST_BYTES = 200_000, 16 * 2**30, 2 * 2**30, 2**16
TELL_SECONDS = 5.0  # between two lines of progress
# What belongs to the process that wrote it: locks, journals of probes, files that were being written.
_LEFT_OUT = re.compile(r"(^|/)(locks|[^/]*\.lock|[^/]*\.tmp(\.[^/]*)?|\.[^/]*|[^/]*\.probes\.jsonl)(/|$)")


class CacheOptions(BaseModel):
    action: Annotated[Literal["pack", "unpack"], Positional()] = Field(
        description="pack: write the caches of this machine to FILE; unpack: add the content of FILE to them. Plans "
        "are in $DRIVETRAIN_CACHE (default: ~/.cache/drivetrain), compiled code in $TORCHINDUCTOR_CACHE_DIR and "
        "$TRITON_CACHE_DIR (default: where torch keeps it)"
    )
    file: Annotated[Path, Positional()] = Field(
        description="the file. It is for machines with the same GPU (without one: the same CPU), torch, CUDA, Triton "
        "and Python, and unpacking refuses any other. Compiled code is run by torch: unpack only what you trust"
    )


class PackedCache(Value):
    """Describes a packed cache: the kind of machine it is for, and how much it holds."""

    format: int = FORMAT
    made: str = ""
    machine: dict[str, str]
    num_files: int
    num_bytes: int


def run(options: CacheOptions, resolved: Resolved) -> int:
    return {"pack": pack, "unpack": unpack}[options.action](options.file)


def roots(environ: Mapping[str, str] | None = None) -> dict[str, Path]:
    """Return the folders that are packed, by their names in the file."""
    environ = os.environ if environ is None else environ
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    inductor = environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    triton = environ.get("TRITON_CACHE_DIR") or Path(inductor) / "triton" / "0"  # where torch has it for one GPU
    return {"plans": cache_folder(environ) / "plans", "inductor": Path(inductor), "triton": Path(triton)}


def kind_of_machine(hardware: Hardware | None = None) -> dict[str, str]:
    """Return what plans and compiled code depend on. Machines that agree in it are of one kind."""
    found = hardware or detect()
    return {
        "device": ", ".join(sorted({gpu.name for gpu in found.gpus})) or found.cpu.model,
        "architecture": platform.machine(),
        "Python": ".".join(found.software.python.split(".")[:2]),
        "torch": found.software.torch,
        "CUDA": found.software.torch_cuda,
        "Triton": _version("triton"),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def pack(file: Path) -> int:
    """Write what this machine planned and compiled to a file, whole or not at all."""
    found = list(_files(roots()))
    if not found:
        raise DrivetrainError(
            "nothing was planned or compiled here yet",
            remedy="train first, with the same DRIVETRAIN_CACHE and TORCHINDUCTOR_CACHE_DIR as now",
        )
    num_bytes = sum(path.stat().st_size for _, path in found)
    made = time.strftime("%Y-%m-%d %H:%M:%S %z")
    manifest = PackedCache(made=made, machine=kind_of_machine(), num_files=len(found), num_bytes=num_bytes)
    _refuse_too_large(manifest.num_files, num_bytes)
    progress = _Progress("packed", len(found), num_bytes)
    beside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(beside, "w:gz", compresslevel=1) as archive:
            _add(archive, MANIFEST, manifest.model_dump_json(indent=2).encode())
            for name, path in found:
                content = _content(path)
                if content is not None:  # it went meanwhile: a cache may be cleaned
                    _add(archive, name, content)
                    progress.one(len(content))
        beside.replace(file)
    except OSError as error:
        raise DrivetrainError(f"{file} cannot be written: {error}", remedy="choose another place") from error
    finally:
        beside.unlink(missing_ok=True)
    print(f"{file}: {progress.words}, {format_bytes(file.stat().st_size)} in all, for {_in_words(manifest.machine)}")
    print(f"on another machine of this kind: drivetrain cache unpack {file.name}")
    return 0


def unpack(file: Path) -> int:
    """Add the content of a file to the caches of this machine. What is there already stays."""
    where, num_new = roots(), 0
    try:
        with tarfile.open(file, "r|gz") as archive:
            members = iter(archive)
            manifest = _manifest(archive, next(members, None))
            _refuse_other_machines(manifest, kind_of_machine())
            progress = _Progress("read", manifest.num_files, manifest.num_bytes)
            for member in members:
                target = _target(member, where)
                progress.one(member.size)
                _refuse_too_large(progress.num_files, progress.num_bytes)
                content = archive.extractfile(member)
                assert content is not None
                num_new += _keep(target, content)
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, FileNotFoundError) and error.filename == str(file):
            raise DrivetrainError(f"there is no {file}", remedy="`drivetrain cache pack` makes one") from None
        raise DrivetrainError(
            f"{file} cannot be unpacked: {error}", remedy="copy the file again, or check that there is room for it"
        ) from error
    print(f"{file}: {progress.words}, {num_new} of them new here, for {_in_words(manifest.machine)}")
    return 0


def _files(where: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    """Yield the files of the caches, each with its name in the archive; a folder inside another one comes once."""
    inner = {path.resolve() for path in where.values()}
    for name, root in where.items():
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(each for each in folders if (Path(folder) / each).resolve() not in inner)
            for path in (Path(folder) / each for each in sorted(files)):
                inside = f"{name}/{path.relative_to(root).as_posix()}"
                if not _LEFT_OUT.search(inside) and path.is_file() and not path.is_symlink():
                    yield inside, path


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
    archive.addfile(member, BytesIO(content))


def _manifest(archive: tarfile.TarFile, member: tarfile.TarInfo | None) -> PackedCache:
    """Return the manifest, which is the first file of an archive of ours."""
    content = None
    if member is not None and member.name == MANIFEST and member.isreg() and member.size <= MOST_MANIFEST_BYTES:
        content = archive.extractfile(member)
    try:
        found = PackedCache.model_validate(json.loads(content.read() if content is not None else b""))
    except (ValueError, ValidationError):
        found = None
    if found is None or found.format != FORMAT:
        raise DrivetrainError("it is not a file of `drivetrain cache pack`, or one of another version of it",
                              remedy="make it again with the version that is installed here")  # fmt: skip
    return found


def _refuse_other_machines(manifest: PackedCache, here: Mapping[str, str]) -> None:
    others = {name: manifest.machine.get(name, "") for name in here if manifest.machine.get(name, "") != here[name]}
    if others:
        told = "; ".join(
            f"{name} {value or 'none'}, and here it is {here[name] or 'none'}" for name, value in others.items()
        )
        raise DrivetrainError(
            f"it was made for another kind of machine: {told}",
            remedy="train once here; what was compiled for another machine would not be used, or be wrong",
        )


def _refuse_too_large(num_files: int, num_bytes: int) -> None:
    if num_files > MOST_FILES or num_bytes > MOST_BYTES:
        raise DrivetrainError(
            f"{format_count(num_files, 'file')} of {format_bytes(num_bytes)} are more than a cache file may hold: "
            f"{MOST_FILES:,} of {format_bytes(MOST_BYTES)}",
            remedy="point TORCHINDUCTOR_CACHE_DIR to a folder of this job alone, train once, and pack that",
        )


def _target(member: tarfile.TarInfo, where: Mapping[str, Path]) -> Path:
    """Return where a file of the archive goes; raises for anything that is not a file inside one of the caches."""
    path = PurePosixPath(member.name)
    root = where.get(path.parts[0]) if path.parts else None
    is_plain = not path.is_absolute() and ".." not in path.parts and "\\" not in member.name and len(path.parts) > 1
    if root is None or not is_plain or not member.isreg() or member.size > MOST_FILE_BYTES:
        raise DrivetrainError(f"it holds {member.name!r}, which is no file of a cache", remedy="do not use this file")
    target = root.joinpath(*path.parts[1:])
    if not target.parent.resolve().is_relative_to(root.resolve()):
        raise DrivetrainError(
            f"{member.name!r} would be written outside of {root}", remedy=f"remove the link in {root}"
        )
    return target


def _keep(target: Path, content: IO[bytes]) -> bool:
    """Write a file, unless there is one: names tell what is in them. Return whether it is new."""
    if target.exists() or target.is_symlink():
        return False
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with beside.open("xb") as file:
            while piece := content.read(1 << 20):
                file.write(piece)
        # Shared objects are loaded, not run: they need no other rights than the rest.
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    return True


def _in_words(machine: Mapping[str, str]) -> str:
    return ", ".join(value if name == "device" else f"{name} {value}" for name, value in machine.items() if value)


class _Progress:
    """Counts files, and tells how far it is where that takes long."""

    def __init__(self, verb: str, num_files: int, num_bytes: int) -> None:
        self._verb, self._whole = verb, f"{format_count(num_files, 'file')} of {format_bytes(num_bytes)}"
        self.num_files = self.num_bytes = 0
        self._told = time.monotonic()

    def one(self, num_bytes: int) -> None:
        self.num_files += 1
        self.num_bytes += num_bytes
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            print(f"{self._verb} {self.words} (of {self._whole})", flush=True)

    @property
    def words(self) -> str:
        return f"{format_count(self.num_files, 'file')} of {format_bytes(self.num_bytes)}"
