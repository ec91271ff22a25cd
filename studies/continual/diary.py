"""Hooks at the end of each task: record the accuracy on every task, and do what a method needs there."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.core.hook import StepContext
from studies.continual.consolidation import Consolidated
from studies.continual.networks import num_experts_in
from studies.continual.tasks import Images, Task

AT_ONCE = 1000  # samples of a test
CONSOLIDATED = 256  # samples of a task whose Fisher information is taken


class Diary:
    """Records the accuracy on every task after each, and the number of experts over time. Saved with the run."""

    def __init__(self, tasks: Sequence[Task], every: int, steps_per_task: int) -> None:
        self.every, self._tasks, self._steps_per_task = every, tasks, steps_per_task
        self.matrix: list[list[float]] = []
        self.experts: list[list[int]] = []  # [step, experts], where their number is another
        self.on_task: Callable[[list[float]], None] = lambda accuracies: None

    def __call__(self, context: StepContext) -> None:
        count = num_experts_in(context.model)
        if count and (not self.experts or self.experts[-1][1] != count):
            self.experts.append([context.step, count])
        if context.step % self._steps_per_task == 0:
            self.matrix.append([accuracy(context.model, task.test, context.world.device) for task in self._tasks])
            context.tell("task", step=context.step, accuracy=self.matrix[-1], experts=count)
            self.on_task(self.matrix[-1])

    def state_dict(self) -> Mapping[str, Any]:
        return {"matrix": self.matrix, "experts": self.experts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.matrix, self.experts = [list(row) for row in state["matrix"]], [list(row) for row in state["experts"]]


class ConsolidateAfterTasks:
    """Consolidates a network when a task is over. The result is in its buffers."""

    def __init__(self, tasks: Sequence[Task], steps_per_task: int) -> None:
        self.every, self._tasks = steps_per_task, tasks

    def __call__(self, context: StepContext) -> None:
        task = self._tasks[context.step // self.every - 1]
        order = torch.randperm(len(task.train.labels), generator=torch.Generator().manual_seed(context.step))
        for module in context.model.modules():
            if isinstance(module, Consolidated):
                module.consolidate(task.train.pixels[order[:CONSOLIDATED]].to(context.world.device))

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@torch.no_grad()
def accuracy(model: nn.Module, images: Images, device: torch.device) -> float:
    was_training = model.training
    model.eval()
    try:
        parts = zip(torch.split(images.pixels, AT_ONCE), torch.split(images.labels, AT_ONCE), strict=True)
        right = [int((model(pixels.to(device)).argmax(1) == labels.to(device)).sum()) for pixels, labels in parts]
    finally:
        model.train(was_training)
    return sum(right) / len(images.labels)
