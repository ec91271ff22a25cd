"""What a checkpoint of a sharded model of 70 billion weights costs a rank of 1,024, apart from the numbers themselves.

`checkpoint-scale`: 723 parameters with the names and the numbers of rows of Llama 70B, each with two moments of AdamW,
and a step count on rank 0. A row has one element instead of thousands, so that 1,024 files fit on one disk: what is
measured is everything that grows with tensors and ranks. The ranks are simulated one at a time: each is the real code
over a world whose collectives are recorded. What rank 0 gets from the others is computed by a forked process, so that
its memory is its own. Then a rank resumes: in the same world, and in one of 768 ranks, whose parts lie across files.
"""

import json
import os
import pickle
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint import Checkpoint, Checkpointer, Shard
from drivetrain.checkpoint.manifest import even_rows
from drivetrain.core.world import World

RANKS, OTHER_RANKS = 1024, 768
STEP = 100
MIB = 2**20


def parameters(layers: int = 80) -> dict[str, int]:
    """Return the names of Llama 70B's parameters, and the number of rows of each."""
    blocks = {
        "self_attn.q_proj.weight": 8192,
        "self_attn.k_proj.weight": 1024,
        "self_attn.v_proj.weight": 1024,
        "self_attn.o_proj.weight": 8192,
        "mlp.gate_proj.weight": 28672,
        "mlp.up_proj.weight": 28672,
        "mlp.down_proj.weight": 8192,
        "input_layernorm.weight": 8192,
        "post_attention_layernorm.weight": 8192,
    }
    rows = {f"model.layers.{layer}.{name}": count for layer in range(layers) for name, count in blocks.items()}
    return {"model.embed_tokens.weight": 128256, **rows, "model.norm.weight": 8192, "lm_head.weight": 128256}


def keys_of(names: dict[str, int]) -> dict[str, int]:
    """Return the keys of a state, and the number of rows of each."""
    found = {f"model/{name}": rows for name, rows in names.items()}
    for name, rows in names.items():
        found |= {f"optimizer/{name}/exp_avg": rows, f"optimizer/{name}/exp_avg_sq": rows}
    return found


def value_of(number: int, start: int, stop: int) -> torch.Tensor:
    """Return rows of the tensor of this number: every element of the state is another one."""
    return torch.arange(start, stop, dtype=torch.float32).add_(number % 64 * 2**18).view(-1, 1)


def state_of(keys: dict[str, int], rank: int, size: int) -> list[Shard]:
    shards = []
    for number, (key, rows) in enumerate(keys.items()):
        start, stop = even_rows(rows, rank, size)
        shards.append(Shard(key, value_of(number, start, stop), (rows, 1), (start, 0), is_part=True))
    if rank == 0:
        shards += [Shard.whole(f"{key[:-8]}/step", torch.tensor(100.0)) for key in keys if key.endswith("/exp_avg")]
    return shards


def meta_of(names: dict[str, int]) -> dict[str, Any]:
    return {"optimizer_groups": [{"params": list(names), "lr": 3e-4, "betas": [0.9, 0.95]}], "step": STEP}


class Recorded(Exception):  # noqa: N818  (no error: the rank has said what it had to say)
    """Ends the simulation of a rank."""


class SimulatedWorld(World):
    """One rank of many, alone: it hears what rank 0 said, and what it says itself is kept."""

    def __init__(self, rank: int, size: int, heard: list[Any], stops_after: int | None = None) -> None:
        super().__init__()
        self.rank, self.size, self.local_rank = rank, size, 0
        self.heard, self.said, self._stops_after = heard, list[Any](), stops_after
        self.others: Callable[[int, list[Any]], list[Any]] = lambda number, heard: []  # for rank 0
        self.seconds_elsewhere = 0.0

    def gather_to_main(self, value: Any) -> list[Any]:
        self.said.append(json.loads(json.dumps(value)))
        if self.is_main:
            began = time.perf_counter()
            texts = self.others(len(self.said), self.heard)
            self.seconds_elsewhere += time.perf_counter() - began
            return [self.said[-1], *map(json.loads, texts)]
        if len(self.said) == self._stops_after:
            raise Recorded
        return []

    def gather(self, value: Any) -> list[Any]:
        return [value] + [None] * (self.size - 1)  # failures: no other has one

    def agree(self, value: Any) -> Any:
        if self.is_main:
            self.heard.append(json.loads(json.dumps(value)))
            return self.heard[-1]
        return self.heard.pop(0)


