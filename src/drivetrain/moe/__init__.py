"""Mixtures of experts: a layer for any model, its balance, and how its experts come and go."""

from drivetrain.core.knowledge_graph import KnowledgeGraph, Limits
from drivetrain.moe.dispatch import Dispatcher, LocalDispatcher, Way
from drivetrain.moe.knowledge import Knowledge, KnowledgeFiles
from drivetrain.moe.lifecycle import Lifecycle, Rules
from drivetrain.moe.mixture import (
    Balance,
    LoadFigures,
    LoadReport,
    MixtureOfExperts,
    Settlement,
    auxiliary_loss,
    load_metrics,
    mixtures_in,
)
from drivetrain.moe.replay import Reservoir
from drivetrain.moe.sleep import Sleep, SleepRules
from drivetrain.moe.slots import Slots

__all__ = [
    "Balance",
    "Dispatcher",
    "Knowledge",
    "KnowledgeFiles",
    "KnowledgeGraph",
    "Lifecycle",
    "Limits",
    "LoadFigures",
    "LoadReport",
    "LocalDispatcher",
    "MixtureOfExperts",
    "Reservoir",
    "Rules",
    "Settlement",
    "Sleep",
    "SleepRules",
    "Slots",
    "Way",
    "auxiliary_loss",
    "load_metrics",
    "mixtures_in",
]
