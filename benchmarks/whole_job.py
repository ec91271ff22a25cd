"""A whole job, with planning, compiling, the last checkpoint and the report, against the loop most people would write.

Jobs of about 20 s, of 5 min and of 1 h. The length is what the fastest plain loop takes; rates are over the whole time
of the job. The longest are forecast: a job that says it is that long is stopped when it runs steadily, and what came
before is added to so many steady steps. Ours runs 5 min of the perceptron in full; of GPT-2 it is a forecast. Plain
loops are forecast from 5 min on: what does the same in every step can be.
"""

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import plan_gpt2, plan_mlp
from benchmarks.contest import Aim, Circumstances, Competitor, Contest, Measured
from benchmarks.rivals import Workload, autocast, job_of, plan_facts, step_seconds, the_device, wait
from drivetrain import configure, train

Precision = Literal["fp32", "bf16"]
LENGTHS = {"20s": 20.0, "5min": 300.0, "1h": 3600.0}
LEAST_SAVED = 1 / 1.05  # at most 5 % slower
NAMES = ("whole-job-gpt2", "whole-job-mlp")


def plain(
    workload: Workload,
    target_seconds: float,
    precision: Precision,
    micro_batch: int,
    *,
    forecast: bool,
) -> Measured:
    """Train with a DataLoader, eager, AdamW as torch makes it, the weights saved at the end; as many steps as fit."""
    device = the_device()
    pace = workload.pace
    began = time.perf_counter()
    torch.manual_seed(0)
    model = workload.model().to(device)
    optimizer = workload.optimizer(model.parameters())
    loader = DataLoader(TensorDataset(*workload.data()), micro_batch, shuffle=True, **workload.loader)
    count = -(-workload.global_batch // micro_batch)
    done, num_steps, mark, usual = 0, pace.num_steps, 0.0, 0.0
    while done < num_steps:
        for number, batch in enumerate(loader, start=1):
            inputs = [part.to(device, non_blocking=True) for part in batch]
            with autocast(device, precision):
                loss = workload.loss(model, inputs)
            (loss / count).backward()
            if number % count and number < len(loader):
                continue
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == pace.warm_steps:
                wait(device)
                mark = time.perf_counter()
            elif done == pace.num_steps:  # now it is known what a step takes, and how many there are to be
                wait(device)
                now = time.perf_counter()
                usual = (now - mark) / (done - pace.warm_steps)
                if not forecast:
                    num_steps = max(done, round((target_seconds - (now - began)) / usual) + done)
            if done == num_steps:
                break
    wait(device)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / "end.pt")
    whole = time.perf_counter() - began
    if forecast:
        before = whole - done * usual
        num_steps = max(1, round((target_seconds - before) / usual))
        whole = before + num_steps * usual
    return Measured([whole / num_steps], {"steps": num_steps, "whole_seconds": round(whole, 2)})


def ours(
    workload: Workload, length: str, target_seconds: float, told: Circumstances, *, forecast: bool = False
) -> Measured:
    """Train by `dt.train(job)` with no flags, for as many steps as the fastest plain loop does in that time.

    Nothing was planned or compiled before, whatever other lengths have left: a whole job is a first start.
    """
    fastest = max((rate for name, rate in told.known.items() if name.startswith("plain") and length in name), default=0)
    if not fastest:
        raise RuntimeError(f"the plain loop of {length} has to be measured first: it says how many steps there are")
    num_steps = max(1, round(target_seconds * fastest / workload.global_batch))
    end_after = workload.pace.num_steps if forecast else None
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, _fresh_caches(folder)):
        job = job_of(workload, max_steps=num_steps, end_after=end_after)
        began = time.time()
        result = train(job, configure(output_dir=folder))
        whole = time.time() - began
        steps = step_seconds(result.folder)
        facts = plan_facts(result.folder, began)
    if forecast:
        steady = sorted(steps[workload.pace.warm_steps :])
        usual = steady[len(steady) // 2]
        whole += (num_steps - len(steps)) * usual
    return Measured([whole / num_steps], {"steps": num_steps, "whole_seconds": round(whole, 2), **facts})


def _fresh_caches(folder: str) -> dict[str, str]:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "DRIVETRAIN_CACHE")
    return {name: str(Path(folder) / name.lower()) for name in names}


def _competitors(
    work: Workload, micro_batch: int, seconds: dict[str, float], forecasts: set[str]
) -> tuple[Competitor, ...]:
    words: dict[Precision, str] = {"fp32": "fp32 as torch comes", "bf16": "bf16 autocast"}
    found: list[Competitor] = []
    for length, target in seconds.items():
        is_plain_forecast, is_forecast = length != "20s", length in forecasts
        for precision, described in words.items():
            measure = partial(plain, work, target, precision, micro_batch, forecast=is_plain_forecast)
            found.append(
                Competitor(
                    f"plain-{precision}-{length}",
                    f"a plain loop, {described}, DataLoader, AdamW, micro-batch {micro_batch}; "
                    + _described(length, is_plain_forecast),
                    lambda _, measure=measure: measure(),  # type: ignore[misc]
                    cap_seconds=3 * target if not is_plain_forecast else 90,
                )
            )
        found.append(
            Competitor(
                f"ours-{length}",
                f"dt.train(job) with no flags; {_described(length, is_forecast)}",
                partial(ours, work, length, target, forecast=is_forecast),
                cap_seconds=3 * target + 240,
                alone=True,
            )
        )
    return tuple(found)


def _described(length: str, is_forecast: bool) -> str:
    return f"{length}, by forecast" if is_forecast else length


def _contest(
    name: str, model: str, tiny: Workload, work: Workload, micro_batch: int, smoke: bool, forecasts: set[str]
) -> Contest:
    work, seconds = (tiny, {"20s": 1.0, "1h": 10.0}) if smoke else (work, LENGTHS)
    competitors = _competitors(work, micro_batch, seconds, forecasts)
    return Contest(
        name=name,
        module=__name__,
        workload={"model": model, "global_batch": work.global_batch, "lengths": seconds},
        unit="samples/s over the whole job",
        units_per_step=work.global_batch,
        competitors=competitors,
        order=tuple(each.name for each in competitors),
        aims=tuple(
            Aim(f"plain loop, a job of {length}", _plain_names(length), LEAST_SAVED, f"ours-{length}")
            for length in seconds
        ),
    )


def _plain_names(length: str) -> tuple[str, ...]:
    return f"plain-fp32-{length}", f"plain-bf16-{length}"


def contest(name: str, smoke: bool = False) -> Contest:
    if name == "whole-job-gpt2":
        work, model = plan_gpt2.workload(smoke), "GPT-2, 124 million weights, sequence 1024"
        paced = work.paced(warm_steps=3, window_steps=5, num_windows=1)
        return _contest(name, model, work, paced, 8, smoke, {"5min", "1h"})
    work, model = plan_mlp.workload(smoke), "perceptron 784-256-256-10"
    paced = work.paced(warm_steps=100, window_steps=500, num_windows=1)
    return _contest(name, model, work, paced, work.global_batch, smoke, {"1h"})
