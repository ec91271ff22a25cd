"""The process of one probe: runs it, writes its outcome as JSON, ends. Any failure costs one row, not the run."""

import errno
import faulthandler
import os
import resource
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path

from drivetrain.core.run_folder import write_atomically
from drivetrain.core.value import Value
from drivetrain.verify.probe import Outcome, ProbeSetup, failed

# The path of a Unix socket has 107 bytes, and multiprocessing puts `/pymp-abcdefgh/listener-abcdefgh` behind TMPDIR.
LONGEST_TMPDIR = 107 - 32


class Request(Value):
    """The request that the process gets."""

    name: str
    function: str
    setup: ProbeSetup
    time_limit_seconds: float

    @property
    def outcome_path(self) -> Path:
        return Path(self.setup.scratch).with_suffix(".outcome.json")


def run_request(request: Request) -> None:
    """Run the probe and leave its outcome in a file that exists only when it is complete."""
    # A crash leaves its Python lines in the captured output; so does a hang, ended with SIGABRT. No core files.
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if len(request.setup.scratch) <= LONGEST_TMPDIR:
        # Everything temporary (compiler caches, sockets of loader workers) goes where the runner cleans up.
        os.environ["TMPDIR"] = request.setup.scratch
        tempfile.tempdir = None
    try:
        module, _, function = request.function.partition(":")
        outcome = getattr(import_module(module), function)(request.setup)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{request.function} returned {type(outcome).__name__}, not an Outcome")
    except BaseException as error:  # noqa: BLE001  (a SystemExit or KeyboardInterrupt inside a probe is its failure, too)
        traceback.print_exc()
        outcome = explain(error, request)
    write_atomically(request.outcome_path, outcome.to_json())
    sys.stdout.flush()
    sys.stderr.flush()


def explain(error: BaseException, request: Request) -> Outcome:
    """Return the failure of a probe that raised, with the remedy for the causes that are known."""
    sentence = f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(": ")
    return failed(sentence, remedy=_remedy(error, request))


def _remedy(error: BaseException, request: Request) -> str:
    text = str(error)
    again = f"drivetrain verify --only {request.name} --json shows the end of its output"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in text:
        return "free memory (nvidia-smi, ps aux --sort=-rss show who holds it), then run drivetrain verify again"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        return f"pip install {'--force-reinstall ' if package == 'drivetrain' else ''}{package}"
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
    ):
        return "drivetrain verify --output-dir FOLDER, with a folder that has room and that you may write to"
    if "no kernel image" in text or "not compiled with CUDA" in text:
        return "install the torch build for this GPU: https://pytorch.org/get-started/locally/"
    return again


def main() -> None:
    """Run a probe where fork is not available: the request comes from a file instead of from memory."""
    request = Request.from_json(Path(sys.argv[1]).read_bytes())
    run_request(request)
    # Threads and handlers of libraries have no say in how a probe that is done ends.
    os._exit(0)


if __name__ == "__main__":
    main()
