"""A command of `drivetrain` is one file of this folder: `COMMAND`, `EXAMPLES` and `run(options, resolved)`.

Commands of one family share a file, in which these names end in the command's: `COMMAND_EVAL`, `run_eval`.

`COMMAND` is read without importing the file, so that `drivetrain --help` and the messages about flags are quick, and
commands that need no torch load none. The type of `options` is a pydantic model, whose fields are the command's flags.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, NamedTuple, get_type_hints

from pydantic import BaseModel, Field

from drivetrain.config import SETTINGS, AfterDashes, Positional, Setting
from drivetrain.core import plugins
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.plugins import literal_facts
from drivetrain.core.value import Value


class LoadedCommand(NamedTuple):
    """The code of a command.

    Args:
        place: where it is, for messages.
        run: does the work, and returns the exit code; None: the function that `here` names does it.
        examples: lines for `--help`.
        machine_of: returns the machine that the options are about, where that is not this one.
    """

    place: str
    run: Callable[..., int | None]
    examples: tuple[str, ...]
    machine_of: Callable[[dict[str, Any]], Any] | None


class Command(Value):
    """What is known of a command before its file is imported. Its arguments are literals.

    Args:
        summary: one line for `drivetrain --help`.
        obeys: sections and fields of the configuration that it obeys; flags of others are refused by name.
        all_but: for a command that obeys everything but these, and what `obeys` names.
        here: what does the work in this process, where the command's own `run` returns None: `module:function`.
        first: the flags that `--help` shows: names of its options and of fields, and `config`. `--help-all` shows the
            others as well. Empty: `--help` shows all.
        target: where it is, as `module:COMMAND`; found, not written.
    """

    summary: str = ""
    obeys: tuple[str, ...] = ()
    all_but: tuple[str, ...] | None = None
    here: str = ""
    first: tuple[str, ...] = ()
    target: str = ""

    def load(self) -> LoadedCommand:
        name, _, attribute = self.target.partition(":")
        if not self.summary:
            raise DrivetrainError(
                f"{name} says nothing of its command that can be read without importing it",
                remedy='assign COMMAND = Command(summary="…", obeys=(…)) there, with literals',
            )
        module = import_module(name)
        ending = attribute.removeprefix("COMMAND") if attribute.startswith("COMMAND_") else ""
        run = f"run{ending.lower()}"
        machine_of = getattr(module, f"machine_of{ending.lower()}", None)
        return LoadedCommand(f"{name}.{run}", getattr(module, run), getattr(module, f"EXAMPLES{ending}"), machine_of)

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(setting for setting in SETTINGS if self._obeys(setting))

    def _obeys(self, setting: Setting) -> bool:
        names = {setting.section, setting.name}
        return bool(names & {*self.obeys}) or (self.all_but is not None and not names & {*self.all_but})


class ForScript(BaseModel):
    """The options of a command whose target may be a script."""

    target: Annotated[str, Positional()] = Field(description="a recipe, `module:function` or a script, as for `train`")
    arguments: Annotated[tuple[str, ...], AfterDashes()] = Field((), description="for a script, as they are")


class Commands(Mapping[str, Command]):
    """The commands by name: the files of this folder, and entry points of the group `drivetrain.commands`."""

    def __getitem__(self, name: str) -> Command:
        source = plugins.COMMANDS.source(name) if ":" not in name else None
        if source is None:
            raise KeyError(name)
        target = plugins.COMMANDS.target(name)
        attribute = target.partition(":")[2]
        found = literal_facts(source, attribute, Command) or (Command(),)  # a broken one must not hinder the others
        return found[0].model_copy(update={"target": target})

    def __iter__(self) -> Iterator[str]:
        return iter(plugins.COMMANDS.names())

    def __len__(self) -> int:
        return len(plugins.COMMANDS.names())


COMMANDS = Commands()


def options_of(command: LoadedCommand) -> type[BaseModel]:
    """Return the model of a command's own flags: the type of the first parameter of its `run`."""
    found = next(iter(get_type_hints(command.run).values()), None)
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise DrivetrainError(
            f"{command.place} does not say what its options are",
            remedy="give its first parameter a pydantic model as its type: def run(options: MyOptions, resolved)",
        )
    return found
