"""Dumps of torch's flight recorder: real ones of gloo ranks, planted ones that would run code, and what they tell."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.launch.root_cause import (
    DUMP_FILES,
    TIMEOUT,
    Failure,
    dump_environment,
    first_cause,
    reached_by_dump,
    reached_by_log,
    waited_for,
)
from tests.gloo_pool import GlooPool


def dump_after(folder: str, calls: dict[int, list[str]]) -> None:
    """Do the collectives of this rank in a group of its own, and write its dump as torch does for NCCL."""
    rank = torch.distributed.get_rank()
    one = torch.distributed.new_group([rank], group_desc=f"of {rank}")
    for name in calls[rank]:
        getattr(torch.distributed, name)(torch.ones(2), **({"src": rank} if name == "broadcast" else {}), group=one)
    Path(folder, f"rank-{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())


def waiting(rank: int, **group: Any) -> Failure:
    facts = {"number": 3, "operation": "", "waits": True, "ranks": [0, 1, 2], **group}
    return Failure(TIMEOUT, rank, 0, "a", 1, headline="", follows=True, at=float(rank), collectives={"0": facts})


def test_a_real_dump_is_read(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(dump_after, str(tmp_path), {0: ["all_reduce", "broadcast"], 1: ["all_reduce"]}, world=2)
    for rank, (number, operation) in enumerate([(2, "broadcast of [[2]]"), (1, "all_reduce of [[2]]")]):
        (found,) = [facts for group, facts in reached_by_dump(tmp_path / f"rank-{rank}").items() if "of " in group]
        assert (found["number"], found["operation"]) == (number, operation)


def test_the_rank_that_did_not_come_or_called_another_collective_is_named() -> None:
    behind = first_cause([waiting(0, operation="all_reduce of [[4]]"), waiting(1), waiting(2, number=2)])
    assert behind.rank == 2
    assert "it had enqueued 2 of group 0" in behind.headline
    odd = [waiting(0, operation="all_reduce of [[4]]"), waiting(1, operation="broadcast of [[4]]")]
    odd.append(replace(odd[0], rank=2))
    found = first_cause(odd)
    assert found.rank == 1
    assert (
        found.headline
        == "called broadcast of [[4]] as collective 3 of group 0, where others called all_reduce of [[4]]"
    )
    assert waited_for([waiting(0, ranks=[0, 3]), waiting(1, ranks=[1, 2], waits=False)]) == {0, 3}


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("ran", "w")


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_nothing_in_a_dump_is_run(protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entry = {"process_group": ("0", "default_pg"), "collective_seq_id": 1, "profiling_name": "nccl:all_reduce",
             "input_sizes": [], "state": "started"}  # fmt: skip
    plain = {"entries": [entry], "pg_config": {"0": {"ranks": "[0, 1]"}}}
    path = tmp_path / "rank-0"
    path.write_bytes(pickle.dumps(plain, protocol))
    assert reached_by_dump(path)["0(default_pg)"]["ranks"] == [0, 1]
    for bad in ({**plain, "version": Payload()}, Payload(), {"entries": 3}, [], {"entries": [{}]}):
        path.write_bytes(pickle.dumps(bad, protocol))
        assert reached_by_dump(path) == {}
    path.write_bytes(b"\x80\x04garbage")
    assert reached_by_dump(path) == reached_by_dump(tmp_path / "absent") == {}
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Payload())).close()
    assert (tmp_path / "ran").exists(), "the payload would have run"


def test_a_users_own_variables_stay() -> None:
    assert dump_environment({}, "/x/rank-")[DUMP_FILES[0]] == "/x/rank-"
    own = {DUMP_FILES[1]: "/mine/", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert dump_environment(own, "/x/rank-") == {}


def test_the_log_tells_of_each_group() -> None:
    text = (
        "[PG ID 1 PG GUID 3 Rank 0]  failure detected by watchdog at work sequence id: 57 PG status: last enqueued "
        "work: 57, last completed work: 56\n[PG ID 0 PG GUID 0(default_pg) Rank 0] Received a dump signal due to a "
        "collective timeout from this local rank and we will try our best to dump the debug info. Last enqueued NCCL "
        "work: 593, last completed NCCL work: 593.This is most likely\n"
    )
    found = reached_by_log(text)
    assert {group: (facts["number"], facts["waits"]) for group, facts in found.items()} == {
        "3": (57, True),
        "0(default_pg)": (593, False),
    }
