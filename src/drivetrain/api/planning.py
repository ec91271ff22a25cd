"""`drivetrain plan`: what would be done with a job here and why, by rule or by measuring; nothing is trained."""

from dataclasses import replace

from drivetrain.config import Config
from drivetrain.job import Job
from drivetrain.plan.plan import Plan
from drivetrain.planning.batch_size import settle_global_batch, with_micro_batch
from drivetrain.planning.description import described
from drivetrain.planning.planner import OnProbe, measured
from drivetrain.run import Session
from drivetrain.run.loss_weighting import settle_weighting
from drivetrain.run.model_factory import build_model


def plan(job: Job, config: Config | None = None, *, measure: bool = False, on_probe: OnProbe | None = None) -> Plan:
    """The plan for a job. With `measure`, ways of running its step are tried on a throw-away copy of the model."""
    run = Session.join(job, config, quiet=True)
    try:
        model = (settle_global_batch(run) if measure else None) or build_model(run)
        if not measure:
            why = "not measured: --measure does it" if run.config.batch.auto else ""
            return described(run, model, replace(run.planned, batch_size_found=why), None)
        settle_weighting(run, model, None)
        found = measured(run, model, with_micro_batch(run, model, run.planned), on_probe=on_probe).plan
        assert found is not None
        return found
    finally:
        run.close_loaders()
        run.close()
