"""Every competitor does the same work: the whole global batch in each step, the whole data in each epoch."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from benchmarks.child import as_torch_starts
from benchmarks.contest import Circumstances, Contest, Measured
from benchmarks.gpt2 import Gpt2
from benchmarks.resnet import ResNet50
from benchmarks.rivals import (
    Pace,
    Stopwatch,
    Workload,
    by_accelerate,
    by_hand,
    by_lightning,
    captured,
    ours,
    plan_facts,
)
from benchmarks.zoo import gpt_large
from benchmarks.zoo.bert import Bert, trimmed
from benchmarks.zoo.convnext import ConvNext
from benchmarks.zoo.efficientnet import EfficientNet
from benchmarks.zoo.vit import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import cpu, cpu_jpeg, plan_gpt2, plan_mlp, plan_resnet, rivals, side_by_side, whole_job, zoo

STEPS = 8
TOLD = Circumstances(smoke=True, is_warming=False, known={})


@pytest.fixture(autouse=True)
def switches_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Competitors set torch's switches, as a child process may; other tests are not to feel it."""
    monkeypatch.setattr(rivals, "the_device", lambda: torch.device("cpu"))  # samples are counted in Python
    threads = torch.get_num_threads()
    yield
    monkeypatch.setattr("gc.collect", lambda: None)  # what packages of the competitors import is no garbage
    as_torch_starts()
    torch.set_num_threads(threads)


