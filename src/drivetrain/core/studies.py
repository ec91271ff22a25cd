"""Finds the studies, which stand beside the source code and are not part of the installed package."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from drivetrain.core.errors import DrivetrainError

CHECKOUT = Path(__file__).parents[3]


def load_study(module: str) -> ModuleType:
    """Import a module of a study, such as `continual.command`, from the checkout that this package runs from."""
    name = module.partition(".")[0]
    if not (CHECKOUT / "studies" / name / "__init__.py").is_file():
        raise DrivetrainError(
            f"the study `{name}` is in drivetrain's source code (studies/{name}), not in the installed package",
            remedy="in a checkout of the source code run `pip install -e .`, then this command again",
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))  # last, so that it hides nothing; processes that are spawned get it too
    return import_module(f"studies.{module}")
