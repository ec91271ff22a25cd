"""An optimizer that keeps all kinds of things, in all places, and whose steps depend on every one of them."""

from typing import Any

import torch

from tests.api.jobs import Trained, Variant, make_job, run
from tests.api.test_resume import CrashingLoss, PlantedError

PINNED = {"loss_weighting": "samples"}  # the loss fails at its n-th call: it must not be called to find out what it is
VARIANT = Variant("mlp", torch.float32, global_batch=12, steps=8, num_samples=60, save_every=2)


class Hoarder(torch.optim.Optimizer):
    """Elementwise, so that fsdp takes it."""

    def __init__(self, groups: Any, rho: float = 0.05, logger: Any = None, inner: Any = None) -> None:
        super().__init__(groups, {"lr": 0.05, "weight_decay": 0.0, "betas": (0.9, 0.99), "k": 0, "d": None})
        self.elementwise = True
        self.rho, self.calls, self.largest, self.modes = rho, 0, None, ("up", "down")
        self.history: list[Any] = []
        if logger is not None:
            self.logger = logger
        if inner is not None:
            self.inner = inner(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.history = [*self.history[-2:], ("call", self.calls, float("inf"))]
        whole: Any = self.state
        whole["seen"] = whole.get("seen", 0) + 1
        for group in self.param_groups:
            assert type(group["betas"]) is tuple
            group["k"] += 1
            group["d"] = torch.tensor(1.0) if group["d"] is None else group["d"] * 0.9
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(group, parameter)
        self.largest = torch.tensor(float(self.calls), dtype=torch.float64)

    def _move(self, group: Any, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        state["mode"] = "down" if state.get("mode") == "up" else "up"
        state["trail"] = ({"number": group["k"], "kind": state["mode"]}, *state.get("trail", ())[:1])
        past: list[torch.Tensor] = state.get("past", [])
        state["past"] = [*past[-1:], parameter.grad.clone()]  # type: ignore[union-attr]
        state["signs"] = parameter.grad > 0  # type: ignore[operator]
        state["count"] = state.get("count", torch.zeros((), dtype=torch.int64)) + 1
        assert state["signs"].dtype is torch.bool
        assert state["count"].dtype is torch.int64
        assert all(type(entry) is dict for entry in state["trail"])
        size = group["d"].item() * self.rho * (1.5 if state["mode"] == "up" else 0.5)
        size *= 1 + 0.1 * (self.calls % 3) + 0.01 * len(self.history) + 0.02 * self.state["seen"]  # type: ignore[index]
        size *= 1.0 if self.largest is None else 1 + 0.01 * self.largest.item()
        size *= 1 + 0.1 * sum(entry["number"] for entry in state["trail"]) / group["k"] / int(state["count"])
        parameter.add_(sum(state["past"]) + 0.01 * state["signs"], alpha=-size)


def make(groups: Any) -> Hoarder:
    return Hoarder(groups)


def run_hoarder(folder: str, strategy: str) -> Trained | None:
    return run(folder, VARIANT, 3, settings={"parallel_strategy": strategy, **PINNED}, optimizer=make)


def crash_hoarder(folder: str, strategy: str, at_call: int) -> bool:
    loss = CrashingLoss(make_job(VARIANT).loss, at_call)
    try:
        run(folder, VARIANT, 3, settings={"parallel_strategy": strategy, **PINNED}, optimizer=make, loss=loss)
    except PlantedError:
        return True
    return False
