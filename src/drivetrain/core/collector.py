"""Python's collector of garbage, and how a long run keeps it from stopping the loop.

Now and then it looks through every object that there is: some 300,000 with torch loaded, 100 to 170 ms in which no
thread runs Python. Whatever makes objects can set it off, a save beside training too. Objects that are there when a run
has begun are there until it ends; set aside, they are not looked through again.
"""

import gc


class SetAside:
    """From `begin` to `end` the collector looks only at what was made since. One run at a time; twice is as once."""

    _held_by: "SetAside | None" = None

    def begin(self) -> None:
        """Looks through everything once: garbage must not be kept for the time of the run."""
        if SetAside._held_by is None:
            SetAside._held_by = self
            gc.collect()
            gc.freeze()

    def end(self) -> None:
        if SetAside._held_by is self:
            SetAside._held_by = None
            gc.unfreeze()
