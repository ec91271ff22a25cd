"""The real pynvml on a libnvidia-ml.so.1 compiled for the test: names, structures and error codes as in nvml.h."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hardware.children import child_environ

compiler = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(compiler is None, reason="no C compiler")

# Structures as nvml.h has them. What is not here, pynvml reports as "function not found".
SOURCE = r"""
#include <string.h>
#include <stdio.h>
typedef int gpu; static gpu gpus[2] = {0, 1};
int nvmlInitWithFlags(unsigned flags) { return INIT_RESULT; }
int nvmlShutdown(void) { fprintf(stderr, "shut down\n"); return 0; }
const char *nvmlErrorString(int code) { return "text of the library"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "570.00"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu **handle)
  { *handle = &gpus[index]; return index == LOST ? 15 : 0; }
int nvmlDeviceGetUUID(gpu *g, char *text, unsigned size)
  { snprintf(text, size, "GPU-%d1111111-0000-0000-0000-000000000000", *g); return 0; }
int nvmlDeviceGetName(gpu *g, char *text, unsigned size) { strcpy(text, "NVIDIA A100-SXM4-40GB"); return 0; }
struct memory { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(gpu *g, struct memory *m)
  { if (m->version != 0x02000028) return 25;
    m->total = 42949672960; m->reserved = 612368384; m->free = 42000000000; return 0; }
int nvmlDeviceGetCudaComputeCapability(gpu *g, int *major, int *minor) { *major = 8; *minor = 0; return 0; }
int nvmlDeviceGetNumGpuCores(gpu *g, unsigned *cores) { *cores = 6912; return 0; }
int nvmlDeviceGetArchitecture(gpu *g, unsigned *a) { *a = 7; return 0; }
int nvmlDeviceGetMaxClockInfo(gpu *g, int kind, unsigned *mhz) { *mhz = kind == 1 ? 1410 : 1215; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(gpu *g, unsigned *milliwatts) { *milliwatts = 400000; return 0; }
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(gpu *g, struct pci *p) { sprintf(p->bus_id, "00000000:%02X:00.0", *g + 10); return 0; }
int nvmlDeviceGetNvLinkState(gpu *g, unsigned link, unsigned *up) { if (link >= 12) return 2; *up = 1; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(gpu *g, unsigned link, unsigned *kind) { *kind = 0; return 0; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu *g, unsigned link, struct pci *p)
  { sprintf(p->bus_id, "00000000:%02X:00.0", (1 - *g) + 10); return 0; }
struct value { unsigned field, scope; long long when, latency; unsigned type, result;
               union { double d; unsigned u; unsigned long long ull; } value; };
int nvmlDeviceGetFieldValues(gpu *g, int count, struct value *v)
  { v->result = v->field == 90 ? 0 : 3; v->type = 1; v->value.u = 25000; return 0; }
int nvmlDeviceGetMigMode(gpu *g, unsigned *now, unsigned *later) { return 3; }
int nvmlDeviceGetMemoryAffinity(gpu *g, unsigned size, unsigned long *set, int scope) { set[0] = 2; return 0; }
"""

Library = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def detect_with_library(tmp_path: Path) -> Library:
    def detect(init_result: int = 0, lost: int = -1) -> tuple[dict[str, Any], str]:
        assert compiler is not None
        (tmp_path / "nvml.c").write_text(SOURCE)
        library = tmp_path / "libnvidia-ml.so.1"
        options = [f"-DINIT_RESULT={init_result}", f"-DLOST={lost}", "-w", "-shared", "-fPIC"]
        subprocess.run([compiler, *options, "-o", str(library), str(tmp_path / "nvml.c")], check=True, timeout=240)
        code = "from drivetrain.hardware import detect; print(detect().to_json())"
        environ = child_environ(LD_LIBRARY_PATH=str(tmp_path))
        environ.pop("CUDA_VISIBLE_DEVICES", None)
        answer = subprocess.run(
            [sys.executable, "-c", code],
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        return json.loads(answer.stdout), answer.stderr

    return detect


def test_facts_through_the_real_bindings(detect_with_library: Library) -> None:
    found, errors = detect_with_library()
    assert errors == "shut down\n"
    first, second = found["gpus"]
    assert first["uuid"] == "GPU-01111111-0000-0000-0000-000000000000"
    assert (first["memory_total_bytes"], first["memory_free_bytes"]) == (42949672960 - 612368384, 42000000000)
    assert (first["capability"], first["num_sms"], first["architecture"]) == ([8, 0], 108, "Ampere")
    assert (first["clock_sm_max_mhz"], first["clock_memory_max_mhz"], first["power_limit_watts"]) == (1410, 1215, 400)
    assert (first["pci_bus_id"], second["pci_bus_id"]) == ("0000:0a:00.0", "0000:0b:00.0")
    assert first["clock_sm_mhz"] is None  # the library lacks that function
    assert first["numa_node"] == 1
    assert first["num_nvlinks"] == 12
    (link,) = found["links"]
    assert (link["kind"], link["num_nvlinks"], link["bandwidth"]["value"]) == ("nvlink", 12, 300)
    assert (found["software"]["driver"], found["software"]["driver_cuda"]) == ("570.00", "12.8")


@pytest.mark.parametrize(("code", "says"), [(18, "different versions"), (4, "may not talk"), (999, "does not answer")])
def test_errors_of_the_real_bindings(detect_with_library: Library, code: int, says: str) -> None:
    found, _ = detect_with_library(init_result=code)
    assert found["gpus"] == []
    assert found["accelerator"] == "cpu"
    (note,) = [note for note in found["notes"] if note["severity"] == "problem"]
    assert says in note["sentence"]


def test_a_lost_gpu_through_the_real_bindings(detect_with_library: Library) -> None:
    found, _ = detect_with_library(lost=0)
    assert [gpu["physical_index"] for gpu in found["gpus"]] == [1]
    assert any("GPU 0 (as nvidia-smi counts) has fallen off the bus" in note["sentence"] for note in found["notes"])
