"""Environment for child processes: they find this package also where it is not installed (the GPU machine)."""

import os
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def child_environ(**more: str) -> dict[str, str]:
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}
