"""Pictures, histograms and texts that hooks log: as files in the run's folder `media`, and as trackers take them."""

import json
import re
from pathlib import Path

from drivetrain.core.logged import Image, Media, Text
from drivetrain.core.run_folder import write_atomically


def keep_media(folder: Path, name: str, value: Media, step: int) -> Path:
    """Write something that was logged after `step` steps into the run's folder, and return its file."""
    folder = folder / "media"
    folder.mkdir(exist_ok=True)
    stem = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-{step:08d}"
    if isinstance(value, Image):
        return write_atomically(folder / f"{stem}.png", value.as_png())
    if isinstance(value, Text):
        return write_atomically(folder / f"{stem}.txt", value.text)
    counts, edges = value.counted()
    return write_atomically(folder / f"{stem}.json", json.dumps({"counts": counts, "edges": edges}) + "\n")
