"""Sleep: what is replayed is an honest step of the job's own optimizer, what does harm is taken back, and a run that
was killed goes on the same."""

import copy
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from drivetrain import Job, drive
from drivetrain.api.training import train as train_job
from drivetrain.config import configure
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.hook import ExpertAccess, Hook, Rehearsal, StepContext
from drivetrain.core.world import World
from drivetrain.moe import Balance, Lifecycle, MixtureOfExperts, Rules, Sleep, SleepRules, Slots
from drivetrain.moe.replay import Replay, Reservoir
from drivetrain.moe.sleep import Night
from tests.api.jobs import Trained, Variant, Vectors, run
from tests.api.test_resume import PlantedError
from tests.gloo_pool import GlooPool
from tests.moe.jobs import Mixture, MixtureModel
from tests.moe.test_lifecycle import by_number
from tests.strategies.test_expert_parallel import EXPERT_PARALLEL, distances, sgd


class Blobs:
    """Four classes, each around a point of its own."""

    def __init__(self, num_samples: int = 120, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(5)
        centres = 2 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
        self.labels = torch.arange(num_samples) % 4
        noise = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
        self.inputs = (centres[self.labels] + 0.5 * noise).to(dtype)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.inputs[number], self.labels[number]

    # As a run offers its samples to hooks:

    def of_step(self, step: int) -> Sequence[int]:
        return [(step * 10 + place) % len(self) for place in range(10)]

    def items(self, numbers: Sequence[int]) -> list[Any]:
        return [self[number] for number in numbers]

    def batch(self, numbers: Sequence[int]) -> list[Tensor]:
        return [self.inputs[list(numbers)], self.labels[list(numbers)]]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


class Awake:
    """A model some steps into training, and what a hook sees of it."""

    def __init__(self, num_experts: int = 3, num_slots: int = 6, steps: int = 30, **layer: Any) -> None:
        torch.manual_seed(0)
        self.model = MixtureModel(Mixture(num_experts=num_experts, num_slots=num_slots, balance=Balance(0.0))).double()
        self.data = Blobs()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.01)
        for step in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.model, self.data.batch(self.data.of_step(step))).backward()
            self.optimizer.step()
        self.averages = {p: p.detach().clone() for p in self.model.parameters()}
        self.rehearsal = Rehearsal(self.data, self.optimizer, None, loss_of)
        self.said: list[str] = []
        self.context = StepContext(
            steps,
            0,
            self.model,
            World(),
            Path(),
            say=self.said.append,
            experts=ExpertAccess(self.companions, self.rehearsal),
        )

    def companions(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.optimizer.state[parameter]
        return {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"], "average": self.averages[parameter]}  # type: ignore[index]

    @property
    def layer(self) -> MixtureOfExperts:
        return self.model.mixture

    def night(self, rules: SleepRules, reservoir: int = 60) -> Night:
        kept = Reservoir(reservoir)
        for number in range(len(self.data)):
            kept.add(number, str(int(self.data.labels[number])))
        return Night(self.context, self.rehearsal, rules, kept, 0, rules.agreement, 0)


CALM = SleepRules(
    replay_steps=0, specialise_steps=0, agreement=2.0, idle_share=-1.0, busy_share=1e9, replay_batch=16, rate=1.0
)


def test_a_replayed_step_is_the_job_optimizers_and_leaves_it_as_it_was() -> None:
    awake = Awake()
    twin = copy.deepcopy(awake.model).eval()
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.01)
    other.load_state_dict(copy.deepcopy(awake.optimizer.state_dict()))
    before = copy.deepcopy(awake.optimizer.state_dict())
    gradients = [parameter.grad.clone() for parameter in awake.model.parameters()]
    tallies = awake.layer.tally.on(torch.device("cpu")).clone()
    replay = Replay(awake.context, awake.rehearsal, micro_batch=5)
    batches = [[1, 7, 9, 20, 30, 31, 50], [2, 4, 8, 16]]
    with replay.learning(0.25):
        for numbers in batches:
            replay.step(numbers)
    for group in other.param_groups:
        group["lr"] = 0.25 * 1e-2
    for numbers in batches:
        other.zero_grad()
        loss_of(twin, awake.data.batch(numbers)).backward()
        other.step()
    for (name, ours), theirs in zip(awake.model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14), name
    after = awake.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"], "rates as they were"
    for index, state in before["state"].items():
        assert all(torch.equal(after["state"][index][name], value) for name, value in state.items())
    assert all(torch.equal(p.grad, g) for p, g in zip(awake.model.parameters(), gradients, strict=True))
    assert torch.equal(awake.layer.tally.on(torch.device("cpu")), tallies), "nothing is counted"
    assert awake.model.training


def test_the_moving_average_moves_by_as_much_as_the_weights() -> None:
    awake = Awake()
    for average in awake.averages.values():
        average += 0.1
    before = {p: (p.detach().clone(), average.clone()) for p, average in awake.averages.items()}
    replay = Replay(awake.context, awake.rehearsal, 100)
    with replay.learning(1.0):
        replay.step([1, 2, 3])
    for parameter, (weights, average) in before.items():
        assert torch.allclose(awake.averages[parameter] - average, parameter - weights, atol=1e-15)


def test_a_replay_is_judged_by_held_out_samples_where_there_are_some() -> None:
    """Remembered samples were trained on: the loss on them falls while that on others rises."""
    awake = Awake()
    before = [parameter.detach().clone() for parameter in awake.model.parameters()]
    measured = iter([1.0, 1.001])  # what the validation set says before and after
    awake.context = replace(awake.context, measure=lambda: {"valid_loss": next(measured)})
    rules = SleepRules(**{**vars(CALM), "replay_steps": 8, "rate": 0.5})
    night = awake.night(rules)
    remembered = night._replay.loss(night._checked)
    (stage,) = night.run()
    assert (stage.what, stage.kept, stage.loss) == ("replay", False, (1.0, 1.001))
    assert all(torch.equal(p, old) for p, old in zip(awake.model.parameters(), before, strict=True))
    assert night._replay.loss(night._checked) == remembered


def test_harm_within_the_tolerance_does_not_add_up() -> None:
    """Each part raises the held-out loss by 0.8 %: together they may not by more than 1 %."""
    awake = Awake()
    losses = iter([1.0, 1.008, 1.016])
    awake.context = replace(awake.context, measure=lambda: {"valid_loss": next(losses)})
    changes = {"specialise_steps": 30, "specialise_weight": 1.0, "replay_batch": 45, "agreement": -1.0}
    stages = awake.night(SleepRules(**{**vars(CALM), **changes})).run()
    assert [(stage.what, stage.kept) for stage in stages] == [("specialise", True), ("merge", False)]


def test_what_is_checked_with_is_never_replayed() -> None:
    """Also where so little is remembered that none of it was set aside."""
    awake = Awake()
    for capacity in (3, 6, 9, 60):
        night = awake.night(SleepRules(**{**vars(CALM), "replay_steps": 2}), reservoir=capacity)
        drawn = {number for step in range(50) for number in night._draw(16, step)}
        assert not drawn & set(night._checked)
        if not night._checked:
            assert night.run() == []


@pytest.mark.parametrize(("rate", "is_kept"), [(0.5, True), (300.0, False)])
def test_a_replay_that_does_harm_is_taken_back(rate: float, is_kept: bool) -> None:
    awake = Awake()
    before = [parameter.detach().clone() for parameter in awake.model.parameters()]
    averages = [average.clone() for average in awake.averages.values()]
    (stage,) = awake.night(SleepRules(**{**vars(CALM), "replay_steps": 8, "rate": rate})).run()
    assert (stage.what, stage.kept) == ("replay", is_kept)
    assert stage.words == "8 × 16 samples of 4 groups replayed", "a class may be in several tasks"
    assert (stage.loss[1] < stage.loss[0]) == is_kept
    same = [torch.equal(p, old) for p, old in zip(awake.model.parameters(), before, strict=True)]
    same += [torch.equal(a, old) for a, old in zip(awake.averages.values(), averages, strict=True)]
    assert not any(same) if is_kept else all(same)


def test_specialisation_makes_experts_tell_more_about_classes() -> None:
    awake = Awake()
    others = {n: p.detach().clone() for n, p in awake.model.named_parameters() if "router" not in n}
    changes = {"specialise_steps": 30, "specialise_weight": 1.0, "replay_batch": 45, "tolerance": 0.2}
    rules = SleepRules(**{**vars(CALM), **changes})
    night = awake.night(rules)
    before = night.specialisation()
    (stage,) = night.run()
    assert stage.what == "specialise"
    assert stage.kept
    assert night.specialisation() > before + 0.02
    assert all(torch.equal(p, others[n]) for n, p in awake.model.named_parameters() if n in others), "routers alone"


def test_specialisation_is_what_a_count_by_hand_says() -> None:
    awake = Awake()
    night = awake.night(CALM)
    chosen: list[Tensor] = []
    handle = awake.layer.router.register_forward_hook(lambda module, inputs, routing: chosen.append(routing.chosen))
    numbers = [number for kept in night._reservoir.groups.values() for number in kept]
    awake.model.eval()(awake.data.batch(numbers)[0])
    handle.remove()
    counts = np.zeros((6, 4))
    for number, row in zip(numbers, chosen[0].tolist(), strict=True):
        for slot in row:
            counts[slot, int(awake.data.labels[number])] += 1
    total = 0.0
    for row in counts:
        shares = row[row > 0] / max(row.sum(), 1)
        total += row.sum() * (1 + (shares * np.log(shares)).sum() / np.log(4))
    assert night.specialisation() == pytest.approx(total / counts.sum())


def test_twins_are_merged_if_the_model_is_no_worse_for_it_and_put_back_if_it_is() -> None:
    for tolerance, is_kept in ((0.5, True), (-1.0, False)):
        awake = Awake()
        slots = Slots(awake.layer, awake.companions)
        slot = slots.grow(1, noise=1e-3)
        assert slot is not None
        slots.activate(slot)
        before = {name: value.clone() for name, value in awake.model.state_dict().items()}
        rules = SleepRules(**{**vars(CALM), "agreement": 0.95, "tolerance": tolerance})
        (stage,) = awake.night(rules).run()
        assert (stage.what, stage.kept) == ("merge", is_kept)
        assert {stage.facts["expert"], stage.facts["into"]} == {1, 3}
        assert len(slots.ids) == (3 if is_kept else 4)
        after = awake.model.state_dict()
        if not is_kept:
            assert all(torch.equal(after[name], value) for name, value in before.items())


def test_an_expert_that_nobody_asks_is_pruned() -> None:
    awake = Awake(num_experts=4)
    with torch.no_grad():
        awake.layer.router.bias[2] = -10.0  # never chosen
    awake.layer.router.uses_bias = True
    (stage,) = awake.night(SleepRules(**{**vars(CALM), "idle_share": 0.05})).run()
    assert (stage.what, stage.kept, stage.facts["expert"]) == ("prune", True, 2)
    assert stage.loss[0] == pytest.approx(stage.loss[1], rel=1e-12), "who is never asked is not missed"
    assert 2 not in Slots(awake.layer).ids.values()


@pytest.mark.parametrize(("tolerance", "is_kept"), [(10.0, True), (-1.0, False)])
def test_a_busy_expert_of_many_classes_is_split(tolerance: float, is_kept: bool) -> None:
    awake = Awake(num_experts=2)
    before = {name: value.clone() for name, value in awake.model.state_dict().items()}
    moments = {p: awake.optimizer.state[p]["exp_avg"].clone() for p in awake.model.parameters()}
    averages = {p: average.clone() for p, average in awake.averages.items()}
    rules = SleepRules(**{**vars(CALM), "busy_share": 0.9, "focus": 1.1, "tolerance": tolerance})
    (stage,) = awake.night(rules).run()
    assert (stage.what, stage.kept) == ("split", is_kept)
    assert 1 <= len(stage.facts["classes"]) <= 3
    if is_kept:
        assert sorted(Slots(awake.layer).ids.values()) == [0, 1, 2]
        child = next(slot for slot, number in Slots(awake.layer).ids.items() if number == 2)
        parent = next(slot for slot, number in Slots(awake.layer).ids.items() if number == stage.facts["parent"])
        gap = awake.layer.centroids[[parent, child]] @ (
            awake.layer.router.weight[child] - awake.layer.router.weight[parent]
        )
        assert gap.tolist() == pytest.approx([-1.0, 1.0], abs=0.2), "each half leans to its own (copies have noise)"
    else:
        after = awake.model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items() if name != "mixture.next_id")
        assert all(torch.equal(awake.optimizer.state[p]["exp_avg"], value) for p, value in moments.items())
        assert all(torch.equal(awake.averages[p], value) for p, value in averages.items())


