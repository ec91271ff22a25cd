"""`dt.prove(job)`: makes a certificate from a job in one call.

Drivetrain itself is the trainer under test, where no other is named: `dt.train`, called as users call it.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from drivetrain.api.training import Result, configured, export, train
from drivetrain.config import Config
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import StepContext
from drivetrain.core.isolation import is_counted
from drivetrain.core.launchers import find_place
from drivetrain.core.run_folder import CERTIFICATE
from drivetrain.job import Job
from drivetrain.proving.case import Case, Subject, Trainer
from drivetrain.proving.checks import FULL, Extent, Say, prove_subject
from drivetrain.proving.classify import Certificate
from drivetrain.run.job_settings import with_optimizer_settings

NEVER = 10**9  # steps between calls of a hook that is only asked before the first step


def drivetrain_subject(config: Config, *, on_gpu: bool = False, several_optimizers: bool = False) -> Subject:
    """Return the subject for a configuration: every strategy that fits the job, two ranks on a GPU."""
    asked = config.distributed.strategy
    strategies = ("ddp", "fsdp") if asked in ("auto", "single") else (asked,)
    if asked == "auto" and on_gpu and not several_optimizers and find_spec("deepspeed") is not None:
        strategies = (*strategies, "deepspeed")
    return Subject(
        lambda case: _train(case, config),
        "drivetrain",
        strategies=strategies,
        max_world=2 if on_gpu else 3,
        changes_world=True,
        device="cuda" if on_gpu else "cpu",
        runs_as_it_is=True,
        counts_beforehand=True,
        changes_batch=True,
    )


class _Begin:
    """A hook that tells the recorder when training begins: before that, the trainer tries the model."""

    every = NEVER

    def __init__(self, case: Case) -> None:
        self._recorder = case.recorder

    def check(self, context: StepContext) -> None:
        self._recorder.restart()

    def __call__(self, context: StepContext) -> None:
        pass

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _train(case: Case, config: Config) -> dict[str, torch.Tensor] | None:
    own = _config_of(case, config)
    with configured(own):  # the script whose `dt.train` is being proven must not be stopped there again
        result = train(_job_of(case), own, quiet=True)
    if not result.is_main:
        return None
    if case.randomness == "off":
        _report(case, result)
    path = export(result, case.folder / "weights.safetensors", average=False)
    return load_file(path)


def _job_of(case: Case) -> Job:
    """Return the user's job with the length of the case, and with the case's parts in place of the original ones."""
    job = case.job
    lengths = None if job.source.lengths is None else job.source.lengths[: len(case.data)]
    source = replace(job.source, dataset=case.data, collate=None, lengths=lengths, notes=())

    def loss(model: Any, batch: Any, turn: str = "") -> Any:
        return case.loss(model, batch, is_training=is_counted(), turn=turn)

    watched: Any = {turn.name: partial(loss, turn=turn.name) for turn in job.turns} or loss
    optimizer: Any = case.optimizer
    if job.optims:
        optimizer = {name: replace(optim, clip_norm=case.clip_of(name)) for name, optim in job.optims.items()}
    own_hooks = () if case.randomness == "off" else tuple(job.hooks)
    return replace(
        job,
        name="prove",
        model=case.model,
        data=source if case.observed else job.data,
        loss=watched if case.observed or case.digests else job.loss,
        count=None if job.count is None else case.count,
        optimizer=optimizer,
        collate=case.collate if case.observed else job.collate,
        clip_norm=None if job.optims else case.clip_norm,
        global_batch=dict(case.batch_sizes) or case.global_batch,
        max_steps=case.num_steps,
        epochs=None,
        seed=case.seed,
        valid=None,
        test=None,
        valid_every=None,
        valid_batch=None,
        metrics={},
        early_stopping=None,
        ema=None if case.randomness == "off" else job.ema,
        swa=None,
        init_from=None,
        hooks=(_Begin(case), *own_hooks),
        checkpoint_every=case.save_every or case.num_steps,
        length_is_read=True,
    )


def _config_of(case: Case, config: Config) -> Config:
    """Return the user's configuration, except what the case sets, and without measuring, compiling or pictures."""

    def changed(section: Any, **values: Any) -> Any:
        return section.model_copy(update=values)

    fresh = Config()
    world = case.world_size
    strategy = case.strategy if world > 1 else "single" if config.distributed.strategy != "auto" else "auto"
    device = {"mode": "cpu", "device": "cpu"} if case.device == "cpu" else {}
    return fresh.model_copy(
        update={
            "run": changed(fresh.run, output_dir=case.folder, seed=config.run.seed),
            "device": changed(config.device, **device),
            "precision": fresh.precision.model_copy(update={"dtype": "fp32"}) if case.dtype else config.precision,
            "kernels": changed(config.kernels, capture="off", num_threads=1),
            "memory": changed(config.memory, activations="keep"),
            "batch": changed(fresh.batch, size=case.micro_batch, loss_weighting=config.batch.loss_weighting),
            "moe": config.moe,
            "data": changed(config.data, num_workers=case.num_workers),
            "compile": changed(config.compile, enabled=False, from_step=None),
            "plan": changed(fresh.plan, auto_optimize=False, cache=False),
            "distributed": changed(config.distributed, strategy=strategy, timeout_seconds=60.0, init_method=None),
            "deepspeed": config.deepspeed,
            # Runs are compared with each other here, which names the cause: none is to end at its replicas before.
            "watch": changed(fresh.watch, report=False, quiet=True, monitor_gpu=False, log_every=0, compare_replicas=0),
        }
    )


