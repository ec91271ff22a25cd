"""Studies: comparisons made with drivetrain that are read and changed, not installed."""