# The hook


def at(awake: Awake, step: int) -> StepContext:
    return StepContext(step, 0, awake.model, World(), Path(), say=awake.said.append, experts=awake.context.experts)


def test_growth_brings_the_next_sleep_nearer_and_calm_puts_it_off() -> None:
    awake = Awake()
    rules = SleepRules(**{**vars(CALM), "interval": 40, "shortest": 10, "longest": 60})
    hook = Sleep(5, rules)
    assert isinstance(hook, Hook)
    for step in range(5, 45, 5):
        hook(at(awake, step))
    assert [night["step"] for night in hook.history] == [40]
    assert hook.interval == 50, "nothing had changed"
    slots = Slots(awake.layer, awake.companions)
    for step in range(45, 125, 5):
        if step == 60:
            slots.grow(0)
            slots.grow(1)
        hook(at(awake, step))
    assert [night["step"] for night in hook.history] == [40, 65, 105], "50 × 0.7² = 24.5 steps; then 50 × 0.8 = 40"
    assert "2 experts grown" in hook.history[1]["why"]
    assert any("awake after" in line for line in awake.said)
    json.dumps(hook.state_dict())


def test_thresholds_adapt_and_are_saved() -> None:
    awake = Awake(num_experts=5, num_slots=6)
    lifecycle = Lifecycle(10**9, Rules())
    rules = SleepRules(**{**vars(CALM), "interval": 10, "shortest": 5, "agreement": 0.01, "tolerance": -1.0})
    hook = Sleep(5, rules, lifecycle=lifecycle)
    hook(at(awake, 10))
    assert hook.agreement > 0.25, "a merge did harm: next time it has to be more alike"
    assert lifecycle.far_factor == pytest.approx(1.1), "hardly a slot is free: grow less readily"
    other = Lifecycle(10**9, Rules())
    again = Sleep(5, rules, lifecycle=other)
    again.load_state_dict(json.loads(json.dumps(hook.state_dict())))
    assert again.state_dict() == hook.state_dict()
    assert other.far_factor == lifecycle.far_factor


