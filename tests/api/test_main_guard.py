"""A script without `if __name__ == "__main__"` whose workers are started by spawn: the cause and the remedy."""

import subprocess
from pathlib import Path

import pytest

from tests import warm_python

HEAD = """
import sys
import torch, torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset
import drivetrain as dt

class Numbers(Dataset):
    def __len__(self): return 16
    def __getitem__(self, index): return torch.ones(4) * index, index % 3

def work(rank): pass

def main(context, hooks=(), **settings):
    data = DataLoader(Numbers(), batch_size=8, num_workers=1, multiprocessing_context=context)
    job = dt.Job(name="g", model=lambda: torch.nn.Linear(4, 3), data=data, hooks=hooks, epochs=1,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.001))
    result = dt.train(job, dt.configure(output_dir=sys.argv[1], report=False, **settings), quiet=True)
    print("trained", result.steps)

class Spawning:
    every = 1
    def __call__(self, context): mp.spawn(work, nprocs=1)
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
"""


def run(folder: Path, tail: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "script.py"
    script.write_text(HEAD + tail + "\n")
    return warm_python.run([str(script), str(folder / "runs")])  # only what it spawns is a fresh interpreter


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ("main('spawn', num_workers=1)", "they import the script, and it trains when it is imported"),
        ("main('fork', [Spawning()])", "the training was started again by a child process"),
    ],
)
def test_the_cause_is_named(tmp_path: Path, tail: str, words: str) -> None:
    done = run(tmp_path, tail)
    assert done.returncode != 0
    assert words in done.stderr
    assert '`if __name__ == "__main__":`' in done.stderr
    assert "in use by another run" not in done.stderr


@pytest.mark.parametrize(("guard", "is_noted"), [("if __name__ == '__main__':", False), ("if True:", True)])
def test_workers_nobody_insists_on_are_done_without(tmp_path: Path, guard: str, is_noted: bool) -> None:
    done = run(tmp_path, f"{guard}\n    main('spawn')")
    assert done.returncode == 0, done.stderr
    assert "trained 2" in done.stdout
    assert ("trains when it is imported" in (tmp_path / "runs" / "g" / "events.jsonl").read_text()) is is_noted
