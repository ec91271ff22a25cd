"""What commands do in the process that trains: find the job of a target, train it, plan it, sweep over it.

Run as a program, it is the fresh process in which `planning.fresh_process` asks for the first steps of a job.
"""

import inspect
import json
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from rich.console import Console
from rich.table import Table

from drivetrain.api.measuring import plan
from drivetrain.api.sweeping import (
    INTERRUPTED,
    PAGE,
    Settings,
    SweepLimits,
    SweepResult,
    SweepSpec,
    grid,
    in_words,
    run_sweep,
)
from drivetrain.api.training import Result, configured, num_trained, train
from drivetrain.commands.training import PlanOptions, SweepOptions, TrainOptions, planned_machine
from drivetrain.config import Config, Resolved, configure, nearest
from drivetrain.config.settings import BY_NAME, normal
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.launchers import find_place
from drivetrain.core.log import printable
from drivetrain.core.plugins import RECIPES
from drivetrain.core.run_folder import find_run, read_yaml
from drivetrain.core.value import format_bytes, format_count, format_duration
from drivetrain.hardware import Hardware, detect
from drivetrain.job import Job
from drivetrain.plan.forecast import TimeForecast
from drivetrain.plan.knobs import StepWay
from drivetrain.plan.loss_weighting import Weighting
from drivetrain.plan.plan import Plan
from drivetrain.planning.fresh_process import FirstSteps
from drivetrain.planning.other_machine import MeasuredStep, plan_elsewhere
from drivetrain.planning.planner import PlanningProgress
from drivetrain.recipes import Recipe
from drivetrain.report.paired_test import CONFIDENCE, fewest_pairs
from drivetrain.run import Session, last_one_finished
from drivetrain.run.model_factory import build_model

# ----------------------------------------------------------------------------------------------------------------------
# Finds the job that a command is pointed at: a recipe, `module:name` (a function, job or recipe), or a script.

T = TypeVar("T")


class _Done(BaseException):
    """Carries the outcome of a script's job out of the script, past whatever it would do after training."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome


def with_job(
    target: str, config: Config, action: Callable[[Job], T], arguments: Sequence[str] = (), *, module: str = ""
) -> T:
    """Return an action's result for a target's job, which is not trained. A script runs up to its first `dt.train`.

    Args:
        target: What the command line named.
        config: The configuration of the command.
        action: What to do with the job.
        arguments: The words that a script finds in `sys.argv` after its name.
        module: The name of the script where it is run as a module, as by `python -m`.
    """
    if not target.endswith(".py"):
        with configured(config, target):
            return action(job_of(find(target), target, config))

    def instead(job: Job) -> NoReturn:
        raise _Done(action(job))

    with configured(config, target, instead):
        try:
            run_script(Path(target), arguments, module)
        except _Done as done:
            outcome: T = done.outcome
            return outcome
    raise _without_training(target)


def train_script(path: str, arguments: Sequence[str] = ()) -> None:
    """Run a script that must train something."""
    before = num_trained()
    run_script(Path(path), arguments)
    if num_trained() == before:
        raise _without_training(path)


def find(target: str) -> Any:
    """Return what a target names, which is no script: a recipe by its name, or whatever `module:name` is."""
    if ":" in target:
        return _imported(target)
    if not RECIPES.target(target):
        meant = nearest(target, RECIPES.names())
        remedy = f"did you mean `{meant}`?" if meant else "drivetrain train digits"
        allowed = f"{', '.join(RECIPES.names())}, module:function, or a script that ends in .py"
        raise ConfigError([Problem(target, "there is no such recipe", allowed=allowed, remedy=remedy)])
    recipe = RECIPES.load(target)
    if not isinstance(recipe, Recipe):
        raise DrivetrainError(
            f"the recipe {target} is a {type(recipe).__name__}, expected a Recipe",
            remedy="assign RECIPE = Recipe(make=…), from drivetrain.recipes",
        )
    return recipe


def job_of(found: Any, target: str, config: Config) -> Job:
    """Return the job of what `find` found."""
    if isinstance(found, Recipe):
        return found.job(config)
    job = found if isinstance(found, Job) else _called(found, target, {})
    if not isinstance(job, Job):
        raise DrivetrainError(f"{target} returned {type(job).__name__}", remedy="return a dt.Job")
    return job


def _called(function: Any, target: str, arguments: Mapping[str, Any]) -> Any:
    """Return what a function returns; raise in words where it does not take these arguments."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        given = f" with {', '.join(arguments)}" if arguments else ""
        raise DrivetrainError(
            f"{target} cannot be called{given}: {error}",
            remedy="give its arguments defaults; only `drivetrain sweep` fills some in: `seed`, and those of its grid, "
            "which the function has to take",
        ) from None
    except ValueError:  # one of C, whose arguments Python does not know
        pass
    return function(**arguments)


