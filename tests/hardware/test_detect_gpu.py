"""detect() against torch on a real NVIDIA GPU, each asked in fresh children: this process starts no CUDA."""

import json
import subprocess
import sys
from typing import Any

import pytest

from drivetrain.hardware import Hardware
from tests.hardware.children import child_environ

pytestmark = pytest.mark.gpu

DETECT = "from drivetrain.hardware import detect; print(detect().to_json())"
ASK_TORCH = """
import json, torch
free = [torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())]
props = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([
    {"uuid": f"GPU-{p.uuid}", "name": p.name, "total": p.total_memory, "capability": [p.major, p.minor],
     "sms": p.multi_processor_count, "free": f[0], "pci": p.pci_bus_id}
    for p, f in zip(props, free)
]))
"""


def child(code: str, **environ: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environ(**environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def detected(**environ: str) -> Hardware:
    return Hardware.from_json(child(DETECT, **environ))


def torch_says(**environ: str) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = json.loads(child(ASK_TORCH, **environ))
    return answer


def test_agrees_with_torch_gpu_by_gpu() -> None:
    hardware, expected = detected(), torch_says()
    assert expected, "no GPU here: run these tests on a machine with one"
    assert hardware.accelerator == "cuda"
    assert [gpu.uuid for gpu in hardware.gpus] == [gpu["uuid"] for gpu in expected]  # and in this order
    for gpu, theirs in zip(hardware.gpus, expected, strict=True):
        assert gpu.name == theirs["name"]
        assert gpu.capability == tuple(theirs["capability"])
        assert gpu.num_sms == theirs["sms"]
        assert gpu.memory_total_bytes == pytest.approx(theirs["total"], rel=0.01)
        assert gpu.pci_bus_id is not None
        assert int(gpu.pci_bus_id.split(":")[1], 16) == theirs["pci"]


def test_free_memory_is_free_and_not_used() -> None:
    """The two have been mixed up elsewhere. Asked between two answers of CUDA, while another process holds 4 GiB.

    Others may use the GPU too, and take or return memory between the questions: then they are asked again.
    """
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import torch; x = torch.zeros(4 * 2**30, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize(); "
            "print('held', flush=True); input()",
        ],
        env=child_environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        answers = []
        for _ in range(10):
            before, found, after = (
                torch_says()[0]["free"],
                detected().gpus[0].memory_free_bytes,
                torch_says()[0]["free"],
            )
            if min(before, after) <= found < max(before, after) + 2 * 2**30:  # who asks CUDA takes memory itself
                return
            answers.append((before, found, after))
    finally:
        holder.communicate("\n", timeout=240)
    pytest.fail(f"free by CUDA, detected, by CUDA again: {answers}")


def test_creates_no_cuda_context() -> None:
    """Asked of the driver about this process alone, so that others may use the GPU meanwhile; also with torch loaded,
    which might be tempted."""
    code = """
import ctypes, torch
from drivetrain.hardware import detect
for _ in range(3):
    detect()
assert not torch.cuda.is_initialized()
cuda = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int()
assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 3, "cuInit was called"  # 3: CUDA_ERROR_NOT_INITIALIZED
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
def contexts():
    found, flags, active = 0, ctypes.c_uint(), ctypes.c_int()
    for device in range(count.value):
        assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        found += active.value
    return found
assert contexts() == 0
torch.zeros(1, device="cuda")
assert contexts() == 1, "this test would not notice a context"
print("ok")
"""
    assert child(code).strip() == "ok"


def test_visible_by_uuid_and_by_nothing() -> None:
    uuid = detected().gpus[-1].uuid
    for setting in (uuid, uuid[:12]):
        assert [gpu.uuid for gpu in detected(CUDA_VISIBLE_DEVICES=setting).gpus] == [uuid]
        assert [gpu["uuid"] for gpu in torch_says(CUDA_VISIBLE_DEVICES=setting)] == [uuid]
    for setting in ("", "-1", "99", "none"):
        hardware = detected(CUDA_VISIBLE_DEVICES=setting)
        assert (hardware.accelerator, hardware.gpus) == ("cpu", ())
        assert any("CUDA_VISIBLE_DEVICES" in note.sentence for note in hardware.notes)
        assert torch_says(CUDA_VISIBLE_DEVICES=setting) == []


@pytest.mark.parametrize("setting", ["0,0", "0,99,0", "0gpu", "+0", " 0", "0,-1", "0,GPU-"])
def test_odd_settings_as_torch_counts(setting: str) -> None:
    ours = [gpu.uuid for gpu in detected(CUDA_VISIBLE_DEVICES=setting).gpus]
    assert ours == [gpu["uuid"] for gpu in torch_says(CUDA_VISIBLE_DEVICES=setting)]


@pytest.mark.parametrize("setting", ["0", "0,0", "0gpu", "+0", " 0", "0,-1", "0,x", "99", "", "-1", "GPU-"])
def test_odd_settings_as_the_driver_counts(setting: str) -> None:
    """torch has a reader of its own; this asks libcuda."""
    code = (
        "import ctypes as c; cuda = c.CDLL('libcuda.so.1'); cuda.cuInit(0); count = c.c_int(0); "
        "cuda.cuDeviceGetCount(c.byref(count)); print(count.value)"
    )
    assert len(detected(CUDA_VISIBLE_DEVICES=setting).gpus) == int(child(code, CUDA_VISIBLE_DEVICES=setting))


def test_cuda_order_from_libcuda_in_a_child() -> None:
    code = "import os; from drivetrain.hardware.nvidia import ask_cuda_order; print(*ask_cuda_order(os.environ))"
    assert child(code).split() == [gpu["uuid"] for gpu in torch_says()]


def test_versions() -> None:
    software = detected().software
    assert software.driver
    assert int(software.driver_cuda.split(".")[0]) >= 11
    assert software.torch_backend == "cuda"
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version())"
    version, cuda, cudnn = child(code).split()
    assert (software.torch, software.torch_cuda) == (version, cuda)
    major, minor, patch = (int(part) for part in software.cudnn.split(".")[:3])
    assert major * 10000 + minor * 100 + patch == int(cudnn)
    assert software.nccl.startswith("2.")


def test_is_quick() -> None:
    code = "import time; from drivetrain.hardware import detect as d; t = time.time(); d(); print(time.time() - t)"
    assert float(child(code)) < 1


def test_device_manager_on_the_gpu() -> None:
    code = """
import torch
from drivetrain.hardware import DeviceManager, assert_on_device, canonical_device, detect
manager = DeviceManager(detect())
assert str(manager.device) == "cuda:0" and manager.uses_gpu
before = manager.memory_stats()
assert before.allocated_bytes == 0 and not torch.cuda.is_initialized()
x = torch.zeros(1024, device="cuda")
assert canonical_device(x.device) == canonical_device("cuda") == manager.device
assert_on_device("cuda", x=x)
manager.assert_on_device(x=[{"y": x}])
stats = manager.memory_stats()
assert stats.allocated_bytes >= 4096 and stats.reserved_bytes >= stats.allocated_bytes
assert stats.total_bytes > stats.free_bytes > 0
try:
    assert_on_device("cuda", x=torch.zeros(1))
except Exception as error:
    assert "x is on cpu" in str(error)
else:
    raise AssertionError
print("ok")
"""
    assert child(code).strip() == "ok"