def _report(case: Case, result: Result) -> None:
    """Hand in what the run's own records say."""
    for line in Path(result.folder / "steps.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        case.recorder.report(row["step"] - 1, loss=row["loss"], grad_norm=row["grad_norm"])
        for turn in case.due(row["step"] - 1):
            case.recorder.report(row["step"] - 1, loss=row[f"loss_{turn.name}"], turn=turn.name)


def prove(
    job: Job,
    trainer: Trainer | Subject | None = None,
    config: Config | None = None,
    *,
    full: bool = False,
    output: Path | str | None = None,
    quiet: bool = False,
    extent: Extent | None = None,
    say: Say | None = None,
) -> Certificate:
    """Prove that a job is trained correctly: against a plain loop, twice, and after kills.

    The job's own run is not touched; all work is done in separate processes and folders.

    Args:
        job: the job as it would be trained.
        trainer: what is to be proven: a function `run(case)`, or a `Subject` that says what it can do. Default:
            Drivetrain itself.
        config: the configuration that the job would be trained with.
        full: try every configuration, three processes and six kills, instead of what fits a minute.
        output: where the certificate is written; default: `certificate.json` in the folder of the run.
        quiet: print nothing.
        extent: how much is tried, in detail; `full` is one of them.
        say: is called with what is done, as it is done.

    Returns:
        The certificate. `certificate.ok` says whether anything failed, `certificate.verdicts` what.

    Example:
        >>> certificate = dt.prove(job)  # doctest: +SKIP
        >>> certificate.ok  # doctest: +SKIP
        True
    """
    if find_place().size > 1:
        raise DrivetrainError(
            "prove was started on several processes, and starts its own", remedy="start it once, without a launcher"
        )
    config = config or Config()
    job = with_optimizer_settings(job, config)
    if say is None:
        say = _quiet if quiet else _said
    if trainer is None:
        on_gpu = _uses_gpu(config, say)
        subject = drivetrain_subject(config, on_gpu=on_gpu, several_optimizers=bool(job.optims))
    else:
        subject = trainer if isinstance(trainer, Subject) else Subject(trainer, getattr(trainer, "__name__", "trainer"))
    _refuse_several(job, subject)
    chosen = extent or (FULL if full else Extent())
    console = Console(highlight=False, quiet=quiet)
    certificate = prove_subject(job, subject, replace(chosen), say)
    path = Path(output) if output is not None else config.run.output_dir / (config.run.name or job.name) / CERTIFICATE
    certificate.write(path)
    certificate.show(console)
    console.print(f"written to {path}")
    return certificate


def _refuse_several(job: Job, subject: Subject) -> None:
    if job.optims and not subject.several_optimizers:
        raise DrivetrainError(
            f"the job has {len(job.optims)} named optimizers, and {subject.name} is driven with one",
            remedy="prove Drivetrain, or a loop of your own: --trainer module:run",
        )


def _uses_gpu(config: Config, say: Say) -> bool:
    """Return whether the job is proven on a GPU: only if one is asked for, as a job means the same on any device."""
    if config.device.mode in ("auto", "cpu") and not config.device.device.startswith("cuda"):
        return False
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        say("on the CPU, since CUDA is in use in this process already, and does not survive a fork")
        return False
    return True


def _said(text: str) -> None:
    print(f"proving: {text}", file=sys.stderr, flush=True)


def _quiet(text: str) -> None:
    pass
