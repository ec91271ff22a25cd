"""Does real work on every part of a machine, each in its own process: what `drivetrain verify` runs."""
