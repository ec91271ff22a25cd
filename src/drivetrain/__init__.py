"""Drivetrain: a PyTorch training runtime that measures instead of guessing.

Everything public is reached from here. Names are loaded when first used (PEP 562), so that `import drivetrain` and the
`drivetrain` command start quickly.
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from drivetrain.core import MEMORY_KEPT, loading_modules

__version__ = "0.1.0"

if "torch" not in sys.modules:
    for _name, _value in MEMORY_KEPT.items():
        os.environ.setdefault(_name, _value)

if TYPE_CHECKING:
    from drivetrain import hf as hf
    from drivetrain.api.driving import Drive as Drive
    from drivetrain.api.driving import drive as drive
    from drivetrain.api.measuring import benchmark_performance as benchmark_performance
    from drivetrain.api.measuring import evaluate as evaluate
    from drivetrain.api.measuring import find_lr as find_lr
    from drivetrain.api.measuring import predict as predict
    from drivetrain.api.sweeping import sweep as sweep
    from drivetrain.api.training import export as export
    from drivetrain.api.training import train as train
    from drivetrain.config import Config as Config
    from drivetrain.config import configure as configure
    from drivetrain.core.aims import Aim as Aim
    from drivetrain.core.aims import EarlyStopping as EarlyStopping
    from drivetrain.core.errors import ConfigError as ConfigError
    from drivetrain.core.errors import DrivetrainError as DrivetrainError
    from drivetrain.core.hook import Hook as Hook
    from drivetrain.core.hook import StepContext as StepContext
    from drivetrain.core.hook import Verdict as Verdict
    from drivetrain.core.hook import every as every
    from drivetrain.core.metrics import Histogram as Histogram
    from drivetrain.core.metrics import Image as Image
    from drivetrain.core.metrics import LossSum as LossSum
    from drivetrain.core.metrics import Text as Text
    from drivetrain.core.metrics import log as log
    from drivetrain.core.muon import Muon as Muon
    from drivetrain.core.muon import muon_with_adamw as muon_with_adamw
    from drivetrain.core.optimizers import Optim as Optim
    from drivetrain.core.schedules import SWA as SWA
    from drivetrain.core.schedules import Constant as Constant
    from drivetrain.core.schedules import MultiStep as MultiStep
    from drivetrain.core.schedules import OneCycle as OneCycle
    from drivetrain.core.schedules import OnPlateau as OnPlateau
    from drivetrain.core.schedules import StepDecay as StepDecay
    from drivetrain.core.schedules import WarmupCosine as WarmupCosine
    from drivetrain.core.schedules import WarmupLinear as WarmupLinear
    from drivetrain.core.schedules import WarmupStableDecay as WarmupStableDecay
    from drivetrain.data.source import by_length as by_length
    from drivetrain.hardware import DeviceManager as DeviceManager
    from drivetrain.hardware import Hardware as Hardware
    from drivetrain.hardware import assert_on_device as assert_on_device
    from drivetrain.hardware import detect as detect
    from drivetrain.job import Job as Job
    from drivetrain.launch.layout import get_free_port as get_free_port
    from drivetrain.launch.python_api import launch_distributed_training as launch_distributed_training
    from drivetrain.launch.python_api import setup_distributed_environment as setup_distributed_environment
    from drivetrain.proving.prove import prove as prove
    from drivetrain.report.compare import compare as compare
    from drivetrain.run import Result as Result

_HOME = {
    "Config": "drivetrain.config",
    "configure": "drivetrain.config",
    "ConfigError": "drivetrain.core.errors",
    "DrivetrainError": "drivetrain.core.errors",
    "by_length": "drivetrain.data.source",
    "DeviceManager": "drivetrain.hardware",
    "Hardware": "drivetrain.hardware",
    "assert_on_device": "drivetrain.hardware",
    "detect": "drivetrain.hardware",
    "Job": "drivetrain.job",
    "Aim": "drivetrain.core.aims",
    "EarlyStopping": "drivetrain.core.aims",
    "WarmupCosine": "drivetrain.core.schedules",
    "WarmupLinear": "drivetrain.core.schedules",
    "Constant": "drivetrain.core.schedules",
    "StepDecay": "drivetrain.core.schedules",
    "MultiStep": "drivetrain.core.schedules",
    "OneCycle": "drivetrain.core.schedules",
    "WarmupStableDecay": "drivetrain.core.schedules",
    "OnPlateau": "drivetrain.core.schedules",
    "SWA": "drivetrain.core.schedules",
    "LossSum": "drivetrain.core.metrics",
    "Muon": "drivetrain.core.muon",
    "muon_with_adamw": "drivetrain.core.muon",
    "Optim": "drivetrain.core.optimizers",
    "log": "drivetrain.core.metrics",
    "Image": "drivetrain.core.metrics",
    "Histogram": "drivetrain.core.metrics",
    "Text": "drivetrain.core.metrics",
    "Hook": "drivetrain.core.hook",
    "StepContext": "drivetrain.core.hook",
    "Verdict": "drivetrain.core.hook",
    "every": "drivetrain.core.hook",
    "Result": "drivetrain.run",
    "launch_distributed_training": "drivetrain.launch.python_api",
    "setup_distributed_environment": "drivetrain.launch.python_api",
    "get_free_port": "drivetrain.launch.layout",
    "evaluate": "drivetrain.api.measuring",
    "predict": "drivetrain.api.measuring",
    "benchmark_performance": "drivetrain.api.measuring",
    "find_lr": "drivetrain.api.measuring",
    "train": "drivetrain.api.training",
    "drive": "drivetrain.api.driving",
    "Drive": "drivetrain.api.driving",
    "export": "drivetrain.api.training",
    "prove": "drivetrain.proving.prove",
    "compare": "drivetrain.report.compare",
    "sweep": "drivetrain.api.sweeping",
}

_PACKAGES = ("hf",)  # reached as `dt.hf`; not in `__all__`, since a star import would load it

__all__ = ["__version__", *_HOME]


def _load(module: str) -> ModuleType:
    """Import a module. What trains takes seconds, with all of PyTorch that it needs: a terminal shows that."""
    if module in sys.modules:
        return import_module(module)  # which waits while another thread is loading it
    is_long = module.startswith("drivetrain.api.") and _is_terminal()
    try:
        if is_long:
            print("drivetrain: loading …", end="", file=sys.stderr, flush=True)
        with loading_modules():
            return import_module(module)
    finally:
        if is_long:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # None: under pythonw


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return _load(f"drivetrain.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    value = getattr(_load(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
