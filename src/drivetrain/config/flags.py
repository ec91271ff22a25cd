"""Parses the command line, generated from the fields: nothing is listed twice, every problem is reported at once.

argparse does the parsing. Before it, flags get one spelling (`_` is `-`), a boolean takes the next word only if that is
a boolean (`--compile digits` leaves `digits` alone), and unknown flags are taken out: one typo does not hide another.
"""

import argparse
import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from drivetrain.config.resolve import value_problem
from drivetrain.config.settings import (
    BY_NAME,
    SECTIONS,
    SETTINGS,
    SWITCHES,
    Given,
    Setting,
    normal,
    other_names,
    remedy_for_unknown,
    settings_of,
)
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.value import format_list

COMMAND_LINE = "command line"
_TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
_BOOLEAN_WORDS = _TRUE_WORDS | {"false", "no", "off", "0"}


_WIDEST_CHOICES = 60  # letters that stand beside a flag in its help
_WIDEST_LINE = 96  # of names and choices


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()


@dataclass
class ParsedFlags:
    """The parsed command line, not yet checked against the other sources."""

    options: dict[str, Any] = field(default_factory=dict)
    given: list[Given] = field(default_factory=list)
    config_file: Path | None = None
    problems: list[Problem] = field(default_factory=list)


class _Record(argparse.Action):
    """Keeps each value with the spelling it came under."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = "false" if self.nargs == 0 else values
        getattr(namespace, "record").append((self.dest, value, option_string or self.dest))  # noqa: B009


class _ShowHelp(argparse.Action):
    """Prints a text and ends the process, as argparse's own help does."""

    def __init__(self, option_strings: list[str], dest: str, *, text: Callable[[], str], help: str) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(self._text(), end="")
        parser.exit()


