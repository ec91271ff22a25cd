"""What a loop, its functions and its model carry into the loss of a later step."""

import ast
import random
import textwrap
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import drivetrain as dt
from drivetrain.api.loop_checks import _AttributesOfSelf, _carried, _choices, _innermost_loop

CARRIED = {
    "hidden": """
        for batch in run:
            hidden = hidden.detach()
            out, hidden = model(batch, hidden)
            run.backward(out.mean())
        """,
    "baseline": """
        for batch in run:
            reward = play(batch)
            run.backward(-(reward - baseline) * model(batch))
            baseline = 0.9 * baseline + 0.1 * reward
        """,
    "count": """
        for batch in run:
            loss = model(batch)
            if count % 4 == 0:
                loss = loss + penalty(model)
            count += 1
            run.backward(loss)
        """,
    "memory": """
        for batch in run:
            memory.append(batch)
            run.backward(model(choice(memory)))
        """,
    "others": """
        for i, batch in enumerate(run):
            try:
                more = next(others)
            except StopIteration:
                more = batch
            run.backward(model(batch) + model(more))
        """,
    "unlabeled": """
        for (inputs, labels), (unlabeled, _) in zip(run, cycle(others)):
            run.backward(loss(model(inputs), labels) + entropy(model(unlabeled)))
        """,
    "pair": """
        for i, (pair, batch) in enumerate(tqdm(zip(others, run))):
            run.backward(model(batch) * pair)
        """,
    "scale": """
        while True:
            batch = next(batches)
            scale *= 0.99
            run.backward(model(batch) * scale)
        """,
    "seen": """
        for batch in run:
            seen["last"] = batch.mean()
            run.backward(model(batch) * seen.get("first", 1))
        """,
    "old": """
        for batch in run:
            if run.steps % 5 == 0:
                old = model(batch).detach()
            run.backward((model(batch) - old).mean())
        """,
    "env": """
        for batch in run:
            observed, reward = env.step(policy(batch))
            run.backward(-reward * policy(observed))
        """,
    "self.hidden": """
        for batch in self.run:
            self.hidden = self.model(batch, self.hidden)
            self.num_steps += 1
            self.run.backward(self.hidden.mean())
        """,
    "total": """
        for batch in run:
            def loss(batch):
                value = model(batch) + total
                return value
            total = total + 1
            run.step(loss)
        """,
}
CARRIED["i"] = """
    for i, (inputs, labels) in enumerate(tqdm(run)):
        strength = i / 100
        run.backward(reversed_gradient(model(inputs), strength).mean())
        run.step()
    """
CARRIED["env"] = """
    for number in run:
        loss = play(model, env)
        run.backward(loss)
        run.step()
    """
CARRIED["draws"] = """
    for batch in run:
        noise = randn(batch.shape, generator=draws)
        run.backward(model(batch + noise).mean())
        run.step()
    """
NOT_CARRIED = {
    "names of the batches": """
        for batch, name in zip(run, names):
            print(name)
            run.backward(model(batch))
        """,
    "a counter for the log": """
        for i, batch in enumerate(run):
            loss = model(batch)
            run.backward(loss)
            run.step()
            if i % 100 == 0:
                run.log("loss", loss)
        """,
    "a mean for the log": """
        for batch in run:
            loss = model(batch)
            run.backward(loss)
            total += loss.item()
            best = min(best, total)
            losses.append(loss.item())
        """,
    "assigned first": """
        for inputs, labels in run:
            with run.autocast():
                out = model(inputs)
            if labels.any():
                loss = out.mean()
            else:
                loss = out.sum()
            run.backward(loss)
            run.step()
        """,
    "left early": """
        for batch in run:
            if skipped(batch):
                loss = model(batch) * 0
                run.backward(loss)
                continue
            else:
                weight = 2.0
            run.backward(model(batch) * weight)
        """,
    "names of its own": """
        for batch in run:
            parts = [part(batch) for part in model]
            def closure(out):
                loss = sum(parts)
                return loss + out
            for name, value in closure(batch).items():
                run.log(name, value)
            run.backward(closure(batch))
            part = name = None
        """,
    "another loop": """
        for epoch in range(3):
            hidden = step(hidden)
        for batch in run:
            run.backward(model(batch) + hidden)
        """,
}


