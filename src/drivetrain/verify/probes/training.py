"""Probes that train a little: placement, two steps, mixed precision, and torch.compile."""

import math
import os
import shutil
import tempfile
import time

import torch
from torch import nn

from drivetrain.core.world import synchronize
from drivetrain.hardware import assert_on_device
from drivetrain.verify.probe import Outcome, Probe, ProbeSetup, failed, passed
from drivetrain.verify.probes.rates import use_all_cores

# ----------------------------------------------------------------------------------------------------------------------
# Checks that model and batch are on their device, and that a tensor on another one is noticed.

PROBES_PLACEMENT = (
    Probe(name="placement", title="device placement", function="drivetrain.verify.probes.training:placement", order=10),
)


class _TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(features) * self.scale)
        return result


def elsewhere(device: torch.device) -> torch.device:
    """Return a device that is not this one, on any machine: `meta` holds no data and always exists."""
    return torch.device("meta" if device.type == "cpu" else "cpu")


def placement(setup: ProbeSetup) -> Outcome:
    for name in setup.devices:
        device = torch.device(name)
        model = _TwoParts().to(device)
        batch = {
            "features": torch.randn(4, 8, device=device),
            "labels": torch.zeros(4, dtype=torch.long, device=device),
        }
        assert_on_device(device, model=model, batch=batch)
        result = model(batch["features"])
        if result.device != device:
            return failed(
                f"a model and a batch on {device} gave a result on {result.device}",
                remedy="pip install --force-reinstall torch",
            )
        model.head.to(elsewhere(device))
        if is_on_device(device, model, batch):
            return failed(
                f"a layer moved to {elsewhere(device)} was not noticed on {device}",
                remedy="pip install --force-reinstall drivetrain",
            )
    return passed(", ".join(setup.devices), detail="a planted misplaced layer is noticed and named")


def is_on_device(device: torch.device, model: nn.Module, batch: dict[str, torch.Tensor]) -> bool:
    """Return whether nothing misplaced was noticed. A complaint must name the layer to be of use."""
    try:
        assert_on_device(device, model=model, batch=batch)
    except Exception as error:  # noqa: BLE001  (whatever it raises, the name is what counts)
        return "head" not in str(error)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Checks two training steps: the loss falls, stays finite, and the same seed gives the same bits.

PROBES_TRAINING = (
    Probe(
        name="training", title="two training steps", function="drivetrain.verify.probes.training:training", order=150
    ),
)


def train_two_steps(device: torch.device, *, seed: int, learning_rate: float = 0.05) -> list[float]:
    """Return the loss before, after one and after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    features = torch.randn(64, 16, device=device)
    labels = torch.randint(0, 4, (64,), device=device)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), labels)
        losses.append(loss.item())
        if step < 2:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return losses


def judge(first: list[float], second: list[float]) -> str:
    """Return what is wrong with two runs from one seed; empty if nothing is."""
    if not all(map(math.isfinite, first)):
        return f"the loss is not finite: {first}"
    if not first[0] > first[1] > first[2]:
        return f"the loss does not fall: {first}"
    if first != second:
        return f"two runs from one seed differ: {first} and {second}"
    return ""


def training(setup: ProbeSetup) -> Outcome:
    # cuBLAS repeats itself only with a fixed workspace; it has to be set before the first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    losses: list[float] = []
    for name in setup.devices:
        device = torch.device(name)
        losses = train_two_steps(device, seed=7)
        if problem := judge(losses, train_two_steps(device, seed=7)):
            return failed(
                f"{name}: {problem}", remedy="drivetrain verify --only matmul shows whether its arithmetic is right"
            )
    return passed(f"loss {losses[0]:.3f} to {losses[-1]:.3f}", detail="2 steps, twice from one seed: the same bits")


# ----------------------------------------------------------------------------------------------------------------------
# Checks a step with autocast and gradient scaling: it moves the weights, and a gradient that overflowed does not.

PROBES_MIXED_PRECISION = (
    Probe(
        name="autocast",
        title="autocast, scaler",
        function="drivetrain.verify.probes.training:mixed_precision",
        order=60,
    ),
)

REINSTALL = "pip install --force-reinstall torch"


def mixed_precision(setup: ProbeSetup) -> Outcome:
    for name in setup.devices:
        device = torch.device(name)
        for dtype in (torch.bfloat16, torch.float16):
            if dtype == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
                continue
            if problem := scaled_step(device, dtype):
                return failed(f"{name}, {dtype}: {problem}", remedy=REINSTALL)
    return passed("weights move, overflow is skipped", detail="autocast in bf16 and fp16 with a gradient scaler")


def scaled_step(device: torch.device, dtype: torch.dtype) -> str:
    """Return what is wrong with a good step and a step with a planted overflow; empty if nothing is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    features = torch.randn(32, 16, device=device)

    def backward() -> torch.dtype:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):
            output = model(features)
            loss = output.float().square().mean()
        scaler.scale(loss).backward()
        return torch.as_tensor(output).dtype

    def weights() -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in model.parameters()]

    before = weights()
    computed_in = backward()
    if computed_in != dtype:
        return f"autocast computed in {computed_in}"
    scaler.step(optimizer)
    scaler.update()
    after = weights()
    if not all(parameter.isfinite().all() for parameter in after):
        return "the weights are not finite after a step"
    if all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
        return "a step did not move the weights"

    scale_before = scaler.get_scale()
    backward()
    planted = next(model.parameters()).grad
    if planted is None:
        return "backward left no gradient"
    planted[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    if not all(torch.equal(old, new) for old, new in zip(after, weights(), strict=True)):
        return "a step with an infinite gradient was taken, not skipped"
    if not scaler.get_scale() < scale_before:
        return f"the scale stayed at {scaler.get_scale():g} after an overflow"
    return ""


# ----------------------------------------------------------------------------------------------------------------------
# Checks torch.compile: that it works, that it in fact compiled something, and how long that takes with cold caches.

PROBES_COMPILATION = (
    Probe(
        name="compile",
        title="torch.compile",
        function="drivetrain.verify.probes.training:compilation",
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


def compilation(setup: ProbeSetup) -> Outcome:
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
