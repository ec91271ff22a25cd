"""`drivetrain sweep` in this process: reads what to try, makes the job of each variant, and shows the result."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

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
from drivetrain.api.training import configured
from drivetrain.commands.sweep import SweepOptions
from drivetrain.commands.targets import find, job_of, with_job
from drivetrain.config import Config, Resolved, configure
from drivetrain.config.settings import BY_NAME, normal
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.run_folder import read_yaml
from drivetrain.core.safe_text import printable
from drivetrain.job import Job
from drivetrain.recipes import Recipe

STOPPED = 130
T = TypeVar("T")
_IN_FILE = ("target", "settings", "grid", "variants", "search", "trials", "seeds", "metric", "mode", "halving",
            "first_steps", "fork", "name")  # fmt: skip


@dataclass(frozen=True)
class TargetMaker:
    """Makes the job of a target with other settings: those of drivetrain, and flags of a script or arguments."""

    target: str
    values: Mapping[str, Any]  # the configuration of all variants
    arguments: tuple[str, ...] = ()

    def __call__(self, settings: Settings, seed: int, action: Callable[[Job, Config], T]) -> T:
        ours = {name: value for name, value in settings.items() if normal(name) in BY_NAME}
        others = {name: value for name, value in settings.items() if name not in ours}
        config = configure(**{**self.values, **ours, "run.seed": seed})

        def act(job: Job) -> T:
            with configured(config, self.target):  # without what `with_job` does instead of training
                return action(job, config)

        if self.target.endswith(".py"):
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in others.items()]
            return with_job(self.target, config, act, [*self.arguments, *flags])
        found = find(self.target)
        if isinstance(found, Recipe) and others:
            raise DrivetrainError(
                f"the recipe {self.target} has no setting {', '.join(others)}", remedy="`drivetrain config` lists all"
            )
        return act(job_of(found if isinstance(found, (Recipe, Job)) else lambda: found(**others), self.target, config))


def run(options: SweepOptions, resolved: Resolved) -> int:
    spec, maker = _spec(options, resolved)
    limits = SweepLimits(options.max_seconds, options.max_total_steps, options.parallel)
    number = spec.trials if spec.search else len(spec.variants)
    quiet = options.as_json or resolved.config.watch.quiet
    say: Callable[[str], None] = (lambda text: None) if quiet else _say
    say(f"sweep {spec.name}: {number} variants × {len(spec.seeds)} seeds of {maker.target}, by {spec.metric}")
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