def test_tasks_and_labels_are_balanced() -> None:
    awake = Awake()
    hook = Sleep(
        5, SleepRules(**{**vars(CALM), "reservoir": 24}), task_of=lambda item: "right" if item[0][0] > 0 else "left"
    )
    hook(at(awake, 12))
    groups = hook.reservoir.groups
    assert {name.split("/")[1] for name in groups} == {"0", "1", "2", "3"}
    assert all(len(kept) <= 24 // len(groups) for kept in groups.values())


def test_data_without_numbers_is_refused_in_words() -> None:
    awake = Awake()
    with pytest.raises(DrivetrainError, match="by their number"):
        Sleep()(StepContext(1, 0, awake.model, World(), Path()))


class Part(Tensor):
    """Stands for what fsdp makes of a parameter."""

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


def test_weights_that_fsdp_has_cut_are_refused_before_anything_is_replayed() -> None:
    awake = Awake()
    awake.layer.router.weight = nn.Parameter(awake.layer.router.weight.detach().as_subclass(Part))
    with pytest.raises(DrivetrainError, match="fsdp holds parts of the weights"):
        Sleep()(at(awake, 1))
    with pytest.raises(DrivetrainError, match="cannot come and go while fsdp"):
        Slots(awake.layer)


class Iterated(IterableDataset[Any]):
    """The same samples, without numbers."""

    def __init__(self, variant: Variant) -> None:
        self._samples = Vectors(variant)

    def __iter__(self) -> Iterator[Any]:
        return (self._samples[number] for number in range(len(self._samples)))


def test_what_cannot_sleep_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """And a lifecycle without anything to do says so."""
    variant = Variant(dtype=torch.float32, steps=3, global_batch=8, num_samples=24)
    with pytest.raises(DrivetrainError, match="replays samples by their number"):
        run(str(tmp_path / "asleep"), variant, data=Iterated(variant), hooks=[Sleep(every=100)])
    assert not (tmp_path / "asleep" / "suite" / "steps.jsonl").read_text()
    model, config = nn.Linear(6, 4), configure(output_dir=tmp_path, gpu_mode="cpu", num_workers=0)
    optimizer, hooks = sgd(model.parameters()), [Sleep(every=100)]
    own = drive(model, optimizer, Vectors(variant), global_batch=8, epochs=1, hooks=hooks, config=config, quiet=True)
    with pytest.raises(DrivetrainError, match="the loop is your own"):
        next(iter(own))
    said: list[str] = []
    Lifecycle().check(StepContext(0, 0, nn.Linear(2, 2), World(), Path(), say=said.append))
    assert "no MixtureOfExperts" in said[0]


# In runs

NIGHTS = SleepRules(
    interval=6, shortest=4, replay_steps=3, replay_batch=8, specialise_steps=2, reservoir=40, tolerance=0.5,
    busy_share=1.0, focus=1.1, agreement=0.6,
)  # fmt: skip
GROWING = Rules(far=1.01, new_share=0.01, patience=1, cooldown=2, agreement=2.0, idle_share=0.3, idle_looks=3)


class CrashAsleep:
    """Ends the run in a replayed step, or in the first step of training after so many of them."""

    def __init__(self, replayed: int, when: str) -> None:
        self._left, self._when = replayed, when

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled() and self._left:  # validation needs no gradients
            self._left -= not model.training
        if self._left == 0 and self._when and model.training == (self._when == "awake"):
            raise PlantedError
        return loss_of(model, batch)


def train(folder: str, strategy: str, crash: str, micro_batch: int, dtype: torch.dtype) -> Trained | None:
    variant = Variant(dtype=dtype, steps=14, global_batch=30, num_samples=90, save_every=4)
    lifecycle = Lifecycle(3, GROWING) if dtype == torch.float32 else None
    hooks = [*([lifecycle] if lifecycle else []), Sleep(2, NIGHTS, lifecycle=lifecycle)]
    changes: dict[str, Any] = {"hooks": hooks, "ema": 0.9, "data": Blobs(90, dtype), "valid": Blobs(40, dtype)}
    if dtype == torch.float64:
        changes["optimizer"] = sgd
    wanted = Mixture(num_experts=3, num_slots=6, dtype=dtype)
    try:
        return run(
            folder,
            variant,
            micro_batch,
            settings={**(EXPERT_PARALLEL if strategy == "expert_parallel" else {})},
            model=lambda: MixtureModel(wanted).to(dtype),
            loss=CrashAsleep(12, crash),
            **changes,
        )
    except PlantedError:
        return None


def nights_of(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "suite" / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "sleep"]


@pytest.fixture(scope="module")
def never_killed(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Trained]]:
    """The folder of a run that is never killed and what it comes to, trained once."""

    @functools.cache
    def trained(world: int, strategy: str, micro_batch: int, dtype: torch.dtype) -> tuple[Path, Trained]:
        folder = tmp_path_factory.mktemp("whole")
        return folder, gloo_pool.run(train, str(folder), strategy, "", micro_batch, dtype, world=world)[0]

    return trained