def run_script(path: Path, arguments: Sequence[str], module: str = "") -> None:
    if not path.is_file():
        raise ConfigError([Problem(str(path), "there is no such script", remedy="give the path of a Python file")])
    # As `python script.py` and `python -m module` do.
    sys.path.insert(0, str(Path.cwd() if module else path.parent.absolute()))
    before = sys.argv[:]
    sys.argv[:] = [str(path), *arguments]
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv[:] = before


def _imported(target: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise DrivetrainError(
            f"{target} cannot be loaded: {error}",
            remedy="give `module:RECIPE` or `module:function`, importable from this folder",
        ) from error


def _without_training(script: str) -> DrivetrainError:
    return DrivetrainError(f"{script} ended without calling dt.train", remedy="call dt.train(job) in it")


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain train TARGET` in this process: trains what the target names, and shows what a recipe has to show.

STOPPED = 130  # as for anything that Ctrl-C ends


def train_here(options: TrainOptions, resolved: Resolved) -> int:
    target, config = options.target, resolved.config
    with configured(config, str(Path(target).absolute()) if target.endswith(".py") else target):
        if target.endswith(".py"):
            train_script(target, options.arguments)
            return 0 if last_one_finished() else STOPPED
        return _trained(target, config)


def _trained(target: str, config: Config) -> int:
    """Train what is no script. A run that was stopped can go on, and is not a failure; but it is not done."""
    found = find(target)
    result: Result = train(job_of(found, target, config))
    if isinstance(found, Recipe) and found.show is not None and result.is_main and result.finished:
        with redirect_stdout(None) if config.watch.quiet else nullcontext():
            found.show(result)
    return 0 if result.finished else STOPPED


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain plan TARGET`: shows how a job would be run here, and why. Nothing is trained.

BASIS = {
    "measured": "from a step measured on one GPU here",
    "recorded": "from a recorded run on one GPU",
    "counted": "from counted FLOPs: no step was measured",
}


def plan_here(options: PlanOptions, resolved: Resolved) -> int:
    is_main = find_place().rank == 0
    console = Console(highlight=False, quiet=options.as_json or not is_main)
    found = _planned(options, resolved.config, console)
    if not is_main:
        return 0
    if options.out is not None:
        options.out.write_text(found.to_yaml(), encoding="utf-8")
    if options.as_json:
        print(found.to_json())
        return 0
    _show(found, console)
    if options.out is not None:
        console.print(f"written to {options.out}")
    return 0


def _planned(options: PlanOptions, config: Config, console: Console) -> Plan:
    machine = planned_machine(options.machine, options.gpus, options.gpu_memory)
    if machine is not None:
        here = detect(config.run.output_dir)
        recorded = None
        if options.from_run is not None:
            recorded = MeasuredStep.of_run(find_run(options.from_run, config.run.output_dir))

        def there(job: Job) -> Plan:
            step = _measured_here(job, config, here, console) if options.measure else recorded
            with console.status("counting the memory and the FLOPs of a step, on shapes alone"):
                return plan_elsewhere(job, config, machine, here, step, options.mfu)

        return with_job(options.target, config, there, options.arguments)
    with PlanningProgress(quiet=console.quiet, after_seconds=0, heading="", console=console) as progress:
        return with_job(
            options.target,
            config,
            lambda job: plan(job, config, measure=options.measure, on_probe=progress),
            options.arguments,
        )


def _measured_here(job: Job, config: Config, here: Hardware, console: Console) -> MeasuredStep:
    """Measure a step of the job on the GPU here."""
    if not here.gpus:
        raise MeasuredStep.no_gpu()
    with PlanningProgress(quiet=console.quiet, after_seconds=0, heading="", console=console) as progress:
        return MeasuredStep.of_plan(plan(job, config, measure=True, on_probe=progress), here)


def _show(found: Plan, console: Console) -> None:
    table = Table(
        title=f"The plan for {found.job}", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in ("setting", "value", "why", "else"):
        table.add_column(column, overflow="fold")
    for name, choice in found.choices.items():
        value = "auto" if choice.value is None else str(choice.value)
        table.add_row(name, value, choice.reason, "; ".join(choice.alternatives))
    console.print(table)
    forecast, memory = found.forecast, found.forecast.memory
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "workspace": memory.workspace,
    }
    told = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    console.print(f"\nmemory: {told}" + ("" if memory.total is None else f"; {format_bytes(memory.total)} in all"))
    if forecast.step_seconds is not None:
        whole = "" if forecast.job_seconds is None else f"; the whole job {format_duration(forecast.job_seconds)}"
        if forecast.validation_seconds is not None:
            whole += f", some {format_duration(forecast.validation_seconds)} of it validation (estimated)"
        console.print(
            f"time:   {format_duration(forecast.step_seconds)} per step of {found.global_batch} samples{whole}"
        )
    if forecast.time is not None:
        _show_time(forecast.time, found, console)
    for note in found.notes if found.measured or found.machine else ():
        console.print(note)
    if not found.measured and not found.machine:
        console.print("By rule: nothing was measured. --measure tries what is faster on this very model.")


def _show_time(time: TimeForecast, found: Plan, console: Console) -> None:
    """Show the forecast by number of GPUs, the parts of a step, and what is assumed."""
    console.print(f"\nForecast of the time, {BASIS[time.basis]}; steps of {found.global_batch:,} samples")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("GPUs", "step", "samples/s", "speedup", "efficiency", "whole job", "best to worst"):
        table.add_column(column, justify="right")
    for row in time.rows:
        best, worst = row.step_seconds_range if row.job_seconds_range is None else row.job_seconds_range
        table.add_row(
            str(row.num_devices),
            format_duration(row.step_seconds),
            f"{row.samples_per_second:,.0f}",
            f"{row.speedup:.2f} ×",
            f"{row.efficiency:.0%}",
            "not known" if row.job_seconds is None else format_duration(row.job_seconds),
            f"{format_duration(best)} to {format_duration(worst)}",
        )
    console.print(table)
    row = time.row
    if row.num_devices > 1:
        console.print(
            f"a step on {row.num_devices}: {format_duration(row.compute_seconds)} of launching and computing; "
            f"each GPU sends {format_bytes(time.sent_bytes)} in {format_duration(row.exchange_seconds)}, of which "
            f"{format_duration(row.exposed_seconds)} are waited for"
        )
    if time.why_no_job_time:
        console.print(f"{time.why_no_job_time}; --epochs or --max-steps says it")
    console.print("It assumes:")
    for each in time.assumes:
        console.print(f"- {each}")


# ----------------------------------------------------------------------------------------------------------------------
# `drivetrain sweep` in this process: reads what to try, makes the job of each variant, and shows the result.

_IN_FILE = ("target", "settings", "grid", "variants", "search", "trials", "seeds", "metric", "mode", "halving",
            "first_steps", "fork", "name")  # fmt: skip


@dataclass(frozen=True)
class TargetMaker:
    """Makes the job of a target with other settings: those of drivetrain, and flags of a script or arguments."""

    target: str
    values: Mapping[str, Any]  # the configuration of all variants
    arguments: tuple[str, ...] = ()

    def __call__(self, settings: Settings, seed: int, action: Callable[[Job, Config], T]) -> T:
        found = None if self.target.endswith(".py") else find(self.target)
        is_function = found is not None and not isinstance(found, (Recipe, Job))
        arguments = _taken(found, {**settings, "seed": seed}) if is_function else {}
        settings = {name: value for name, value in settings.items() if _as_argument(name) not in arguments}
        ours = {name: value for name, value in settings.items() if normal(name) in BY_NAME}
        others = {name: value for name, value in settings.items() if name not in ours}
        told = {**self.values, **ours, "run.seed": seed}
        config = configure(**told)

        def act(job: Job, config: Config = config) -> T:
            with configured(config, self.target):  # without what `with_job` does instead of training
                return action(job, config)

        if found is None:
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in others.items()]
            return with_job(self.target, config, act, [*self.arguments, *flags])
        if others and not is_function:
            kind = "recipe" if isinstance(found, Recipe) else "job"
            raise DrivetrainError(
                f"the {kind} {self.target} has no setting {', '.join(others)}", remedy="`drivetrain config` lists all"
            )
        if not is_function:
            return act(job_of(found, self.target, config))
        made = _called(found, self.target, {**others, **arguments})
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Config):  # as `dt.sweep` takes it, too
            made, own = made
            config = configure(**{**_set_in(own), **{BY_NAME[normal(name)].name: it for name, it in told.items()}})
        return act(job_of(lambda: made, self.target, config), config)


