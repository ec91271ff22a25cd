"""`drivetrain plan`: what would be done with a job here and why, by rule or by measuring; nothing is trained."""

from drivetrain.config import Config
from drivetrain.job import Job
from drivetrain.plan.plan import Plan
from drivetrain.planning.batch_size import settle_global_batch, settle_micro_batch
from drivetrain.planning.planner import OnProbe, described, measured
from drivetrain.run import Setup
from drivetrain.run.loss_weighting import settle_weighting


def plan(job: Job, config: Config | None = None, *, measure: bool = False, on_probe: OnProbe | None = None) -> Plan:
    """The plan for a job. With `measure`, ways of running its step are tried on a throw-away copy of the model."""
    run = Setup.join(job, config, quiet=True)
    try:
        model = (settle_global_batch(run) if measure else None) or run.build()
        if not measure:
            run.batch_size_found = "not measured: --measure does it" if run.config.batch.auto else ""
            return described(run, model, None)
        settle_weighting(run, model, None)
        settle_micro_batch(run, model)
        return measured(run, model, on_probe=on_probe)
    finally:
        run.close_loaders()
        run.close()