class Counted:
    """A small job that keeps count of the samples whose gradients were asked for."""

    def __init__(self) -> None:
        self.samples: list[Tensor] = []
        self.work = Workload(
            model=lambda: nn.Linear(1, 2),
            loss=self.loss,
            data=lambda: (torch.arange(20.0).view(20, 1), torch.zeros(20, dtype=torch.int64)),
            global_batch=8,
            pace=Pace(2, 2, 3),
            job_steps=STEPS + 2,
            compiler="eager",
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.samples.append(batch[0].detach().clone().flatten())
        return functional.cross_entropy(model(batch[0]), batch[1])


LOOPS: dict[str, Callable[[Workload], Measured]] = {
    "by hand": lambda work: by_hand(work, micro_batch=4, precision="fp32"),
    "by hand, compiled": lambda work: by_hand(work, micro_batch=8, precision="fp32", compiled=True),
    "captured": lambda work: captured(work),
    "lightning": lambda work: by_lightning(
        work, micro_batch=4, logger=False, enable_progress_bar=False, enable_model_summary=False
    ),
    "accelerate": lambda work: by_accelerate(work, micro_batch=4),
}
PACKAGES = {"lightning", "accelerate"}


@pytest.mark.parametrize("name", LOOPS)
def test_an_epoch_is_all_of_the_data_in_steps_of_the_global_batch(name: str) -> None:
    if name in PACKAGES and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    counted = Counted()
    found = LOOPS[name](counted.work)
    assert len(found.seconds) == 3
    assert all(seconds > 0 for seconds in found.seconds)
    epoch = torch.cat(counted.samples)[:20]
    assert sorted(epoch.tolist()) == list(range(20))
    assert epoch.tolist() != list(range(20)), "samples are shuffled"
    # Eight steps: two epochs of 8, 8 and 4 samples, and two whole steps.
    assert sum(len(part) for part in counted.samples) == 2 * 20 + 16


def test_ours_does_the_same_steps() -> None:
    counted = Counted()
    found = ours(counted.work, device="cpu", report=False)
    assert len(found.seconds) == 3
    assert found.facts["plan"]["global_batch"] == 8
    assert found.facts["whole_seconds"] >= found.facts["seconds_until_start"] >= 0
    # Training comes last; before it steps may be tried out on any samples.
    assert sorted(torch.cat(counted.samples)[-60:][:20].tolist()) == list(range(20))  # 8 steps, and one not timed


def test_batches_of_different_shapes_are_the_same_samples() -> None:
    counted = Counted()
    columns = torch.arange(20.0)[:, None].expand(20, 4), torch.arange(20) % 4 + 1
    work = replace(
        counted.work, model=lambda: nn.Linear(1, 2), data=lambda: columns, collate=trimmed,
        loss=lambda model, batch: counted.loss(model, [batch[0][:, :1], batch[1] % 2]),
    )  # fmt: skip
    by_hand(work, micro_batch=8, precision="fp32")
    assert sorted(torch.cat(counted.samples)[:20].tolist()) == list(range(20))
    assert [len(part) for part in counted.samples] == [8, 8, 4, 8, 8, 4, 8, 8]
    row, length = columns[0][2], columns[1][2]
    assert trimmed([(row, length), (row, length - 1)])[0].tolist() == [[2.0] * 3] * 2


def weights_after(loop: Callable[[Workload], Measured], num_steps: int) -> list[Tensor]:
    """Of a network whose epoch is one step, so that the order does not matter."""
    kept: list[nn.Module] = []

    def model() -> nn.Module:
        kept.append(linear())
        return kept[-1]

    loop(
        Workload(
            model=model,
            loss=lambda network, batch: functional.cross_entropy(network(batch[0]), batch[1]),
            data=lambda: (INPUTS, LABELS),
            global_batch=8,
            pace=Pace(1, 1, num_steps - 1),
            learning_rate=0.1,
        )
    )
    return [parameter.detach().cpu() for parameter in kept[-1].parameters()]


INPUTS, LABELS = torch.linspace(-1, 1, 8, dtype=torch.float64).view(8, 1), torch.arange(8) % 2


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(1, 2).double()


def expected_after(num_steps: int) -> list[Tensor]:
    network = linear()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        functional.cross_entropy(network(INPUTS), LABELS).backward()
        optimizer.step()
    return [parameter.detach() for parameter in network.parameters()]


HAND: dict[str, Callable[[Workload], Measured]] = {
    "accumulated": lambda work: by_hand(work, micro_batch=3, precision="fp32"),
    "at once": lambda work: by_hand(work, micro_batch=8, precision="fp32"),
    "captured": captured,
}


@pytest.mark.parametrize("name", HAND)
def test_loops_by_hand_learn_what_a_plain_loop_learns(name: str) -> None:
    for mine, expected in zip(weights_after(HAND[name], 5), expected_after(5), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
def test_a_graph_does_what_its_steps_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps warm up before the capture; after it each replay is a step."""
    monkeypatch.setattr(rivals, "the_device", lambda: torch.device("cuda"))
    for mine, expected in zip(weights_after(captured, 50), expected_after(53), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_a_graph_takes_all_samples_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step of an epoch is shorter, and has its own graph: what is seen in an epoch adds up to all there is."""
    monkeypatch.setattr(rivals, "the_device", lambda: torch.device("cuda"))
    seen = torch.zeros(20, device="cuda")

    def loss(network: nn.Module, batch: Any) -> Tensor:
        seen.index_add_(0, batch[0].long().flatten(), torch.ones(len(batch[0]), device="cuda"))
        return functional.cross_entropy(network(batch[0]), batch[1])

    work = replace(Counted().work, loss=loss, pace=Pace(3, 3, 3))
    captured(work)
    # Four epochs of three steps, after three warm-up steps of each size.
    assert int(seen.sum()) == 4 * 20 + 3 * (8 + 4)
    assert int(seen.min()) >= 4


def test_the_stopwatch_leaves_the_warm_up_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    watch = Stopwatch(torch.device("cpu"), Pace(2, 3, 2))
    for step in range(8):
        now[0] += 100.0 if step < 2 else 1.0 if step < 5 else 2.0
        assert watch.step() == (step == 7)
    assert watch.seconds == [1.0, 2.0]
    assert watch.measured().facts["setup_seconds"] == 196.0


def test_models_are_of_the_size_they_are_said_to_be() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in ResNet50().parameters()) == 25_557_032  # as the paper's, with biases in the head
        assert sum(p.numel() for p in Gpt2().parameters()) == 124_475_904  # vocabulary padded to 50304
        # As published: with the class token, and of BERT the head that guesses masked tokens.
        assert sum(p.numel() for p in VisionTransformer().parameters()) == 86_567_656
        assert sum(p.numel() for p in ConvNext().parameters()) == 28_589_128
        assert sum(p.numel() for p in EfficientNet().parameters()) == 5_288_548
        assert sum(p.numel() for p in Bert().parameters()) == 109_514_298
        assert sum(p.numel() for p in gpt_large.build().parameters()) == pytest.approx(1.4e9, rel=0.02)
        network = ResNet50()
        assert network(torch.zeros(2, 3, 224, 224, dtype=torch.uint8)).shape == (2, 1000)
    hidden = ResNet50((1, 1, 1, 1), 8, 10).stages(torch.zeros(1, 8, 56, 56))
    assert hidden.shape == (1, 4 * 8 * 8, 7, 7)


MODULES = (plan_gpt2, plan_resnet, plan_mlp, whole_job, cpu, cpu_jpeg, side_by_side, zoo)
CONTESTS = [(module, name) for module in MODULES for name in module.NAMES]


@pytest.mark.parametrize(("module", "name"), CONTESTS, ids=[name for _, name in CONTESTS])
@pytest.mark.parametrize("smoke", [True, False])
def test_contests_name_competitors_that_they_have(module: Any, name: str, smoke: bool) -> None:
    contest: Contest = module.contest(name, smoke)
    names = [competitor.name for competitor in contest.competitors]
    assert len(set(names)) == len(names)
    for one in contest.order:
        assert one in names or any(each.startswith(one.removeprefix("best:")) for each in names)
    for aim in contest.aims:
        assert aim.ours in names
        assert set(aim.against) <= set(names)
    assert {aim.ours for aim in contest.aims} | {limit.ours for limit in contest.limits} <= set(names)
    assert all(competitor.what for competitor in contest.competitors)


@pytest.mark.parametrize(
    ("module", "name", "competitor"),
    [
        (plan_gpt2, "plan-gpt2", "ours"),
        (plan_gpt2, "plan-gpt2", "raw-compiled-32"),
        (plan_gpt2, "plan-gpt2", "raw-eager-8"),
        (plan_gpt2, "plan-gpt2", "lightning-best"),
        (plan_resnet, "plan-resnet", "ours"),
        (plan_resnet, "plan-resnet", "hand-tuned"),
        (plan_resnet, "plan-resnet", "accelerate-default"),
        (plan_mlp, "plan-mlp", "ours"),
        (plan_mlp, "plan-mlp", "captured-bf16"),
        (plan_mlp, "plan-mlp", "lightning-lean"),
        (cpu, "cpu-mlp", "ours"),
        (cpu, "cpu-cnn", "hand-channels-last"),
        (cpu, "cpu-transformer", "hand-one-thread"),
        (cpu, "cpu-mlp", "hand-workers"),
        (zoo, "zoo-bert", "eager"),
        (zoo, "zoo-bert", "ours"),
        (zoo, "zoo-convnext", "ours"),
        (zoo, "zoo-vit", "eager"),
    ],
)
def test_tiny_sizes_run(module: Any, name: str, competitor: str) -> None:
    one = module.contest(name, True).competitor(competitor)
    missing = [package for package in one.needs if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    found = one.measure(TOLD)
    assert found.seconds
    assert all(seconds > 0 for seconds in found.seconds)
    json.dumps(found.facts)


@pytest.mark.alone
@pytest.mark.parametrize("length", ["20s", "1h"])
def test_whole_jobs_of_a_tiny_size_run(length: str) -> None:
    contest = whole_job.contest("whole-job-mlp", True)
    plain = contest.competitor(f"plain-fp32-{length}").measure(TOLD)
    target = contest.workload["lengths"][length]
    assert plain.facts["whole_seconds"] == pytest.approx(target, rel=0.6)
    known = {f"plain-fp32-{length}": contest.units_per_step / (target / 50)}  # 50 steps in that time
    ours_too = contest.competitor(f"ours-{length}").measure(replace(TOLD, known=known))
    assert ours_too.facts["steps"] == 50
    with pytest.raises(RuntimeError, match="has to be measured first"):
        contest.competitor(f"ours-{length}").measure(TOLD)


@pytest.mark.parametrize("is_known", [False, True])
def test_what_a_run_folder_says(tmp_path: Path, is_known: bool) -> None:
    tried = [{"way": "eager"}, {"way": "compiled", "setup_seconds": 20.0}, {"way": "large", "out_of_memory": True}]
    plan = {
        "planning_seconds": 23.5,
        "notes": ["measured at an earlier start, and tried again with one step"] if is_known else [],
        "forecast": {"peak_bytes": 105, "measured_peak_bytes": 100},
        "tried": tried,
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    events = [
        {"event": "start", "time": "2026-01-01T00:00:30+00:00"},
        {"event": "memory", "peak_allocated_bytes": 90},
        {"event": "memory", "peak_allocated_bytes": 101},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    facts = plan_facts(tmp_path, began=1767225600.0)
    assert facts["seconds_until_start"] == 30.0
    assert facts["from_cache"] == is_known
    assert facts["compile_seconds"] == (0.0 if is_known else 20.0)
    assert facts["planning_without_compiling_seconds"] == (23.5 if is_known else 3.5)
    assert (facts["planning_seconds"], facts["out_of_memory_probes"], facts["peak_bytes"]) == (23.5, 1, 101)
    assert facts["forecast_error_percent"] == 5.0


def test_a_real_plan_is_read() -> None:
    """What planning writes is what is looked for: a name that changes is seen here."""
    work = replace(plan_mlp.workload(True), job_steps=400)
    facts = ours(work, device="cpu", report=False).facts
    assert facts["plan"]["planned"] == "measured on this machine"
    assert 0 < facts["planning_seconds"] <= facts["seconds_until_start"]
    assert facts["plan"]["tried"]
    assert "step_seconds" in facts["plan"]["forecast"]