def _as_argument(name: str) -> str:
    return normal(name).replace("-", "_")


def _taken(function: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a function takes itself of the settings that are given, by the names of its arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named = {_as_argument(name): value for name, value in given.items()}
    return {name: value for name, value in named.items() if takes_any or name in by_name}


def _set_in(config: Config) -> dict[str, Any]:
    """Return the settings that a configuration was given, by their dotted names."""
    sections = config.model_dump(exclude_unset=True)
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def sweep_here(options: SweepOptions, resolved: Resolved) -> int:
    spec, maker = _spec(options, resolved)
    limits = SweepLimits(options.max_seconds, options.max_total_steps, options.parallel)
    number = spec.trials if spec.search else len(spec.variants)
    quiet = options.as_json or resolved.config.watch.quiet
    say: Callable[[str], None] = (lambda text: None) if quiet else _say
    seeds = format_count(len(spec.seeds), "seed")
    say(f"sweep {spec.name}: {format_count(number, 'variant')} × {seeds} of {maker.target}, by {spec.metric}")
    fewest = fewest_pairs(1 - (1 - CONFIDENCE) / max(1, number - 1))
    if number > 1 and len(spec.seeds) < fewest and not spec.halving:  # halving compares only those that are left
        say(f"  a verdict on {number} variants takes at least {fewest} seeds; with fewer, one is best by its mean")
    result = run_sweep(maker, spec, limits, resolved.config.run.output_dir, say)
    if options.as_json:
        told = asdict(replace(result, comparison=None)) | {"folder": str(result.folder)}
        compared = None if result.comparison is None else result.comparison.as_plain()
        print(json.dumps(told | {"comparison": compared}))
    else:
        print(printable("\n".join(_told(result, spec.metric))))
    if result.is_done:
        return 0 if result.best is not None else 1
    return STOPPED if result.why_stopped == INTERRUPTED else 1


def _say(text: str) -> None:
    print(printable(text), flush=True)


def _told(result: SweepResult, metric: str) -> list[str]:
    """Return the result in lines: variants, the better first, the verdicts, and where the files are."""
    lines = [""]
    for row in result.rows:
        value = "no value" if row["value"] is None else f"{metric} {row['value']:.6g}"
        rung = f" at step {row['rung']:,}" if row["rung"] else ""
        errors = [each["error"] for each in row["runs"].values() if each["error"]]
        lines.append(
            f"  {in_words(row['settings'])}: {row['state']}, {value}{rung}{f'; {errors[0]}' if errors else ''}"
        )
    if result.comparison is not None:
        lines += ["", *(verdict.words for verdict in result.comparison.verdicts)]
        lines += [f"note: {note}" for note in result.comparison.notes]
    if result.best is not None:
        lines += ["", f"best by its mean: {in_words(result.best)}"]
    if result.comparison is not None:
        lines.append(f"written: {result.folder / PAGE}")
    if not result.is_done:
        lines.append(
            f"stopped: {result.why_stopped}. What is done is kept in {result.folder}; the same command goes on"
        )
    return lines


def _spec(options: SweepOptions, resolved: Resolved) -> tuple[SweepSpec, TargetMaker]:
    """Return what to try, from the command line and a file, and how its jobs are made. The command line wins."""
    told = {} if options.file is None else _file(options.file)
    target = str(told.get("target", "")) if options.file is not None else options.target
    given = options.model_fields_set
    pick = {name: getattr(options, name) if name in given or name not in told else told[name]
            for name in ("seeds", "metric", "mode", "halving", "first_steps", "fork", "trials")}  # fmt: skip
    values = dict(told.get("settings") or {})
    values |= {name: each.value for name, each in resolved.origins.items() if name not in ("run.name", "run.seed")}
    name = resolved.config.run.name or told.get("name") or f"sweep-{Path(target.replace(':', '-')).stem}"
    spec = SweepSpec(
        name=str(name),
        variants=tuple(_variants(options, told)),
        search=told.get("search") or {},
        **{**pick, "seeds": tuple(pick["seeds"])},
    )
    return spec, TargetMaker(target, values, options.arguments)


def _file(path: Path) -> dict[str, Any]:
    try:
        found = read_yaml(path)
    except OSError as error:
        raise DrivetrainError(
            f"{path} cannot be read: {error.strerror}", remedy="give the path of a YAML file"
        ) from None
    except (ValueError, yaml.YAMLError) as error:
        raise DrivetrainError(f"{path} is no YAML: {error}", remedy="drivetrain sweep --help") from None
    unknown = [str(name) for name in found if name not in _IN_FILE] if isinstance(found, dict) else []
    if not isinstance(found, dict) or unknown or not found.get("target"):
        problem = f"it has {', '.join(unknown)}" if unknown else "it names no target"
        raise DrivetrainError(f"{path} is no file of a sweep: {problem}", remedy=f"it may have {', '.join(_IN_FILE)}")
    return found


def _variants(options: SweepOptions, told: Mapping[str, Any]) -> list[dict[str, Any]]:
    if options.grid:
        return grid(_parsed_grid(options.grid))
    found = _loaded(options.variants) if options.variants else told.get("variants") or told.get("grid")
    if found is None and told.get("search"):
        return []
    if isinstance(found, Mapping):
        return grid({name: each if isinstance(each, list | tuple) else [each] for name, each in found.items()})
    if isinstance(found, list | tuple) and all(isinstance(each, Mapping) for each in found):
        return [dict(each) for each in found]
    raise DrivetrainError(
        "there is nothing to try", remedy="--grid 'lr=0.001,0.003', --variants module:name, or a grid in a YAML file"
    )


def _parsed_grid(text: str) -> dict[str, list[Any]]:
    """Read `lr=0.001,0.003 weight-decay=0,0.1`. Values are those of YAML, except that 1e-3 is a number."""
    found: dict[str, list[Any]] = {}
    for word in text.replace(";", " ").split():
        name, equals, values = word.partition("=")
        if not equals or not values:
            raise DrivetrainError(f"--grid {text!r}: {word!r} has no values", remedy="--grid 'lr=0.001,0.003'")
        found[name] = [_parsed(value) for value in values.split(",")]
    return found


def _parsed(text: str) -> Any:
    try:
        return float(text) if "e" in text.lower() or "." in text else int(text)
    except ValueError:
        return yaml.safe_load(text)


def _loaded(name: str) -> Any:
    """Return what `module:name` is, or what it returns."""
    sys.path.insert(0, str(Path.cwd()))
    found = find(name) if ":" in name else None
    if found is None:
        raise DrivetrainError(f"--variants {name} names nothing", remedy="give `module:name`, importable from here")
    return found() if callable(found) else found


# ----------------------------------------------------------------------------------------------------------------------
# The fresh process of `planning.fresh_process`: makes the job of a target, and answers questions about its first steps.
#
# Questions and answers are lines of JSON over two pipes; the output of the target goes to a separate file.


def answer_questions() -> None:
    questions = _lines(int(sys.argv[1]))
    answers = int(sys.argv[2])
    request = next(questions)
    config = Config.model_validate(request["config"])
    try:
        with_job(
            request["target"],
            config,
            lambda job: _serve(job, config, request, questions, answers),
            request["argv"][1:],
            module=request["module"],
        )
    except Exception as error:  # any error of the target is reported to the asker
        _tell(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def _serve(job: Job, config: Config, request: dict[str, Any], questions: Iterator[Any], answers: int) -> None:
    run = Session.join(job, config, quiet=True)
    try:
        identity = request["identity"]
        mine = json.loads(json.dumps(run.job.identity()))
        changed = [name for name in sorted({*mine, *identity}) if mine.get(name) != identity.get(name)]
        if changed:
            _tell(answers, {"error": f"a fresh process made another job of it: {', '.join(changed)} differ"})
            return
        run.weighting = Weighting.model_validate(request["weighting"])
        steps = FirstSteps(run, build_model(run))
        _tell(answers, {"ready": True})
        for question in questions:
            _tell(answers, _answer(steps, question))
    finally:
        run.close_loaders()
        run.close()


def _answer(steps: FirstSteps, question: dict[str, Any]) -> dict[str, Any]:
    found = steps.bits(StepWay.model_validate(question["bits"]), twice=False)
    steps.release()
    return {"bits": found.model_dump(mode="json")}


def _lines(descriptor: int) -> Iterator[Any]:
    """Yield each request line; ends when the other side is gone."""
    with os.fdopen(descriptor, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _tell(descriptor: int, message: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    answer_questions()
