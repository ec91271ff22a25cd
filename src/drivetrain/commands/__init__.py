"""The commands of the `drivetrain` command line: a module for each, or for a family of small ones."""
