"""Mixtures of experts: a layer for any model, its balance, and how its experts come and go."""

from drivetrain.moe.knowledge.graph import KnowledgeGraph, Limits
from drivetrain.moe.knowledge.knowledge import Knowledge, KnowledgeFiles
from drivetrain.moe.layer.dispatch import Dispatcher, LocalDispatcher, Way
from drivetrain.moe.layer.mixture import (
    Balance,
    LoadFigures,
    LoadReport,
    MixtureOfExperts,
    Settlement,
    auxiliary_loss,
    load_metrics,
    mixtures_in,
)
from drivetrain.moe.layer.slots import Slots
from drivetrain.moe.lifecycle.lifecycle import Lifecycle, Rules
from drivetrain.moe.lifecycle.replay import Reservoir
from drivetrain.moe.lifecycle.sleep import Sleep
from drivetrain.moe.lifecycle.sleep_cycle import SleepRules

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
