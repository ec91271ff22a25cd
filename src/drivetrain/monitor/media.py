"""Pictures, histograms and texts that hooks log: as files in the run's folder `media`, and as trackers take them."""

import hashlib
import json
import re
from pathlib import Path

from drivetrain.core.logged import Image, Media, Text
from drivetrain.core.run_folder import write_atomically

LONGEST_NAME = 100


def keep_media(folder: Path, name: str, value: Media, step: int) -> Path:
    """Write something that was logged after `step` steps into the run's folder, and return its file."""
    folder = folder / "media"
    folder.mkdir(exist_ok=True)
    stem = f"{_file_name(name)}-{step:08d}"
    if isinstance(value, Image):
        return write_atomically(folder / f"{stem}.png", value.as_png())
    if isinstance(value, Text):
        return write_atomically(folder / f"{stem}.txt", value.text)
    counts, edges = value.counted()
    return write_atomically(folder / f"{stem}.json", json.dumps({"counts": counts, "edges": edges}) + "\n")


def _file_name(name: str) -> str:
    """Return a name as files can have it. Where much of it would be lost, a digest keeps it apart from others."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    is_lost = not name.isascii() or len(plain) > LONGEST_NAME
    return (
        f"{plain[:LONGEST_NAME]}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:8]}" if is_lost else plain
    )