def simulate_save(folder: Path, names: dict[str, int], size: int) -> dict[str, float]:
    """Save with ranks that are simulated one at a time. Return what rank 0 and the last rank took."""
    keys, meta = keys_of(names), meta_of(names)

    def others(number: int, heard: list[Any]) -> list[str]:
        """Return what the other ranks say in rank 0's gather of this number, computed in another process."""
        file = folder.with_name(f"said-{number}")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                file.write_bytes(
                    pickle.dumps([_said(folder, keys, meta, rank, size, number, heard) for rank in range(1, size)])
                )
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        return pickle.loads(file.read_bytes())  # type: ignore[no-any-return]

    main = SimulatedWorld(0, size, [])
    main.others = others
    shards = state_of(keys, 0, size)
    checkpointer = Checkpointer(folder, main)
    before, began = peak_bytes(), time.perf_counter()
    checkpointer.save(STEP, shards, meta)
    found = {
        "rank 0: save (s)": time.perf_counter() - began - main.seconds_elsewhere,
        "rank 0: memory of a save (MiB)": (peak_bytes() - before) / MIB,
        "manifest (MB)": (folder / f"step-{STEP:08d}" / "manifest.json").stat().st_size / 1e6,
        "tensors": len(keys) + len(names),
        "files": len(list((folder / f"step-{STEP:08d}").iterdir())) - 1,
    }
    return found | _in_fork(lambda: _time_other(folder.with_name("other"), keys, meta, size, main.heard))


def _said(
    folder: Path, keys: dict[str, int], meta: dict[str, Any], rank: int, size: int, number: int, heard: list[Any]
) -> str:
    world = SimulatedWorld(rank, size, list(heard), stops_after=number)
    try:
        Checkpointer(folder, world).save(STEP, state_of(keys, rank, size), meta)
    except Recorded:
        return json.dumps(world.said[-1])
    raise AssertionError("it has not said as much")


def _time_other(
    folder: Path, keys: dict[str, int], meta: dict[str, Any], size: int, heard: list[Any]
) -> dict[str, float]:
    """Let a rank besides rank 0 save; its file goes elsewhere, since it is there already."""
    world = SimulatedWorld(1, size, list(heard))
    shards = state_of(keys, 1, size)
    checkpointer = Checkpointer(folder, world)
    draft = next(each["value"][0] for each in heard if isinstance(each.get("value"), list) and each["value"])
    (folder / draft).mkdir(parents=True)
    before, began = peak_bytes(), time.perf_counter()
    checkpointer.save(STEP, shards, meta)
    return {
        "another rank: save (s)": time.perf_counter() - began,
        "another rank: memory of a save (MiB)": (peak_bytes() - before) / MIB,
    }


def simulate_resume(folder: Path, names: dict[str, int], rank: int, size: int) -> dict[str, float]:
    """Find the checkpoint and read this rank's part of every tensor. Return what it took; the numbers are checked."""
    keys = keys_of(names)
    steps = [{"value": []}, {"value": [STEP]}]  # of the folder that is prepared, and of the listing
    before, began = peak_bytes(), time.perf_counter()
    checkpoint = Checkpointer(folder, SimulatedWorld(rank, size, steps)).latest()
    assert checkpoint is not None
    found: list[torch.Tensor] = []
    for key, rows in keys.items():
        start, stop = even_rows(rows, rank, size)
        found.append(checkpoint.read(key, (start, 0), (stop - start, 1)))
    seconds, num_bytes = time.perf_counter() - began, peak_bytes() - before
    for number, (rows, tensor) in enumerate(zip(keys.values(), found, strict=True)):
        assert torch.equal(tensor, value_of(number, *even_rows(rows, rank, size))), number
    return {"resume (s)": seconds, "memory of a resume (MiB)": num_bytes / MIB}


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _in_fork(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return what a function measures in a process whose peak of memory begins where this one is now."""
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(told, json.dumps(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(told)
    with os.fdopen(heard, "rb") as answers:
        text = answers.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(text)  # type: ignore[no-any-return]


def measure() -> dict[str, list[float]]:
    names = parameters()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "checkpoints"
        found = simulate_save(folder, names, RANKS)
        ranks = (("rank 0", 0, RANKS), ("another rank", RANKS // 2, RANKS), ("a rank of 768", 500, OTHER_RANKS))
        for label, rank, size in ranks:
            taken = _in_fork(lambda rank=rank, size=size: simulate_resume(folder, names, rank, size))  # type: ignore[misc]
            found |= {f"{label}: {what}": value for what, value in taken.items()}
        began = time.perf_counter()
        Checkpoint.open(folder / f"step-{STEP:08d}")
        found["one process verifies all files (s)"] = time.perf_counter() - began
    return {name: [value] for name, value in found.items()}
