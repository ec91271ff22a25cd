"""One module for each command of the `drivetrain` command line."""
