"""How many processes, on what: from flags and a machine, refused where it cannot work."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain import ConfigError, DrivetrainError
from drivetrain.launch.layout import (
    LaunchOptions,
    choose_cores,
    get_free_port,
    listen_on,
    loopback_interface,
    make_layout,
    numa_cores,
)
from tests.hardware_fixtures import load

FOUR = "4x-l4"


def layout(machine: str = FOUR, **options: Any) -> Any:
    return make_layout(LaunchOptions(**options), load(machine), {})


def test_every_gpu_by_default() -> None:
    found = layout()
    assert found.num_processes == 4
    assert "CUDA_VISIBLE_DEVICES" not in found.environment
    assert found.main_address == "127.0.0.1"
    assert found.environment["GLOO_SOCKET_IFNAME"] == found.environment["NCCL_SOCKET_IFNAME"] == loopback_interface()
    assert int(found.environment["OMP_NUM_THREADS"]) == max(1, load(FOUR).cpu.num_usable // 4)


def test_chosen_gpus() -> None:
    uuids = [gpu.uuid for gpu in load(FOUR).gpus]
    assert layout(num_gpus=2).environment["CUDA_VISIBLE_DEVICES"] == ",".join(uuids[:2])
    some = layout(gpu_ids=(3, 1))
    assert some.num_processes == 2
    assert some.environment["CUDA_VISIBLE_DEVICES"] == f"{uuids[3]},{uuids[1]}"


def test_the_cpu() -> None:
    found = layout(cpu=True, num_processes=2)
    assert found.num_processes == 2
    assert found.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert layout(cpu=True).num_processes == 1


def test_what_the_user_set_stays() -> None:
    found = make_layout(LaunchOptions(), load(FOUR), {"OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "eth7"})
    assert "OMP_NUM_THREADS" not in found.environment
    assert "NCCL_SOCKET_IFNAME" not in found.environment


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_processes": 5}, "5 processes for 4 GPUs: each needs one of its own"),
        ({"num_gpus": 5}, "asks for 5: 4 GPUs are visible"),
        ({"gpu_ids": (0, 4)}, "there is no GPU 4: 4 GPUs are visible"),
        ({"gpu_ids": (1, 1)}, "names a GPU twice"),
        ({"cpu": True, "num_gpus": 1}, "both choose the devices"),
        ({"nodes": 2}, "--node-rank (command line): is missing"),
        ({"nodes": 2}, "--main-address (command line): is missing"),
        ({"nodes": 2, "node_rank": 2, "main_address": "10.0.0.1"}, "is 2 of 2"),
        ({"node_rank": 1}, "say how many with --nodes"),
        ({"interface": "nosuch0"}, "there is no such interface"),
        ({"cpu": True, "spares": 1}, "no GPU to keep in reserve"),
        ({"spares": 4}, "no GPU to keep in reserve"),
        ({"nodes": "4:3", "node_rank": 0, "main_address": "10.0.0.1"}, "the least is more than the most"),
        ({"nodes": 2, "spares": 1, "node_rank": 3, "main_address": "10.0.0.1"}, "is 3 of 3"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout(**options)
    assert words in str(caught.value)


def test_gpus_in_reserve() -> None:
    uuids = tuple(gpu.uuid for gpu in load(FOUR).gpus)
    for found in (layout(spares=1), layout(num_gpus=3, spares=1)):
        assert (found.num_processes, found.gpus, found.spare_gpus) == (3, uuids[:3], uuids[3:])
    other = found.without_gpu(1)
    assert other.environment["CUDA_VISIBLE_DEVICES"] == f"{uuids[0]},{uuids[3]},{uuids[2]}"
    assert other.without_gpu(0) is None


def test_more_processes_than_gpus_on_request() -> None:
    assert layout(num_processes=5, share_gpus=True).num_processes == 5


def test_an_address_that_does_not_resolve() -> None:
    with pytest.raises(DrivetrainError, match=r"no-such-host\.invalid does not resolve"):
        layout(nodes=2, node_rank=1, main_address="no-such-host.invalid")


def test_a_port_that_is_taken() -> None:
    with listen_on("127.0.0.1", 0, "first") as first:
        port = first.getsockname()[1]
        with pytest.raises(DrivetrainError, match=f"port {port} of 127.0.0.1 is taken"):
            listen_on("127.0.0.1", port, "second")
    with pytest.raises(DrivetrainError, match="is not an address of this machine"):
        listen_on("192.0.2.1", 0, "elsewhere")
    with listen_on("127.0.0.1", get_free_port(), "a free one"):
        pass


def test_numa_nodes_are_read(tmp_path: Path) -> None:
    for name, cores in (("node0", "0-3,8\n"), ("node1", "4-7\n"), ("node2", "\n"), ("power", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    assert numa_cores(tmp_path) == {0: [0, 1, 2, 3, 8], 1: [4, 5, 6, 7]}
    assert sum(len(cores) for cores in numa_cores().values()) >= 0  # the real one never raises


def test_ranks_work_next_to_their_gpus() -> None:
    numa = {0: range(8), 1: range(8, 16)}
    near = choose_cores("auto", 4, [1, 1, 0, 0], numa)
    assert near == [[8, 9, 10, 11], [12, 13, 14, 15], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert choose_cores("auto", 2, [], {0: range(8)}) == [[], []]  # one node: nothing to gain
    assert choose_cores("cores", 2, [], {0: range(3)}) == [[0], [1, 2]]
    assert choose_cores("numa", 3, [], {0: range(2)}) == [[], [], []]  # fewer cores than ranks
    assert choose_cores("none", 2, [0, 0], numa) == [[], []]


@given(
    st.sampled_from(["auto", "none", "numa", "cores"]),
    st.integers(1, 9),
    st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=9),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_no_core_is_given_twice(bind: str, number: int, near: list[int | None], sizes: list[int]) -> None:
    numa: dict[int, range] = {}
    for node, size in enumerate(sizes):
        begin = sum(sizes[:node])
        if size:
            numa[node] = range(begin, begin + size)
    cores = choose_cores(bind, number, near, numa)
    assert len(cores) == number
    given_out = [core for share in cores for core in share]
    assert len(given_out) == len(set(given_out))
    assert all(cores) or not any(cores)  # all are bound, or nobody is
