"""A probe is named, not held: its code is loaded in the process that runs it, never in the one that watches."""

from pydantic import Field

from drivetrain.core.value import Value


class Probe(Value):
    """One thing to verify: a row of `PROBES` in the file of its function, of literals, which is read without torch."""

    name: str = Field(pattern=r"^[a-z0-9-]+$", description="as `--only` takes it")
    title: str = Field(description="as the checklist shows it")
    function: str = Field(
        pattern=r"^[\w.]+:\w+$", description="`module:function`; takes a ProbeSetup, returns an Outcome"
    )
    measures_rates: bool = Field(default=False, description="runs with nothing beside it, so that its figures are true")
    is_slow: bool = Field(default=False, description="started before the others where several run at once")
    # The limits are for slow machines: five to ten times what a small one takes.
    time_limit_seconds: float = Field(default=60.0, gt=0)
    quick_limit_seconds: float | None = Field(default=None, gt=0, description="after which `--quick` leaves it out")
    order: int = Field(default=1000, description="its place in the checklist; those of one number stand by name")
