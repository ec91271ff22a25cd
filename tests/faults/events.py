"""Reads what a run wrote down about its faults."""

import json
from pathlib import Path
from typing import Any


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(row) for row in (folder / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]
