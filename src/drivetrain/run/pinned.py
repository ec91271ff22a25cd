"""What a plan's file pins has to fit the job that it is given to."""

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem


def refuse_other_batch(config: Config, global_batch: int) -> None:
    """Raises where the plan was made for steps of another size: its choices say nothing of this job then."""
    planned, file = config.plan_pins.global_batch, config.plan.file
    if planned is not None and planned != global_batch:
        message = f"{file}: it is a plan for steps of {planned} samples, and a step of this job has {global_batch}"
        raise ConfigError([Problem("--plan", message, str(file), remedy=plan_anew(config))])


def plan_anew(config: Config) -> str:
    """A remedy that always helps."""
    return f"plan anew, with the flags of this run: `drivetrain plan TARGET --out {config.plan.file}`"
