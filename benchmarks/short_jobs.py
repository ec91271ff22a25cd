"""Jobs of about 20 s on a CPU, from the start of the interpreter to its end, against the loop most people would write.

Each job is a process of its own with empty caches; the two kinds alternate. The package's bytecode is there, as after
an installation. CPU seconds of the process are compared: they count imports, planning, every probe, the last checkpoint
and the report, and depend little on what else runs. Ours is started in three ways: as a Python script that calls
`dt.train(job)`, whose first import is drivetrain or torch, and by `drivetrain train`.
"""

import compileall
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROUNDS = int(os.environ.get("SHORT_JOBS_ROUNDS", "5"))
WAYS = {"ours": "dt.train(job)", "torch-first": "dt.train(job), torch imported first", "command": "drivetrain train"}
STEPS = {"perceptron": 2000, "convolutions": 65, "transformer": 60}  # about 20 s on a core of an Arm Neoverse-N1


class Work(NamedTuple):
    """The work that is trained, in the terms of both."""

    model: Callable[[], Any]
    data: tuple[Any, ...]
    loss: Callable[[Any, Any], Any]
    batch: int


def measure() -> dict[str, list[float]]:
    compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2)
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name in STEPS:
            plain, *ours = (_seconds(kind, name) for kind in ("plain", *WAYS))
            found.setdefault(f"{name}: plain loop (CPU s)", []).append(plain)
            for way, seconds in zip(WAYS.values(), ours, strict=True):
                found.setdefault(f"{name}: {way} (CPU s)", []).append(seconds)
                found.setdefault(f"{name}: {way}, times as fast", []).append(plain / seconds)
    return found


def _seconds(kind: str, name: str) -> float:
    from drivetrain.core import MEMORY_KEPT  # not above: a script of a job imports torch or drivetrain by itself

    with tempfile.TemporaryDirectory() as folder:
        caches = {key: f"{folder}/{key}" for key in ("DRIVETRAIN_CACHE", "TORCHINDUCTOR_CACHE_DIR")}
        command = [sys.executable, __file__, kind, name, folder]
        if kind == "command":
            script = Path(folder) / "job.py"
            imports = "import drivetrain as dt\nfrom benchmarks.short_jobs import job_of\n"
            script.write_text(f"{imports}dt.train(job_of({name!r}))\n", encoding="utf-8")
            command = [sys.executable, "-m", "drivetrain", "train", str(script), "--output-dir", folder]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environ = {key: value for key, value in os.environ.items() if key not in MEMORY_KEPT}
        subprocess.run(command, env={**environ, **caches}, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def work_of(name: str) -> Work:
    import torch
    from torch import nn
    from torch.nn import functional

    generator = torch.Generator().manual_seed(0)
    if name == "transformer":
        text = torch.randint(0, 256, (1024, 65), generator=generator)
        layer = {"dim_feedforward": 512, "dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}

        class Transformer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words, self.places = nn.Embedding(256, 128), nn.Embedding(64, 128)
                self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(128, 4, **layer) for _ in range(4)])
                self.head = nn.Linear(128, 256)

            def forward(self, words: Any) -> Any:
                mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
                x = self.words(words) + self.places(torch.arange(words.shape[1]))
                for block in self.blocks:
                    x = block(x, src_mask=mask, is_causal=True)
                return self.head(x)

        def token_loss(model: Any, batch: Any) -> Any:
            return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

        return Work(Transformer, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), token_loss, 16)

    def perceptron() -> Any:
        inner = (nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        return nn.Sequential(nn.Linear(784, 256), *inner, nn.Linear(256, 10))

    def convolutions() -> Any:
        layers: list[Any] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))

    def loss(model: Any, batch: Any) -> Any:
        return functional.cross_entropy(model(batch[0]), batch[1])

    model, shape, batch = (perceptron, (784,), 128) if name == "perceptron" else (convolutions, (3, 32, 32), 64)
    inputs = torch.randn(4096, *shape, generator=generator)
    return Work(model, (inputs, torch.randint(0, 10, (4096,), generator=generator)), loss, batch)


def plain(name: str, folder: Path) -> None:
    """Train with a DataLoader, eager, AdamW as torch makes it, the weights saved at the end."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    work = work_of(name)
    torch.manual_seed(0)
    model = work.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*work.data), work.batch, shuffle=True)
    done = 0
    while done < STEPS[name]:
        for batch in loader:
            work.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == STEPS[name]:
                break
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "end.pt")


def ours(name: str, folder: Path) -> None:
    """Train by `dt.train(job)` with no flags."""
    import drivetrain as dt

    dt.train(job_of(name), dt.configure(output_dir=folder))


def job_of(name: str) -> Any:
    import torch
    from torch.utils.data import TensorDataset

    import drivetrain as dt

    work = work_of(name)
    return dt.Job(
        name=name,
        model=work.model,
        data=TensorDataset(*work.data),
        loss=work.loss,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
        global_batch=work.batch,
        max_steps=STEPS[name],
    )


if __name__ == "__main__":
    if sys.argv[1] != "ours":
        import torch  # noqa: F401  (as the first line of a script)

    (plain if sys.argv[1] == "plain" else ours)(sys.argv[2], Path(sys.argv[3]))