class _Help(argparse.HelpFormatter):
    """Formats help in two columns; all names of a flag, then the value once."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = ", ".join(action.option_strings)
        return shown if action.nargs == 0 or not action.metavar else f"{shown} {action.metavar}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem(COMMAND_LINE, message, remedy=f"{self.prog} --help")])


class FlagParser:
    """Parses the flags of one command: its options, and those of the configuration's fields that it obeys.

    Args:
        prog: The words that start it, such as `drivetrain train`.
        summary: What it does.
        options: The model of its own flags.
        settings: The fields of the configuration that it obeys.
        used_elsewhere: The commands that obey each field, by its name.
        examples: Lines for the end of its help.
        first: The flags that `--help` shows, as names of options and fields; `--help-all` shows all. Empty: both do.
    """

    def __init__(
        self,
        prog: str,
        summary: str,
        options: type[BaseModel],
        settings: Sequence[Setting],
        used_elsewhere: Mapping[str, Sequence[str]] | None = None,
        examples: Sequence[str] = (),
        first: Sequence[str] = (),
    ) -> None:
        own = settings_of(options)
        self._options = tuple(setting for setting in own if not setting.is_rest and not setting.is_after_dashes)
        self._rest = next((setting for setting in own if setting.is_rest), None)
        self._after_dashes = next((setting for setting in own if setting.is_after_dashes), None)
        self._settings, self._first = tuple(settings), tuple(first)
        self._prog, self._summary, self._examples = prog, summary, tuple(examples)
        self._script: Path | None = None  # the target, once it was seen to be one
        self._used_elsewhere = used_elsewhere or {}
        self._known: dict[str, Setting | None] = {"config": None, "help": None, "help-all": None}
        self._known |= {name: setting for setting in settings for name in (*setting.names, *setting.switches)}
        self._known |= {normal(setting.flag): setting for setting in self._options if not setting.is_positional}
        self._several = next((option for option in self._options if option.is_positional and option.is_list), None)
        if not settings:
            del self._known["config"]
        self._parser = self._empty_parser()
        group = self._parser.add_argument_group("options")
        self._add_help(group)
        self._add_config(group)
        for setting in self._options:
            if not setting.is_positional:
                self._add(group, setting)
        for section in dict.fromkeys(setting.section for setting in settings):
            group = self._parser.add_argument_group(f"{section}: {SECTIONS[section].splitlines()[0].rstrip('.')}")
            for setting in settings:
                if setting.section == section:
                    self._add(group, setting)

    def _empty_parser(self, *more: str) -> _Parser:
        """Return a parser of the positional words alone. `more` are lines above the examples."""
        positionals = [option for option in self._options if option.is_positional]
        names = [_positional_in_usage(option) for option in positionals]
        lines = ["examples:", *(f"  {example}" for example in self._examples)] if self._examples else []
        parser = _Parser(
            prog=self._prog,
            usage=" ".join(
                [self._prog, "[flags]", *names, f"[{self._rest.field.upper()}]"]
                if self._rest is not None
                else [self._prog, *names, "[flags]", *(["[-- FLAGS OF A SCRIPT]"] if self._after_dashes else [])]
            ),
            description=self._summary,
            epilog="\n".join([*more, *lines]) or None,
            formatter_class=lambda prog: _WithExamples(prog),
            allow_abbrev=False,
            add_help=False,
        )
        for setting in positionals:
            self._add_positional(parser, setting)
        return parser

    def _add_help(self, group: argparse._ArgumentGroup) -> None:
        words = "show the flags most people need, and exit" if self._first else "show this and exit"
        everything = "show every flag" if self._first else argparse.SUPPRESS
        group.add_argument("-h", "--help", action=_ShowHelp, text=self.format_help, help=words)
        group.add_argument("--help-all", action=_ShowHelp, text=self.format_help_all, help=everything)

    def _add_config(self, group: argparse._ArgumentGroup) -> None:
        if "config" in self._known:
            group.add_argument("--config", metavar="FILE", nargs="?", const=_MISSING, action=_Record, dest="config",
                               help="YAML file with any keys of `drivetrain config`; flags win over it")  # fmt: skip

    @property
    def flags(self) -> tuple[str, ...]:
        """Every flag that this command takes, for the test that freezes the list."""
        return tuple(sorted(f"--{name}" for name in self._known))

    def format_help(self) -> str:
        """Return what `--help` shows: the flags most people need where these are given, else all."""
        if not self._first:
            return self._parser.format_help()
        by_name = {setting.field: setting for setting in self._options} | {
            setting.name: setting for setting in self._settings
        }
        flags = {name for name, setting in by_name.items() if not setting.is_positional} | {"config"} & {*self._known}
        rest = len(flags - {*self._first})
        parser = self._empty_parser(f"`{self._prog} --help-all` shows the other {rest} flags.", "")
        group = parser.add_argument_group("the flags most people need")
        for name in self._first:
            if name == "config":
                self._add_config(group)
            else:
                self._add(group, by_name[name], is_brief=True)
        return parser.format_help()

    def format_help_all(self) -> str:
        """Return what `--help-all` shows: every flag."""
        return self._parser.format_help()

    def parse(self, argv: Sequence[str]) -> ParsedFlags:
        parsed = ParsedFlags()
        if self._rest is not None:
            end = self._first_positional(argv) + 1
            argv, parsed.options[self._rest.field] = argv[:end], tuple(argv[end:])
        if self._after_dashes is not None:
            argv = self._without_those_of_script(argv, parsed)
        tokens = self._one_spelling(argv, parsed.problems)
        namespace = argparse.Namespace(record=[])
        try:
            _, rest = self._parser.parse_known_args(tokens, namespace)
        except ConfigError as error:
            parsed.problems += error.problems
            return parsed
        more = [] if self._several is None else [word for word in rest if word != "--"]
        for word in () if more else rest:
            remedy = f"{self._parser.prog} --help"
            if not any(option.is_positional for option in self._options):
                remedy = f"{self._parser.prog} takes no job; drivetrain plan {word} shows how it would be run"
            if self._script is not None:
                remedy = f"words for the script stand after --: {self._parser.prog} {self._script} -- {word}"
            parsed.problems.append(Problem(word, "nothing takes this word", word, COMMAND_LINE, remedy=remedy))
        self._sort_out(namespace.record, parsed)
        if self._several is not None and self._several.field in parsed.options:
            parsed.options[self._several.field] = (parsed.options[self._several.field], *more)
        return parsed

    def _without_those_of_script(self, argv: Sequence[str], parsed: ParsedFlags) -> Sequence[str]:
        """Take the words after `--` for the script, and return those before."""
        assert self._after_dashes is not None
        end = argv.index("--") if "--" in argv else len(argv)
        words = tuple(argv[end + 1 :])
        self._script = next((Path(word) for word in argv[:end] if word.endswith(".py")), None)
        if words and self._script is None:
            message = "what follows is given to a script, and there is none"
            remedy = "leave it out; flags of drivetrain stand before it"
            parsed.problems.append(Problem("--", message, " ".join(words), COMMAND_LINE, remedy=remedy))
        if words:
            parsed.options[self._after_dashes.field] = words
        return argv[:end]

    def _first_positional(self, argv: Sequence[str]) -> int:
        """Return where the command's flags end and its target begins: the target's flags follow, and are not parsed."""
        place = 0
        while place < len(argv) and argv[place].startswith("-"):
            name, equals, _ = argv[place].partition("=")
            key = normal(name)
            setting = self._known.get(key)
            following = argv[place + 1].lower() if place + 1 < len(argv) else ""
            is_bool = setting is not None and setting.is_bool
            is_switch = key in ("help", "help-all", "h") or key.startswith("no-") or is_bool
            takes_next = not equals and (following in _BOOLEAN_WORDS if is_switch else bool(following))
            place += 2 if takes_next else 1
        return place

    def _add(self, group: argparse._ArgumentGroup, setting: Setting, *, is_brief: bool = False) -> None:
        names = [setting.flag, *(f"--{name}" for name in setting.names if f"--{name}" != setting.flag)]
        names = [name for name in names if not is_brief or name == setting.flag or "." not in name]
        says_default = setting.help.endswith(")") or not setting.section
        text = setting.help + ("" if says_default else f" (default: {_shown(setting.default)})")
        choices = [*setting.choices, *(["MODULE:NAME"] if setting.takes_own else [])]
        choices += ["N"] if setting.number_beside_choices else []
        metavar = "{" + ",".join(choices) + "}" if setting.choices else setting.field.upper()
        if len(metavar) > _WIDEST_CHOICES or len(", ".join((*names, metavar))) > _WIDEST_LINE:  # described in words
            metavar = setting.field.upper()
        if setting.is_bool:
            group.add_argument(*names, nargs="?", const="true", action=_Record, dest=names[0][2:], help=text)
            negated = [f"--no-{name[2:]}" for name in names]
            group.add_argument(*negated, nargs=0, action=_Record, dest=names[0][2:], help=argparse.SUPPRESS)
            return
        group.add_argument(
            *names, metavar=metavar, nargs="?", const=_MISSING, action=_Record, dest=names[0][2:],
            help=text.replace("%", "%%"),
        )  # fmt: skip
        for value in dict.fromkeys(setting.switches.values()):
            switches = [f"--{name}" for name, meant in setting.switches.items() if meant == value]
            meaning = f"{setting.flag} {value}"
            group.add_argument(*switches, nargs="?", const="true", action=_Record, dest=switches[0][2:], help=meaning)

    def _add_positional(self, parser: argparse.ArgumentParser, setting: Setting) -> None:
        parser.add_argument(
            setting.field, metavar=setting.field.upper(), nargs="?", default=argparse.SUPPRESS, action=_Record,
            help=setting.help,
        )  # fmt: skip

    def _one_spelling(self, argv: Sequence[str], problems: list[Problem]) -> list[str]:
        tokens: list[str] = []
        words = list(argv)
        while words:
            word = words.pop(0)
            if word == "--":
                return [*tokens, "--", *words]
            if not word.startswith("--"):
                if word.startswith("-") and word != "-h" and not _is_number(word):
                    problems.append(
                        Problem(word, "there is no such flag", word, COMMAND_LINE, remedy="flags start with --")
                    )
                    continue
                tokens.append(word)
                continue
            name, equals, value = word.partition("=")
            key = normal(name)
            setting = self._known.get(key)
            if not self._is_known(key):
                if not equals and words and not words[0].startswith("-"):
                    value = words.pop(0)  # most likely the unknown flag's value, not a positional word
                problems.append(self._unknown(name, key, value))
            elif setting and key in setting.switches and not equals and words and words[0].endswith(".json"):
                tokens.append(f"--{key}={words.pop(0)}")  # a file where none belongs, which is then said of this flag
            elif setting and (setting.is_bool or key in setting.switches) and not equals:
                takes_next = words and words[0].lower() in _BOOLEAN_WORDS
                tokens.append(f"--{key}={words.pop(0) if takes_next else 'true'}")
            else:
                tokens.append(f"--{key}{equals}{value}")
        return tokens

    def _unknown(self, name: str, key: str, value: str) -> Problem:
        after = f"{self._parser.prog} {self._script} … -- {name} {value}".rstrip()
        if self._script is not None and name in flags_in(self._script):
            message = f"it is a flag of {self._script}, not of drivetrain"
            return Problem(name, message, value or None, COMMAND_LINE, remedy=f"give it after --: {after}")
        elsewhere = _elsewhere(key)
        if elsewhere is not None:
            commands = self._used_elsewhere.get(elsewhere.name, ())
            return Problem(
                name,
                f"`{self._parser.prog}` does not use it",
                value or None,
                COMMAND_LINE,
                remedy=f"leave it out; it is a flag of {', '.join(commands)}",
            )
        remedy = remedy_for_unknown(key, self._known, lambda setting, value: f"--{setting} {value}".rstrip())
        remedy = remedy or f"`{self._parser.prog} --help` lists every flag"
        if self._script is not None:
            remedy += f"; a flag of the script stands after --: {after}"
        return Problem(name, "there is no such flag", value or None, COMMAND_LINE, remedy=remedy)

    def _sort_out(self, record: list[tuple[str, Any, str]], parsed: ParsedFlags) -> None:
        own = {setting.field if setting.is_positional else normal(setting.flag): setting for setting in self._options}
        by_flag = {normal(setting.flag): setting for setting in SETTINGS}
        for dest, value, spelled in record:
            setting = own.get(dest) or by_flag.get(dest)
            if setting is None and dest in SWITCHES:
                self._take_switch(dest, value, spelled, parsed)
            elif value is _MISSING:
                allowed = setting.allowed if setting else "the path of a YAML file"
                parsed.problems.append(
                    Problem(spelled, "it needs a value", None, COMMAND_LINE, allowed, f"{spelled} VALUE")
                )
            elif setting is None:
                parsed.config_file = Path(value)
            elif setting is self._several:
                parsed.options[setting.field] = value  # a word: it may have a comma in it
            elif setting.section:
                parsed.given.append(Given(setting.name, value, spelled, COMMAND_LINE))
            else:
                self._take_option(setting, value, spelled, parsed)

    def _take_switch(self, name: str, value: str, spelled: str, parsed: ParsedFlags) -> None:
        """Take a flag that stands for a value of its field; switched off, it sets nothing."""
        setting = SWITCHES[name]
        if value.lower() in _TRUE_WORDS:
            parsed.given.append(Given(setting.name, setting.switches[name], spelled, COMMAND_LINE))
        elif value.lower() not in _BOOLEAN_WORDS:
            message = f"got {value!r}; it is a switch for {setting.flag} {setting.switches[name]}"
            remedy = f"{spelled} alone" if name != "deepspeed" else "--deepspeed alone; --deepspeed-config names a file"
            parsed.problems.append(Problem(spelled, message, value, COMMAND_LINE, "true or false", remedy))

    def _take_option(self, setting: Setting, value: Any, spelled: str, parsed: ParsedFlags) -> None:
        try:
            parsed.options[setting.field] = setting.parse(value)
        except ValueError as error:
            given = Given(setting.name, value, spelled, COMMAND_LINE)
            parsed.problems.append(value_problem(setting, given, str(error)))

    def passed_on(self, parsed: ParsedFlags) -> str:
        """Return one line where the words after the script hold drivetrain flags that the script's text does not name.

        It is a notice, not a problem: a script may read such a flag somewhere else.
        """
        if self._rest is None:
            return ""
        script = next(str(parsed.options[option.field]) for option in self._options if option.is_positional)
        words = parsed.options[self._rest.field]
        spelled = [word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]]
        its_own = flags_in(Path(script)) | {"--help"}
        flags = [word for word in dict.fromkeys(spelled) if word.startswith("--") and word not in its_own]
        ours = [word for word in flags if self._is_known(normal(word))]
        others = [word for word in flags if word not in ours and _elsewhere(normal(word)) is not None]
        hints = []
        if ours:
            hints.append(f"before {script}, {format_list(ours)} would be drivetrain's")
        if others:
            hints.append(f"drivetrain takes {format_list(others)} in `drivetrain train {script} …`")
        # As torchrun calls the number of processes: nothing in a script would read it.
        foreign = {word: f"--{meant}" for word in flags if (meant := self._meant_by(word))}
        if foreign:
            renamed = [f"{name} (for {word})" for word, name in foreign.items()]
            hints.append(f"drivetrain takes {format_list(renamed)} before {script}")
        if not hints:
            return ""
        given = format_list([*ours, *others, *foreign])
        return f"given to {script}, as all that follows it: {given}; {'; '.join(hints)}"

    def _meant_by(self, word: str) -> str:
        """Return the flag that another trainer's name stands for, if the command has it; else nothing."""
        key = normal(word)
        known = [name for name in other_names(key) if name in self._known]
        return "" if self._is_known(key) or _elsewhere(key) is not None or not known else known[0]

    def _is_known(self, key: str) -> bool:
        negated = self._known.get(key.removeprefix("no-")) if key.startswith("no-") else None
        return key in self._known or (negated is not None and negated.is_bool)

    def missing_positionals(self, parsed: ParsedFlags) -> list[Problem]:
        return [
            Problem(
                setting.field.upper(), "it is missing", None, COMMAND_LINE, setting.help, f"{self._parser.prog} --help"
            )
            for setting in self._options
            if setting.is_positional and setting.info.is_required() and setting.field not in parsed.options
        ]


