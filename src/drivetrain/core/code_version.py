"""Identifies the code of a run: versions of the packages that matter, and hashes of the script and of this package."""

import hashlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path


def code_version(script: str = "") -> dict[str, str]:
    """Return the versions by name, ordered by how much a difference matters."""
    found = {"drivetrain": _package(), "python": platform.python_version(), "torch": _version("torch")}
    path = Path(script) if script else None
    if path is not None and path.is_file():
        found = {"script": hashlib.sha256(path.read_bytes()).hexdigest()[:12], **found}
    return found


@cache  # each look parses the metadata file, before every run of several processes
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


@cache
def _package() -> str:
    """Return a hash of this package's source: two checkouts of one version may differ."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
