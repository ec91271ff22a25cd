"""`python -m drivetrain` is the `drivetrain` command, for machines where the package is only on PYTHONPATH."""

import sys

from drivetrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
