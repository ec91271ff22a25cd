"""`python WORDS` for launchers that start it by its path: a process forked from the server of `warm_python.py`.

The file that `made_in` writes takes environment, folder and streams from whoever starts it, and ends with the exit code
of the process. It imports no torch: that takes seconds for each rank of a real launcher.
"""

import os
import sys
from pathlib import Path

from tests import warm_python

_FILE = """#!{python}
import sys
if __name__ == "__main__":  # the process that is forked looks into this file, too
    sys.path.insert(0, {root!r})
    from tests import warm_executable
    warm_executable.run({address!r}, sys.argv[1:])
"""


def made_in(folder: Path) -> Path:
    """Write the file, to be started in place of `sys.executable`."""
    file = folder / "warm-python"
    root = str(Path(__file__).parents[1])
    file.write_text(_FILE.format(python=sys.executable, root=root, address=warm_python.server_address()))
    file.chmod(0o755)
    return file


def run(address: str, words: list[str]) -> None:
    warm_python.use_server(address)
    words = words[1:] if words[0] == "-u" else words
    with warm_python.WarmProcess(words, stdout=1, stderr=2) as process:
        code = process.wait()
    os._exit(code if code >= 0 else 128 - code)
