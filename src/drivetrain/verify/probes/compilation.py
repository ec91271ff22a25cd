"""Checks torch.compile: that it works, that it in fact compiled something, and how long that takes with cold caches."""

import os
import shutil
import tempfile
import time

import torch
from torch import nn

from drivetrain.core.world import synchronize
from drivetrain.verify.probe import Outcome, Probe, ProbeSetup, failed, passed
from drivetrain.verify.probes.timing import use_all_cores

PROBES = (
    Probe(
        name="compile",
        title="torch.compile",
        function="drivetrain.verify.probes.compilation:probe",
        order=70,
        is_slow=True,
        quick_limit_seconds=12,  # 10 s on two cores; where a compiler takes a minute, `--quick` would not be quick
        time_limit_seconds=180,
    ),
)


class _SmallModel(nn.Module):
    """A separate class of model: some ways of compiling a plain nn.Sequential do nothing, without an error."""

    def __init__(self, *, smallest: bool) -> None:
        super().__init__()
        self.body = nn.Linear(32, 64)
        self.head = nn.Linear(64, 8)
        self.smallest = smallest

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.smallest:  # one kernel; the softmax below is a second one, and doubles the time
            return torch.as_tensor(self.head(self.body(features).relu()))
        return torch.as_tensor(self.head(nn.functional.gelu(self.body(features)))).softmax(-1)


def probe(setup: ProbeSetup) -> Outcome:
    device = torch.device(setup.devices[0])
    # A GPU needs it too: Triton builds the launcher of its kernels with it.
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        return failed("there is no C++ compiler, so torch.compile cannot work", remedy="apt-get install g++")
    use_all_cores(setup.hardware.cpu.num_usable)
    start_from_nothing(setup)
    return compile_and_compare(_SmallModel(smallest=setup.quick).to(device), device, with_backward=not setup.quick)


def start_from_nothing(setup: ProbeSetup) -> None:
    """Start with cold caches: a warm cache of an earlier run would be fast, and show nothing."""
    os.environ["TMPDIR"] = setup.scratch  # precompiled headers follow it alone
    tempfile.tempdir = None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{setup.scratch}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{setup.scratch}/triton"
    if setup.quick:
        import torch._inductor.config as inductor

        # Precompiled headers cost seconds and pay back with the second kernel, worker processes too; there is one.
        inductor.cpp_cache_precompile_headers = False
        inductor.compile_threads = 1


def compile_and_compare(model: nn.Module, device: torch.device, *, with_backward: bool) -> Outcome:
    torch.manual_seed(0)
    features = torch.randn(16, 32, device=device)
    started = time.perf_counter()
    compiled = torch.compile(model)
    with torch.set_grad_enabled(with_backward):
        result = compiled(features)
        if with_backward:
            result.square().sum().backward()
    synchronize(device)
    seconds = time.perf_counter() - started
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if num_graphs == 0:
        return failed(
            "torch.compile ran, but nothing was compiled", remedy="unset TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE"
        )
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    expected = model(features)
    problem = ""
    # Another order of the same fp32 operations: a few roundings apart; a wrong kernel is further off than 1e-4.
    if not torch.allclose(result, expected, rtol=1e-4, atol=1e-5):
        problem = f"the compiled result differs by up to {(result - expected).abs().max().item():.1e}"
    elif with_backward:
        expected.square().sum().backward()
        pairs = zip(gradients, model.parameters(), strict=True)
        if not all(
            torch.allclose(mine, parameter.grad, rtol=1e-3, atol=1e-5) if parameter.grad is not None else False
            for mine, parameter in pairs
        ):
            problem = "the compiled gradients differ from eager ones"
    if problem:
        return failed(problem, remedy="pip install --force-reinstall torch; train with --no-compile until then")
    what = "forward and backward" if with_backward else "forward"
    return passed(
        f"{seconds:.1f} s for a small model", detail=f"{what}, {num_graphs} graph, nothing cached, equal to eager"
    )
