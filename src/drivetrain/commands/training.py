"""Commands that train or say how they would: `train`, `launch`, `plan`, `sweep`. Loading them loads no torch."""

import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from drivetrain.commands.command import Command, ForScript
from drivetrain.config import SETTINGS, Allowed, Config, Flag, Positional, Resolved, Rest
from drivetrain.config.flags import COMMAND_LINE
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.launchers import find_place
from drivetrain.core.plugins import RECIPES, recipe_summary, strategy_facts
from drivetrain.hardware import Hardware, detect
from drivetrain.hardware.catalogue import Machine, machine_named, machine_of_memory
from drivetrain.launch.clusters import KubernetesOptions, inside_slurm, write_and_submit, write_manifests
from drivetrain.launch.layout import LaunchOptions
from drivetrain.launch.ray import launch_on_ray
from drivetrain.launch.start import check_script, start

# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain train TARGET`: trains in this process where one device is used, else in one process per GPU.

COMMAND_TRAIN = Command(
    summary="Trains a recipe, a job or a script, on every GPU here.",
    all_but=(),
    here="drivetrain.commands.in_process:train_here",
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
EXAMPLES_TRAIN = (
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


def run_train(options: TrainOptions, resolved: Resolved) -> int | None:
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


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain launch SCRIPT`: runs an unchanged script on every GPU here, or on several machines.

COMMAND_LAUNCH = Command(
    summary="Starts a script on every GPU here, or on several machines; watches it, and says why it failed.",
    obeys=("run.output_dir", "distributed.skip_preflight", "watch.inject"),
    first=(
        "num_gpus",
        "gpu_ids",
        "cpu",
        "num_processes",
        "nodes",
        "node_rank",
        "main_address",
        "max_restarts",
        "slurm",
        "submit",
    ),
)
EXAMPLES_LAUNCH = (
    "drivetrain launch train.py --lr 0.1         every GPU; what follows the script is the script's",
    "drivetrain launch --gpu-ids 0,1 train.py    these two",
    "drivetrain launch --cpu --num-processes 2 train.py",
    "drivetrain launch --nodes 2 --node-rank 0 --main-address 10.0.0.1 train.py   the main machine",
    "drivetrain launch --nodes 2 --node-rank 1 --main-address 10.0.0.1 train.py   the second",
    "drivetrain launch --slurm --submit --nodes 2 --num-gpus 4 --time-limit 4:00:00 train.py",
    "drivetrain launch --kubernetes --image me/train:1 --num-gpus 8 --output-dir /runs train.py",
    "drivetrain launch --ray --nodes 2 --num-gpus 8 --output-dir /shared/runs train.py",
)


class LaunchCommandOptions(KubernetesOptions):
    ray: bool = Field(False, description="start the job on the machines of a Ray cluster, and wait for its end")
    script: Annotated[Path, Positional()] = Field(description="a Python file; flags of ours stand before it")
    arguments: Annotated[tuple[str, ...], Rest()] = Field((), description="for the script, as they are")


def run_launch(options: LaunchCommandOptions, resolved: Resolved) -> int:
    words = ("script", str(options.script), *options.arguments)
    config = resolved.config
    if options.ray:
        check_script(options.script)
        more = ["--skip-preflight"] if config.distributed.skip_preflight else []
        more += [f"--inject={config.watch.inject}"] if config.watch.inject else []
        return launch_on_ray(options, options.script, options.arguments, config.run.output_dir, more)
    if options.kubernetes:
        return write_manifests(options, options.script, options.arguments, config.run.output_dir)
    if options.slurm or options.submit:
        check_script(options.script)
        return write_and_submit(options, options.script, options.arguments, config.run.output_dir)
    return start(
        words,
        options.script,
        inside_slurm(options),
        detect(config.run.output_dir),
        config.run.output_dir,
        skip_preflight=config.distributed.skip_preflight,
        inject=config.watch.inject,
    )


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain plan TARGET`: plans in this process, or in as many as `train` would start.

COMMAND_PLAN = Command(
    summary="How a job would be run here, and why; with --measure, tried on its own model. Trains nothing.",
    all_but=("watch", "checkpoint", "validation", "plan"),
    obeys=("plan.budget_seconds", "plan.file", "plan.cache"),
    here="drivetrain.commands.in_process:plan_here",
)
EXAMPLES_PLAN = (
    "drivetrain plan digits                          by rule, at once",
    "drivetrain plan train.py --measure              tries ways of running the script's own job",
    "drivetrain plan digits --measure --out p.yaml   keeps it: `train digits --plan p.yaml` pins it",
    "drivetrain plan digits --cpu --num-processes 2  on two processes, as `train` with the same flags",
    "drivetrain plan train.py --for 8xH100           memory, time and days on other GPUs",
    "drivetrain plan train.py --for 2x8xH100 --mfu 0.4   the same on two nodes, at a stated MFU",
)


class PlanOptions(ForScript):
    measure: Annotated[bool, Flag("measure")] = Field(
        False, description="try ways of running a step on a copy of the model"
    )
    out: Annotated[Path | None, Flag("out")] = Field(
        None, description="write the plan as YAML, which `train --plan` takes"
    )
    as_json: Annotated[bool, Flag("json")] = Field(False, description="the whole plan as JSON")
    machine: Annotated[str | None, Flag("for"), Allowed("a number, x, and a card: 4xL4")] = Field(
        None,
        description="plan for a machine that is not here, such as 4xL4, 8xA100-80, or 2x8xH100 (nodes of 8), with a "
        "forecast of its time; with --measure from a step on one GPU here",
    )
    from_run: Annotated[Path | None, Flag("from-run")] = Field(
        None, description="with --for: forecast time from the steps of this run on one GPU, not from FLOPs"
    )
    mfu: Annotated[float | None, Flag("mfu")] = Field(
        None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="with --for: the part of the data sheet's FLOP/s to count with (default: 0.15 to 0.45)",
    )
    gpus: Annotated[int | None, Flag("gpus")] = Field(
        None, ge=1, description="the same for cards that are not in the table: how many; needs --gpu-memory"
    )
    gpu_memory: Annotated[float | None, Flag("gpu-memory")] = Field(
        None, gt=0, allow_inf_nan=False, description="and how many GB each has (of 10^9 bytes, as they are sold)"
    )
    num_processes: Annotated[int | None, Flag("num-processes")] = Field(
        None,
        ge=1,
        le=1024,
        description="plan for so many processes here (default: as many as `train` starts, one per GPU)",
    )
    cpu: Annotated[bool, Flag("cpu")] = Field(False, description="hide the GPUs from them")


def machine_of_plan(given: Mapping[str, Any]) -> Hardware:
    """Return the machine that settings have to suit: the one that is planned for.

    Args:
        given: The options of the command, as far as they could be parsed.
    """
    here = detect()
    try:
        machine = planned_machine(given.get("machine"), given.get("gpus"), given.get("gpu_memory"))
    except ConfigError:
        return here  # the command itself says what is wrong with it
    return here if machine is None else machine.hardware(here)


def planned_machine(name: str | None, gpus: int | None, gpu_memory: float | None) -> Machine | None:
    """Return the machine to plan for, where it is another one than this.

    Args:
        name: What `--for` says, such as `8xH100`.
        gpus: What `--gpus` says.
        gpu_memory: What `--gpu-memory` says, in GB.
    """
    if name is not None and (gpus is not None or gpu_memory is not None):
        raise ConfigError([Problem("--for", "it says already how many GPUs of which kind", remedy="--for 4xL4")])
    if name is not None:
        return machine_named(name)
    if gpus is not None and gpu_memory is None:
        raise ConfigError([Problem("--gpus", "how much memory each has is missing", remedy="--gpus 8 --gpu-memory 24")])
    return None if gpu_memory is None else machine_of_memory(gpus or 1, gpu_memory)


def run_plan(options: PlanOptions, resolved: Resolved) -> int | None:
    """Plan in other processes, and return the exit code; None: plan here, in this process."""
    given = options.model_fields_set & {"num_processes", "cpu"}
    elsewhere = {"--for": options.machine, "--gpus": options.gpus, "--gpu-memory": options.gpu_memory}
    there = next((flag for flag, value in elsewhere.items() if value is not None), "")
    if there and given:
        flag = "--cpu" if options.num_processes is None else "--num-processes"
        raise ConfigError([Problem(flag, f"{there} plans for a machine that is not here", remedy="keep one of them")])
    _refuse_idle_flags(options, there)
    budget = resolved.origins.get("plan.budget_seconds")
    if budget is not None and budget.source == COMMAND_LINE and not options.measure:
        remedy = "add --measure, or leave it out"
        message = "it is for measuring, and nothing is measured without --measure"
        raise ConfigError([Problem(budget.spelled, message, budget.value, budget.source, remedy=remedy)])
    if there:
        return None
    own = {"measure": options.measure, "out": options.out, "json": options.as_json}
    words = tuple(f"--{name}={value}" for name, value in own.items() if value)
    logs = Path(tempfile.mkdtemp(prefix="drivetrain-plan-"))
    launched = LaunchOptions(num_processes=options.num_processes, cpu=options.cpu, max_restarts=0, log_dir=logs)
    code = None
    try:
        code = started("plan", options.target, words, launched, given, resolved, options.arguments)
    finally:
        if not code:
            shutil.rmtree(logs, ignore_errors=True)
    return code


def _refuse_idle_flags(options: PlanOptions, there: str) -> None:
    """Raise where a flag of the forecast would do nothing, or two of them contradict each other."""
    ways = {"--measure": options.measure, "--from-run": options.from_run, "--mfu": options.mfu}
    given = [flag for flag, value in ways.items() if value]
    if not there and given and given != ["--measure"]:
        message = "it is for the time on a machine that is not here"
        raise ConfigError([Problem(given[-1], message, remedy="add --for 8xH100, or leave it out")])
    if there and len(given) > 1:
        message = f"{given[0]} says already where the time of a step comes from"
        raise ConfigError([Problem(given[1], message, remedy="keep one of them")])


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain sweep TARGET`: trains variants of a job with the same seeds, and compares them.

COMMAND_SWEEP = Command(
    summary="Trains variants of a job with the same seeds, and says which are better.",
    all_but=(),
    here="drivetrain.commands.in_process:sweep_here",
)
EXAMPLES_SWEEP = (
    "drivetrain sweep digits --grid 'lr=0.001,0.003' --seeds 0,1,2     every rate with every seed",
    "drivetrain sweep train.py --grid 'width=32,64' --epochs 5         flags of the script",
    "drivetrain sweep digits --grid 'lr=0.001,0.002,0.004,0.008' --halving 2",
    "                                                                  the better half goes on, twice",
    "drivetrain sweep digits --variants my_grid:VARIANTS               a dictionary, or a function",
    "drivetrain sweep digits --grid 'lr=0.001,0.003' --fork runs/digits",
    "                                                                  all begin with its checkpoint",
    "drivetrain sweep sweep.yaml --parallel 4 --max-seconds 3600       four at once, for an hour",
)


class SweepOptions(ForScript):
    target: Annotated[str, Positional()] = Field(
        description="a recipe, `module:function` that returns a dt.Job, a script, or a YAML file with a sweep"
    )
    grid: Annotated[str, Flag("grid")] = Field(
        "", description="values of each setting: 'lr=0.001,0.003 weight-decay=0,0.1'; what is no setting of drivetrain "
        "is a flag of the script, or an argument of the function"
    )  # fmt: skip
    variants: Annotated[str, Flag("variants")] = Field(
        "", description="`module:name` of a dictionary of lists, a list of dictionaries, or a function that returns one"
    )
    seeds: Annotated[tuple[int, ...], Flag("seeds")] = Field(
        (0,),
        description="seeds of each variant, such as 0,1,2; a verdict takes 6, on many variants more (0)",
    )
    metric: Annotated[str, Flag("metric")] = Field(
        "valid_loss", description="the validation metric that decides (valid_loss)"
    )
    mode: Annotated[Literal["auto", "min", "max"], Flag("mode")] = Field(
        "auto", description="whether less or more of it is better; auto goes by its name (auto)"
    )
    halving: Annotated[int | None, Flag("halving")] = Field(
        None, ge=2, description="successive halving: one of so many variants goes on after each rung (off)"
    )
    first_steps: Annotated[int | None, Flag("first-steps")] = Field(
        None, ge=1, description="steps of the first rung (such that the last one is the whole job)"
    )
    fork: Annotated[str, Flag("fork")] = Field(
        "", description="folder of a run, or FOLDER@STEP, whose checkpoint all variants begin with"
    )
    trials: Annotated[int, Flag("trials")] = Field(
        20, ge=1, description="variants that Optuna tries, where the file has a search (20)"
    )
    max_seconds: Annotated[float | None, Flag("max-seconds")] = Field(
        None, gt=0, description="begin nothing more after so long, and pause at the next validation (no limit)"
    )
    max_total_steps: Annotated[int | None, Flag("max-total-steps")] = Field(
        None, ge=1, description="begin nothing more after so many steps of all runs together (no limit)"
    )
    parallel: Annotated[int, Flag("parallel")] = Field(
        1, ge=1, description="runs at once, each in a process, on a GPU of its own where there are some (1)"
    )
    as_json: Annotated[bool, Flag("json")] = Field(False, description="print the result as one line of JSON")

    @property
    def file(self) -> Path | None:
        """The YAML file, where the target is one."""
        return Path(self.target) if self.target.endswith((".yaml", ".yml")) else None


def run_sweep(options: SweepOptions, resolved: Resolved) -> int | None:
    """Return None: the work is done in this process, and in those that it starts."""
    return None
