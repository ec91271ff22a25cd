"""The probes that `drivetrain verify` runs, in the order of the checklist, and the choice among them."""

import difflib
from collections.abc import Sequence

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.verify.probe import Probe

_PROBES = "drivetrain.verify.probes"

# The limits are for slow machines: five to ten times what a small one takes.
CHECKLIST: tuple[Probe, ...] = (
    Probe(name="placement", title="device placement", function=f"{_PROBES}.placement:probe"),
    Probe(name="matmul-fp32", title="matmul fp32", function=f"{_PROBES}.matmul:fp32", measures_rates=True),
    Probe(name="matmul-tf32", title="matmul tf32", function=f"{_PROBES}.matmul:tf32", measures_rates=True),
    Probe(name="matmul-fp16", title="matmul fp16", function=f"{_PROBES}.matmul:fp16", measures_rates=True),
    Probe(name="matmul-bf16", title="matmul bf16", function=f"{_PROBES}.matmul:bf16", measures_rates=True),
    Probe(name="autocast", title="autocast, scaler", function=f"{_PROBES}.mixed_precision:probe"),
    Probe(
        name="compile",
        title="torch.compile",
        function=f"{_PROBES}.compilation:probe",
        is_slow=True,
        quick_limit_seconds=12,  # 10 s on two cores; where a compiler takes a minute, `--quick` would not be quick
        time_limit_seconds=180,
    ),
    Probe(name="memory", title="memory copy", function=f"{_PROBES}.copies:within_memory", measures_rates=True),
    Probe(name="copies", title="host-device copies", function=f"{_PROBES}.copies:host_and_device", measures_rates=True),
    Probe(name="loader", title="data loader", function=f"{_PROBES}.loader:probe", measures_rates=True),
    Probe(name="gloo", title="collectives, gloo", function=f"{_PROBES}.collectives:gloo", measures_rates=True),
    Probe(name="nccl", title="collectives, NCCL", function=f"{_PROBES}.collectives:nccl", measures_rates=True),
    Probe(name="checkpoint", title="checkpoint", function=f"{_PROBES}.storage:checkpoint"),
    Probe(name="disk", title="disk", function=f"{_PROBES}.storage:disk", measures_rates=True),
    Probe(name="training", title="two training steps", function=f"{_PROBES}.training:probe"),
    Probe(name="gpu-use", title="GPU use under load", function=f"{_PROBES}.utilisation:probe", measures_rates=True),
)


def choose(names: Sequence[str], probes: Sequence[Probe] = CHECKLIST) -> tuple[Probe, ...]:
    """Return the probes of these names, in the checklist's order; all for no names. `matmul` means every `matmul-…`."""
    problems, chosen = [], set[str]()
    for name in names:
        wanted = name.strip().lower().replace("_", "-")
        found = {probe.name for probe in probes if probe.name == wanted or probe.name.startswith(f"{wanted}-")}
        chosen |= found
        if not found:
            known = [probe.name for probe in probes]
            nearest = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
            problems.append(
                Problem(
                    "--only",
                    f"there is no probe `{name}`",
                    name,
                    allowed=", ".join(known),
                    remedy=f"did you mean `--only {nearest[0]}`?" if nearest else "choose from those allowed",
                )
            )
    if problems:
        raise ConfigError(problems)
    return tuple(probe for probe in probes if probe.name in chosen) if names else tuple(probes)
