"""The `drivetrain` command: finds the command, parses its flags, runs it, and turns errors into plain messages.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 stopped with Ctrl-C.
"""

import codecs
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

from drivetrain import __version__
from drivetrain.config import SECTIONS, SETTINGS, Setting, from_yaml, nearest, resolve
from drivetrain.config.flags import COMMAND_LINE, FlagParser
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.hardware import detect


@dataclass(frozen=True)
class Command:
    """A command. Its module is loaded when it is called and has `Options`, `EXAMPLES` and `run(options, resolved)`."""

    module: str
    summary: str
    obeys: tuple[str, ...]  # sections and fields of the configuration; flags of others are refused by name
    here: str = ""  # the module whose `run` does it in this process, where the command's own returns None

    def load(self) -> ModuleType:
        return import_module(self.module)

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(setting for setting in SETTINGS if {setting.section, setting.name} & set(self.obeys))


_PLACE = ("run.output_dir", "device.mode", "device.device", "device.ids")

COMMANDS = {
    "check": Command(
        "drivetrain.commands.check",
        "What is here, what would be used, what is wrong and how to fix it.",
        (
            *_PLACE,
            "precision",
            "memory.activations",
            "batch.size",
            "batch.accumulation",
            "distributed.strategy",
            "data.num_workers",
            "data.pin_memory",
            "data.prefetch_factor",
        ),
    ),
    "verify": Command(
        "drivetrain.verify",
        "Does real work on every part of this machine and prints a checklist; exits 0 only if nothing failed.",
        _PLACE,
    ),
    "plan": Command(
        "drivetrain.commands.plan",
        "How a job would be run here, and why; with --measure, tried on its own model. Trains nothing.",
        (
            *(section for section in SECTIONS if section not in ("watch", "checkpoint", "validation", "plan")),
            *("plan.budget_seconds", "plan.file", "plan.cache"),
        ),
        here="drivetrain.commands.plan_in_process",
    ),
    "benchmark": Command(
        "drivetrain.commands.benchmark",
        "What a step of a job takes here: forward, backward, optimizer, memory, MFU. Trains nothing.",
        (
            *(s for s in SECTIONS if s not in ("watch", "checkpoint", "validation", "plan", "batch")),
            *("batch.size", "batch.accumulation"),
        ),
    ),
    "prove": Command(
        "drivetrain.commands.prove",
        "Shows on a job itself that it is trained right: against a plain loop, twice, and after kills.",
        (
            *(section for section in SECTIONS if section not in ("watch", "checkpoint", "validation", "plan")),
            "watch.quiet",
        ),
    ),
    "train": Command(
        "drivetrain.commands.train",
        "Trains a recipe, a job or a script, on every GPU here.",
        tuple(SECTIONS),
        here="drivetrain.recipes",
    ),
    "launch": Command(
        "drivetrain.commands.launch",
        "Starts a script on every GPU here, or on several machines; watches it, and says why it failed.",
        ("run.output_dir", "distributed.skip_preflight"),
    ),
    "eval": Command(
        "drivetrain.commands.evaluate",
        "Loss and metrics of a run's weights over its validation set.",
        (*_PLACE[1:], "precision", "kernels", "memory.activations", "batch.size", "data", "distributed"),
    ),
    "continual": Command(
        "drivetrain.commands.continual",
        "Tasks one after the other: what networks and growing mixtures keep of the first",
        (*_PLACE, "run.name", "precision", "kernels", "watch.quiet"),
    ),
    "status": Command(
        "drivetrain.commands.status",
        "How runs stand: running, finished, stopped or crashed and why; and jobs submitted to SLURM.",
        ("run.output_dir",),
    ),
    "report": Command(
        "drivetrain.commands.report",
        "Writes the page, pictures and summary of a run again, from its records.",
        ("run.output_dir",),
    ),
    "config": Command(
        "drivetrain.commands.config",
        "Prints the effective configuration, and where each value came from.",
        tuple(SECTIONS),
    ),
}


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
        print(f"drivetrain: {error}", file=sys.stderr)
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

    module = COMMANDS[name].load()
    parser = flag_parser(name, module)
    parsed = parser.parse(words[1:])
    problems = [*parsed.problems, *parser.missing_positionals(parsed)]
    from_file, more = from_yaml(parsed.config_file) if parsed.config_file is not None else ([], [])
    machine = cache(detect)
    resolved = resolve([from_file, parsed.given], [*problems, *more], machine)
    for notice in filter(None, (*resolved.notes, parser.passed_on(parsed))):
        print(f"drivetrain: {notice}", file=sys.stderr, flush=True)
    run: Callable[..., int | None] = module.run
    options = module.Options(**parsed.options)
    code = run(options, resolved)
    if code is None:
        inner = import_module(COMMANDS[name].here)
        code = int(inner.run(inner.Options(**options.model_dump(include=set(inner.Options.model_fields))), resolved))
    return code


def flag_parser(name: str, module: ModuleType) -> FlagParser:
    used_by = {
        setting.name: [f"`drivetrain {other}`" for other, command in COMMANDS.items() if setting in command.settings]
        for setting in SETTINGS
    }
    command = COMMANDS[name]
    return FlagParser(f"drivetrain {name}", command.summary, module.Options, command.settings, used_by, module.EXAMPLES)


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"drivetrain {__version__}: a PyTorch training runtime that measures instead of guessing", "", "commands:"]
    lines += [f"  drivetrain {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "Start with `drivetrain check`. `drivetrain COMMAND --help` explains a command and its flags."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
