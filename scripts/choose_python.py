"""Print the Python that `make install` takes: python3, or another one on the PATH that is better built.

With a Python built without profile-guided optimization, as pyenv does by default, the tests take a fifth more time. How
one was built is not always recorded (Debian does not), so a short loop is measured. `python3` runs this file, however
old it is; that it is too old is said by the Makefile.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

TESTED = 11  # the minor version: constraints.txt was tested with it, and some packages may have wheels for it only
FASTER = 0.92  # of the time of python3: what is between them is noise
MEASURE = """
import os, sysconfig, time, venv, ensurepip
os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))  # torch.compile needs it
def seconds():
    table, before = {}, time.process_time()
    for number in range(8000):
        key = str(number % 97)
        table[key] = table.get(key, 0) + len([part for part in (number, key) if part])
    return time.process_time() - before
print(min(seconds() for _ in range(5)))
"""


def measured(python):
    """The seconds of a short loop; None where this Python does not run, or lacks `venv` or its headers."""
    try:
        done = subprocess.run([python, "-c", MEASURE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        return float(done.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def faster_than(own, minor, folders):
    """A Python in these folders that takes less time than `own`, which has this minor version; None: there is none."""
    names = dict.fromkeys(f"python3.{number}" for number in (TESTED, minor))
    found = [str(Path(folder, name)) for name in names for folder in folders]
    others = {os.path.realpath(path): path for path in reversed(found) if os.access(path, os.X_OK)}  # the first stays
    others.pop(os.path.realpath(own), None)
    best = {}
    for path in [own, *others.values()] * 3 if others else []:  # in turns: what slows the machine slows all
        seconds = measured(path)
        if seconds is not None:
            best[path] = min(seconds, best.get(path, seconds))
    faster = [path for path in found if path in best and best[path] < FASTER * best.get(own, 0)]
    return faster[0] if faster else None


def main():
    minor = sys.version_info[1]
    optimized = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    folders = os.environ.get("PATH", "").split(os.pathsep)
    found = None if optimized or minor < TESTED else faster_than(sys.executable, minor, folders)
    if found:
        print(f"Taking {found}, which is faster than python3 (to take another: make PYTHON=python3)", file=sys.stderr)
    print(found or "python3")


if __name__ == "__main__":
    main()