CHOOSES = {
    "best": """
        for batch in run:
            run.backward(model(batch))
            run.step()
            if run.ends_epoch:
                accuracy = evaluate(model)
                if accuracy > best:
                    best = accuracy
                    torch.save(model.state_dict(), "best.pt")
        """,
    "self.best": """
        for batch in self.run:
            self.run.backward(self.model(batch))
            value = self.measure()
            is_better = value > self.best
            if is_better:
                self.best = value
                self.save()
        """,
    "bad": """
        for batch in run:
            run.backward(model(batch))
            for other in others:
                if other > 2:
                    break
            with run.autocast():
                if evaluate(model):
                    bad = 0
                else:
                    bad += 1
                    if bad == 3:
                        break
        """,
}
CHOOSES_NOT = {
    "a break of another loop": """
        for batch in run:
            run.backward(model(batch))
            seen += 1
            for other in others:
                if seen > 3:
                    break
        """,
    "a file at every epoch": """
        for batch in run:
            run.backward(model(batch))
            losses.append(1)
            if run.ends_epoch:
                run.export("last.pt")
        """,
}


def carried(text: str, *, chooses: bool = False) -> list[str]:
    text = textwrap.dedent(text).strip()
    line = text[: text.index("run:" if "run:" in text else "run")].count("\n") + 1
    loop = _innermost_loop(_AttributesOfSelf().visit(ast.parse(text)), line)
    assert loop is not None
    known = {"run", "batches", "self.run", "self.model", "model"}  # by their values: the run itself, what it saves
    found = _carried(loop, {"run", "self.run"}, _choices(loop) if chooses else ())
    return [name for name in found if name not in known]


@pytest.mark.parametrize("name", CARRIED)
def test_carried_into_the_loss(name: str) -> None:
    assert carried(CARRIED[name]) == [name]


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_not_carried(name: str) -> None:
    assert carried(NOT_CARRIED[name]) == []


@pytest.mark.parametrize("name", CHOOSES)
def test_carried_into_a_choice(name: str) -> None:
    assert carried(CHOOSES[name], chooses=True) == [name]
    assert carried(CHOOSES[name]) == []


@pytest.mark.parametrize("name", CHOOSES_NOT)
def test_carried_into_no_choice(name: str) -> None:
    assert carried(CHOOSES_NOT[name], chooses=True) == []


# ----------------------------------------------------------------------------------------------------------------------
# What the model and the functions of the loop keep, which its own source does not show

DRAWS, SEEN, MOVING = np.random.default_rng(0), deque[Tensor](maxlen=2), nn.BatchNorm1d(3)
CALLS, LOGGED = 0, list[float]()


def drawing(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch + noise_of(batch)).square().mean()


def noise_of(batch: Tensor) -> Tensor:
    return torch.as_tensor(DRAWS.normal(size=batch.shape), dtype=batch.dtype)


def counting(model: nn.Module, batch: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return CALLS * model(batch).square().mean()


def remembering(model: nn.Module, batch: Tensor) -> Tensor:
    SEEN.append(batch.detach())
    return (model(batch).mean() - torch.cat(list(SEEN)).mean()).square()


def normalizing(model: nn.Module, batch: Tensor) -> Tensor:
    return MOVING(model(batch)).square().mean() + MOVING.running_var.mean()


def logging(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    LOGGED.append(float(loss.detach()))
    return loss


def plainly(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Remembering(nn.Module):
    """Has a state that goes on from call to call, and what only the last call has left."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.draws = nn.Linear(3, 3), kind, random.Random(0)
        self.hidden: Tensor | None = None
        self.last, self.seen = torch.zeros(1), list[Tensor]()

    def forward(self, batch: Tensor) -> Tensor:
        result = self.layer(batch)
        if self.kind == "hidden":
            result = result if self.hidden is None else result + self.hidden
            self.hidden = result.detach().mean(0)
        elif self.kind == "draws":
            result = result * self.draws.random()
        self.last = result.detach()
        self.seen.append(self.last)
        return result + 0 * self.last


@pytest.mark.parametrize(
    ("loss", "kind", "name"),
    [
        (drawing, "", "DRAWS"),
        (counting, "", "CALLS"),
        (remembering, "", "SEEN"),
        (normalizing, "", "MOVING"),
        (plainly, "hidden", "model.0.hidden"),
        (plainly, "draws", "model.0.draws"),
        (logging, "", ""),
        (plainly, "", ""),
    ],
)
def test_what_functions_and_models_keep_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: Any, kind: str, name: str
) -> None:
    """Only variables of the loop itself were looked at: a resumed run went on otherwise, and nothing said so."""
    model = nn.Sequential(Remembering(kind))
    config = dt.configure(output_dir=tmp_path, gpu_mode="cpu", report=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    run = dt.drive(model, sgd, torch.randn(20, 3), name="keeps", global_batch=4, epochs=1, config=config)
    for batch in run:
        value = loss(model, batch)
        run.backward(value)
        run.step()
    told = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint holds" in line]
    assert [f"loop       {name} changes with the steps" in line for line in told] == [True] * bool(name)