def _positional_in_usage(option: Setting) -> str:
    return f"{option.field.upper()} …" if option.is_list else option.field.upper()


class _WithExamples(_Help, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the examples below the flags."""


def _elsewhere(key: str) -> Setting | None:
    return BY_NAME.get(key) or SWITCHES.get(key) or BY_NAME.get(key.removeprefix("no-"))


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return "auto" if default is None else str(default)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


_READERS = ("argv", "parse", "click", "typer", "fire", "hydra", "tyro", "absl", "docopt")


def unread_flags(script: Path, words: Sequence[str]) -> str:
    """Return one line where a script was started with flags of drivetrain and reads no flags at all."""
    spelled = [word.partition("=")[0] for word in words]
    ours = [word for word in dict.fromkeys(spelled) if word.startswith("--") and _elsewhere(normal(word)) is not None]
    try:
        text = script.read_text(encoding="utf-8") if ours else ""
    except (OSError, ValueError):
        return ""
    if not ours or any(reader in text for reader in _READERS):
        return ""
    return (
        f"{script.name} does not read {format_list(ours)}, and so nothing obeys it; `drivetrain train {script.name} "
        f"{ours[0]} …` does"
    )


def flags_in(script: Path) -> frozenset[str]:
    """Return every string in a script that is a flag. Empty where it cannot be read: running it reports why."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return frozenset()
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    found = {part for text in texts if text.startswith("--") for part in text.replace("/", " ").split()}
    return frozenset(found | {f"--no-{flag[2:]}" for flag in found})
