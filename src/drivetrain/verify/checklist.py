"""The probes that `drivetrain verify` runs, in the order of the checklist; the choice among them, and among GPUs.

GPUs are chosen by numbers and without torch: `DeviceManager` would load it where none is needed.
"""

import difflib
from collections.abc import Sequence

from drivetrain.config import Config
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.plugins import PROBES, literal_facts
from drivetrain.hardware import Hardware
from drivetrain.verify.probe import Probe


def read_checklist() -> tuple[Probe, ...]:
    """Return the rows `PROBES` of every file in `verify/probes`, and of other packages, without importing any."""
    rows: list[Probe] = []
    for name in PROBES.names():
        source = PROBES.source(name)
        attribute = PROBES.target(name).partition(":")[2]
        rows += () if source is None else literal_facts(source, attribute, Probe)
    return tuple(sorted(rows, key=lambda probe: (probe.order, probe.name)))


CHECKLIST: tuple[Probe, ...] = read_checklist()


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


def chosen_gpus(hardware: Hardware, config: Config) -> tuple[int, ...]:
    """Return indices as torch counts; none for the CPU. Contradictions were refused when the configuration was read."""
    wanted = config.device
    if wanted.mode == "cpu" or wanted.device == "cpu" or hardware.accelerator not in ("cuda", "rocm"):
        return ()
    if wanted.ids is not None:
        return wanted.ids
    if wanted.device.startswith("cuda:"):
        return (int(wanted.device.removeprefix("cuda:")),)
    available = tuple(gpu.index for gpu in hardware.gpus)
    return available[:1] if wanted.mode == "single_gpu" else available
