"""`drivetrain train TARGET`: trains in this process where one device is used, else in one process per GPU."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import Field

from drivetrain.commands.command import Command, ForScript
from drivetrain.config import SETTINGS, Config, Positional, Resolved
from drivetrain.config.flags import COMMAND_LINE
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.launchers import find_place
from drivetrain.core.plugins import RECIPES, recipe_summary, strategy_facts
from drivetrain.hardware import Hardware, detect
from drivetrain.launch.layout import LaunchOptions
from drivetrain.launch.start import start

COMMAND = Command(
    summary="Trains a recipe, a job or a script, on every GPU here.",
    all_but=(),
    here="drivetrain.commands.train_in_process:run",
    first=(
        "budget.epochs",
        "budget.max_steps",
        "batch.size",
        "optimizer.learning_rate",
        "run.seed",
        "run.name",
        "run.output_dir",
        "num_gpus",
        "cpu",
        "config",
    ),
)
EXAMPLES = (
    "drivetrain train digits                        handwritten digits, about ten seconds on a CPU",
    "drivetrain train digits-moe                    a mixture of experts that grows and sleeps",
    "drivetrain train digits --epochs 5 --seed 1    other values",
    "drivetrain train darkroom                      a transformer that learns in its context",
    "drivetrain train email-sequence                emails by a recurrent network",
    "drivetrain train chest-xray-vqa                questions about chest X-rays",
    "drivetrain train gpt --data book.txt           a small language model on a text of your own",
    "drivetrain train my_package.jobs:make_job      a function that returns a dt.Job",
    "drivetrain train train.py --batch-size 32      a script that calls dt.train",
    "drivetrain train train.py -- --width 64        with flags of its own",
    "drivetrain train digits --cpu --num-processes 2           on two processes",
    "torchrun --nproc-per-node 2 -m drivetrain train digits    the same under another launcher",
)


class TrainOptions(LaunchOptions, ForScript):
    target: Annotated[str, Positional()] = Field(
        description=f"a recipe ({', '.join(RECIPES.names())}), `module:function` that returns a dt.Job, "
        "`module:RECIPE`, or a script"
    )


# What only recipes read, as each says: a user's own job sets it itself.
FOR_RECIPES = ("data.path", "moe.experts", *(setting.name for setting in SETTINGS if setting.section == "recipe"))


def run(options: TrainOptions, resolved: Resolved) -> int | None:
    """Train in other processes, and return the exit code; None: train here, in this process."""
    if find_place().launcher != "drivetrain":  # which hands a file's values on as flags
        _refuse_unread(options.target, resolved)
    given = options.model_fields_set - {"target", "arguments"}
    return started("train", options.target, (), options, given, resolved, options.arguments)


def _refuse_unread(target: str, resolved: Resolved) -> None:
    """Refuse flags that would have no effect. A file may hold any key for any job."""
    given = {name: value for name, value in resolved.origins.items() if value.source == COMMAND_LINE}
    asked = [name for name in FOR_RECIPES if name in given]
    if not asked or _is_unknown(target):
        return
    recipe = None if target.endswith(".py") else recipe_summary(target)
    problems = []
    for name in asked:
        if recipe is not None and name in recipe.reads:
            continue
        message = f"it is for recipes; the job of {target} says this itself"
        remedy = "set it in the job, and leave this out"
        if target.endswith(".py"):
            remedy += f"; a flag of the script stands after --: drivetrain train {target} -- {given[name].spelled} …"
        if recipe is not None:
            message = f"the recipe {target} does not use it"
            remedy = f"leave it out; it is for {', '.join(_readers(name))}"
        problems.append(Problem(given[name].spelled, message, source=given[name].source, remedy=remedy))
    if problems:
        raise ConfigError(problems)


def _is_unknown(target: str) -> bool:
    """Return whether this is no target at all, which is reported when it is looked for."""
    return not target.endswith(".py") and not RECIPES.target(target)


def _readers(setting: str) -> list[str]:
    summaries = {name: recipe_summary(name) for name in RECIPES.names()}
    return [name for name, summary in summaries.items() if summary is not None and setting in summary.reads]


def started(
    command: str,
    target: str,
    words: tuple[str, ...],
    options: LaunchOptions,
    given: Collection[str],
    resolved: Resolved,
    arguments: tuple[str, ...] = (),
) -> int | None:
    """Run a command in one process per device, or as the `given` options say. None: here, in this process.

    `words` are flags of the command, beside those of the configuration; `arguments` are for a script.
    """
    place = find_place()
    if place.launcher == "drivetrain":
        return None  # started by the lines below; the flags are those of the whole job
    if place.size > 1 and given:
        flag = f"--{sorted(given)[0].replace('_', '-')}"
        message = f"{place.launcher} started {place.size} processes already"
        raise ConfigError([Problem(flag, message, None, "command line", remedy=f"leave it out, or {place.launcher}")])
    if place.size > 1:
        return None
    config = resolved.config
    hardware = detect(config.run.output_dir)
    options = _with_devices(options, config)
    if not given and _num_devices(options, config, hardware) < 2:
        return None
    script = Path(target) if target.endswith(".py") else None
    every_word = ("command", command, target, *_flags(resolved), *words, *(("--", *arguments) if arguments else ()))
    return start(
        every_word,
        script,
        options,
        hardware,
        config.run.output_dir,
        skip_preflight=config.distributed.skip_preflight,
        foreign=config.foreign,
    )


def _flags(resolved: Resolved) -> list[str]:
    """Return the configuration as flags, from any source; workers get none of those about starting them."""

    def text(value: object) -> str:
        if isinstance(value, (list, tuple)):
            return ",".join(map(text, value))
        return "auto" if value is None else str(value)

    return [f"--{name}={text(given.value)}" for name, given in resolved.origins.items()]


def _with_devices(options: LaunchOptions, config: Config) -> LaunchOptions:
    """Apply the configuration's choice of devices; workers read it themselves, counted from the same visible ones."""
    cpu = options.cpu or config.device.mode == "cpu" or config.device.device == "cpu"
    number = options.num_processes
    if number is None and options.num_gpus is None and options.gpu_ids is None and config.device.ids is not None:
        number = len(config.device.ids)
    return options.model_copy(update={"cpu": cpu, "num_processes": number})


def _num_devices(options: LaunchOptions, config: Config, hardware: Hardware) -> int:
    """Return how many processes are started where the number is not given."""
    if options.cpu or hardware.accelerator not in ("cuda", "rocm") or config.device.mode == "single_gpu":
        return 1
    if strategy_facts(config.distributed.strategy).processes == "one" or config.device.device != "auto":
        return 1
    return len(config.device.ids or hardware.gpus)
