"""Ranks that go wrong. Loads torch, as a probe of several ranks does."""

import os
from pathlib import Path

import torch.distributed as dist

from drivetrain.verify.probe import Outcome, ProbeSetup
from drivetrain.verify.probes import collectives
from drivetrain.verify.probes.collectives import CollectiveFigures


def _run(setup: ProbeSetup) -> Outcome:
    return collectives.run_ranks("gloo", ["cpu", "cpu"], Path(setup.scratch), 1 << 20)


def ranks_right(setup: ProbeSetup) -> Outcome:
    return _run(setup)


def ranks_raise(setup: ProbeSetup) -> Outcome:
    def measure(*args: object, **kwargs: object) -> CollectiveFigures:
        if dist.get_rank() == 1:
            raise RuntimeError("planted\nsecond line")
        dist.barrier()
        raise AssertionError("unreachable")

    collectives.measure_collectives = measure
    return _run(setup)


def ranks_die(setup: ProbeSetup) -> Outcome:
    def measure(*args: object, **kwargs: object) -> CollectiveFigures:
        if dist.get_rank() == 1:
            os._exit(9)
        dist.barrier()
        raise AssertionError("unreachable")

    collectives.measure_collectives = measure
    return _run(setup)


def ranks_wrong(setup: ProbeSetup) -> Outcome:
    def measure(*args: object, **kwargs: object) -> CollectiveFigures:
        return CollectiveFigures(problems=("planted",), seconds_per_all_reduce=1, num_bytes=4, world=2)

    collectives.measure_collectives = measure
    return _run(setup)