@pytest.mark.parametrize(
    ("world", "strategy", "crash"), [(1, "single", "asleep"), (1, "single", "awake"), (2, "expert_parallel", "asleep")]
)
def test_a_run_that_is_killed_asleep_or_later_goes_on_with_the_same_bits(
    gloo_pool: GlooPool, never_killed: Callable[..., Any], tmp_path: Path, world: int, strategy: str, crash: str
) -> None:
    args = (10 if world == 1 else 5, torch.float32)
    folder, whole = never_killed(world, strategy, *args)
    parts = str(tmp_path / "parts")
    assert gloo_pool.run(train, parts, strategy, crash, *args, world=world)[0] is None
    resumed = gloo_pool.run(train, parts, strategy, "", *args, world=world)[0]
    assert 0 < resumed.resumed_from < 14
    nights = nights_of(folder)
    assert len(nights) >= 2
    stages = {stage["what"] for night in nights for stage in night["stages"]}
    assert {"replay", "specialise"} <= stages
    assert nights[0]["before"].keys() == nights[0]["after"].keys() == {"valid_loss"}
    assert resumed.rows == whole.rows
    ours, theirs = resumed.weights | resumed.state, whole.weights | whole.state
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("strategy", ["ddp", "expert_parallel"])
def test_two_processes_sleep_as_one_does(
    gloo_pool: GlooPool, never_killed: Callable[..., Any], tmp_path: Path, strategy: str
) -> None:
    folder, alone = never_killed(1, "single", 8, torch.float64)
    args = (str(tmp_path / "shared"), strategy, "", 8, torch.float64)
    shared = gloo_pool.run(train, *args, world=2)[0]
    ours, theirs = nights_of(tmp_path / "shared"), nights_of(folder)
    assert [night["step"] for night in ours] == [night["step"] for night in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert [(s["what"], s["kept"]) for s in our["stages"]] == [(s["what"], s["kept"]) for s in their["stages"]]
        assert our["after"] == pytest.approx(their["after"], rel=1e-9)
    found = distances(by_number(shared), by_number(alone))  # children may live in other slots
    assert max(found.values()) < 1e-9, found


def test_neither_steps_nor_rates_nor_the_order_of_samples_change(tmp_path: Path) -> None:
    seen: dict[str, list[list[float]]] = {"awake": [], "asleep": []}

    def rows(name: str, hooks: list[Any]) -> list[dict[str, Any]]:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            if model.training:
                seen[name].append(batch[0][:, 0].tolist())
            return loss_of(model, batch)

        job = Job(
            name=name,
            model=lambda: MixtureModel(Mixture(num_experts=3, num_slots=4)).double(),
            data=Blobs(),
            loss=loss,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
            global_batch=20,
            max_steps=14,
            schedule=lambda step: 1 / (1 + step),
            hooks=hooks,
        )
        config = configure(output_dir=tmp_path, gpu_mode="cpu", report=False, num_workers=0)
        result = train_job(job, config, quiet=True)
        return [json.loads(line) for line in (result.folder / "steps.jsonl").read_text().splitlines()]

    awake, asleep = rows("awake", []), rows("asleep", [Sleep(2, NIGHTS)])
    assert nights_of_folder(tmp_path / "asleep")
    assert [(row["step"], row["lr"], row["samples"]) for row in asleep] == [
        (row["step"], row["lr"], row["samples"]) for row in awake
    ]
    assert seen["asleep"][-10:] == seen["awake"][-10:]
    assert [row["loss"] for row in asleep] != [row["loss"] for row in awake]


def nights_of_folder(folder: Path) -> list[Any]:
    return [line for line in (folder / "events.jsonl").read_text().splitlines() if '"sleep"' in line]
