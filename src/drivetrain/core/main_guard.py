"""Detects scripts that train while being imported: processes started by spawn import the script and would train."""

import ast
import multiprocessing
import sys
from pathlib import Path
from types import FrameType

from drivetrain.core.errors import DrivetrainError

REMEDY = 'put what starts the training below `if __name__ == "__main__":` at the end of the script'


def refuse_while_importing() -> None:
    """Raise in a process that was started by spawn or forkserver and is just importing the script it belongs to."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise DrivetrainError(
            "the training was started again by a child process: processes that are started by spawn (loader workers, "
            "mp.spawn) import the script, and it starts the training when it is imported",
            remedy=REMEDY,
        )


def trains_when_imported() -> bool:
    """Return whether the running script called this from code that importing the script would run as well."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    line = _line_of_main()
    if path is None or line is None:
        return False
    try:
        statements = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    here = [each for each in statements if each.lineno <= line <= (each.end_lineno or each.lineno)]
    return bool(here) and not any(isinstance(each, ast.If) and _asks_for_name(each.test) for each in here)


def _line_of_main() -> int | None:
    """Return the line that the script's top level is executing; None if it is not being run, as in a notebook."""
    main = vars(sys.modules["__main__"])
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is main:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _asks_for_name(test: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(test))
