"""The `drivetrain` command: finds the command, parses its flags, runs it, and turns errors into plain messages.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 stopped with Ctrl-C.
"""

import codecs
import io
import os
import sys
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from importlib.abc import MetaPathFinder

from drivetrain import __version__
from drivetrain.commands.command import COMMANDS, LoadedCommand, options_of
from drivetrain.config import SETTINGS, as_launched, from_yaml, nearest, resolve
from drivetrain.config.flags import COMMAND_LINE, FlagParser
from drivetrain.core import loading_modules
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.log import printable
from drivetrain.hardware import detect


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    """Replace letters by the nearest ASCII ones, so that no output ends in a traceback.

    Used for a terminal or pipe that is not UTF-8.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    plain = {"×": "x", "·": "|", "–": "-", "✓": "+", "✗": "x", "µ": "u", "…": "...", "→": "->", "↔": "<->"}
    return "".join(plain.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


codecs.register_error("in_plain_letters", _in_plain_letters)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; only a bug in drivetrain itself shows a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="in_plain_letters")
    try:
        return dispatch(words)
    except DrivetrainError as error:
        print(f"drivetrain: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ndrivetrain: stopped with Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe went away (`drivetrain check | head`): nothing is wrong, so keep Python from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("--version", "-V"):
        print(f"drivetrain {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        meant = nearest(name, COMMANDS)
        remedy = f"did you mean `drivetrain {meant}`?" if meant else "drivetrain --help"
        problem = Problem(name, "there is no such command", name, COMMAND_LINE, ", ".join(COMMANDS), remedy)
        raise ConfigError([problem])

    if sys.stderr.isatty() and "--quiet" not in words and "torch" not in sys.modules:  # logs need no first line
        sys.meta_path.insert(0, FirstLine(f"drivetrain {name}"))
    command = COMMANDS[name].load()
    parser = flag_parser(name, command)
    parsed = parser.parse(words[1:])
    problems = [*parsed.problems, *parser.missing_positionals(parsed)]
    from_file, more = from_yaml(parsed.config_file) if parsed.config_file is not None else ([], [])
    there = command.machine_of  # some commands are about a machine that is not here
    machine = cache(detect if there is None else partial(there, parsed.options))
    resolved = resolve([from_file, as_launched(parsed.given, os.environ)], [*problems, *more], machine)
    for notice in filter(None, (*resolved.notes, parser.passed_on(parsed))):
        print(f"drivetrain: {notice}", file=sys.stderr, flush=True)
    options = options_of(command)(**parsed.options)
    code = command.run(options, resolved)
    if code is None:
        module, _, function = COMMANDS[name].here.partition(":")
        with loading_modules():
            work = getattr(import_module(module), function)
        code = int(work(options, resolved))
    return code


class FirstLine(MetaPathFinder):
    """Prints a line once PyTorch is about to be imported, which takes seconds; it finds no module itself."""

    def __init__(self, command: str) -> None:
        self._command = command

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Print the line if this is PyTorch; the other finders do the rest."""
        # Code that looks up where PyTorch is, as for its version, does not load it.
        if fullname == "torch" and sys._getframe(2).f_globals.get("__name__") != "importlib.util":
            sys.meta_path.remove(self)
            print(f"{self._command}: loading PyTorch …", file=sys.stderr, flush=True)


def flag_parser(name: str, loaded: LoadedCommand) -> FlagParser:
    commands = dict(COMMANDS)  # read once: each lookup reads the file of a command
    used_by: dict[str, list[str]] = {setting.name: [] for setting in SETTINGS}
    for other, obeying in commands.items():
        for setting in obeying.settings:
            used_by[setting.name].append(f"`drivetrain {other}`")
    command = commands[name]
    own = options_of(loaded)
    return FlagParser(
        f"drivetrain {name}", command.summary, own, command.settings, used_by, loaded.examples, command.first
    )


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"drivetrain {__version__}: a PyTorch training runtime that measures instead of guessing", "", "commands:"]
    lines += [f"  drivetrain {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "Start with `drivetrain check`. `drivetrain COMMAND --help` explains a command and its flags."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
