"""The probes that `drivetrain verify` runs, in the order of the checklist, and the choice among them."""

import difflib
from collections.abc import Sequence

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.plugins import PROBES, literal_facts
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
