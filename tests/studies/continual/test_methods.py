"""What is compared is what it says: sizes, the same stream, routing by nearness, equally many trials."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from studies.continual.command import MethodName
from studies.continual.comparison import Study, num_parameters
from studies.continual.consolidation import Consolidated
from studies.continual.diary import Diary
from studies.continual.methods import METHODS, MethodSettings, Scale, make_job, make_network, trials_of
from studies.continual.networks import Mixture, RankByNearness
from studies.continual.pictures import COLOURS
from studies.continual.tasks import Images, make_tasks
from studies.continual.tuned import TUNED
from torch import Tensor

from drivetrain.core.hook import StepContext
from drivetrain.core.world import World

SCALE = Scale(hidden=8, max_experts=6, batch=4, steps_per_task=10, remembered=20)


def images(num_samples: int = 60) -> Images:
    generator = torch.Generator().manual_seed(0)
    return Images(torch.rand(num_samples, 16, generator=generator), torch.arange(num_samples) % 10, 4)


def context(model: torch.nn.Module, step: int) -> StepContext:
    return StepContext(step=step, epoch=0, model=model, world=World(), folder=Path())


def test_one_list_of_methods() -> None:
    assert list(METHODS) == list(get_args(MethodName)) == list(COLOURS)


def test_every_method_is_tuned_with_equally_many_trials() -> None:
    assert {len(trials_of(method)) for method in METHODS.values()} == {4}
    assert all(len(set(trials_of(method))) == 4 for method in METHODS.values())


@pytest.mark.parametrize("method", METHODS)
def test_sizes_are_as_told(method: str) -> None:
    """Of what has all its experts. Dense networks have as many hidden units as the experts together, or of a sample."""
    study = Study("made", "rotated", 2, SCALE, images(), images())
    told = study.size_of(method)
    full = replace(SCALE, first_experts=SCALE.max_experts)
    model = make_network(METHODS[method], 16, full, MethodSettings(1e-3))
    if isinstance(model, Mixture) and METHODS[method].network == "fixed" and METHODS[method].by_nearness:
        spare = num_parameters(model) // (SCALE.max_experts + 1)  # the slot that is never filled
        assert told["total"] == num_parameters(model) - spare
    else:
        assert told["total"] == num_parameters(model)
    assert told["active"] <= told["total"]
    if METHODS[method].network == "dense":
        width = (model.network if isinstance(model, Consolidated) else model).into.out_features
        assert width == 8 * (6 if METHODS[method].size == "total" else 2)


def test_all_get_the_same_samples_in_the_same_order() -> None:
    tasks = make_tasks("rotated", images(), images(), 2, seed=3)
    streams = [
        make_job(name, method, tasks, SCALE, MethodSettings(1e-3), seed=3)[0].data
        for name, method in (("a", METHODS["dense"]), ("b", METHODS["ewc"]), ("c", METHODS["growing"]))
    ]
    assert all(torch.equal(stream.order, streams[0].order) for stream in streams)
    mixed = make_job("d", METHODS["joint"], tasks, SCALE, MethodSettings(1e-3), seed=3)[0].data
    assert torch.equal(mixed.order.sort().values, streams[0].order.sort().values)  # the same ones, in another order


def test_a_sample_goes_to_the_nearest_centroid() -> None:
    torch.manual_seed(0)
    model = Mixture(16, 8, 10, 4, 6, k=1, by_nearness=True)
    layer = model.mixture
    layer.centroids[:4, :-1] = torch.rand(4, 16)
    layer.centroids[:4, -1] = 1.0
    RankByNearness(5)(context(model, 5))
    chosen: list[Tensor] = []
    layer.router.register_forward_hook(lambda router, inputs, routing: chosen.append(routing.chosen))
    pixels = torch.rand(50, 16)
    model(pixels)
    expected = torch.cdist(pixels, layer.centroids[:4, :-1]).argmin(1)
    assert torch.equal(chosen[0][:, 0], expected)
    assert len(expected.unique()) > 1
    assert not layer.router.weight.requires_grad


def test_the_diary_knows_every_task() -> None:
    tasks = make_tasks("split", images(), images(), 2, seed=0)
    diary = Diary(tasks, every=5, steps_per_task=10)
    told: list[list[float]] = []
    diary.on_task = told.append
    model = Always(int(tasks[1].test.labels[0]))
    for step in (5, 10, 15, 20):
        diary(context(model, step))
    shares = [float((task.test.labels == model.label).double().mean()) for task in tasks]
    assert diary.matrix == [shares, shares] == told
    assert model.training
    twin = Diary(tasks, every=5, steps_per_task=10)
    twin.load_state_dict(diary.state_dict())
    assert (twin.matrix, twin.experts) == (diary.matrix, diary.experts)


class Always(torch.nn.Module):
    """Says the same class whatever it sees."""

    def __init__(self, label: int) -> None:
        super().__init__()
        self.label = label

    def forward(self, pixels: Tensor) -> Tensor:
        assert not self.training
        return torch.nn.functional.one_hot(torch.full((len(pixels),), self.label), 10).float()


def test_tuned_settings_are_among_what_was_tried() -> None:
    for by_method in TUNED.values():
        assert by_method.keys() == METHODS.keys()
        assert all(settings in trials_of(METHODS[name]) for name, settings in by_method.items())
