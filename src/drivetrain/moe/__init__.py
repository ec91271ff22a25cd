"""Mixtures of experts: a layer for any model, its balance, and how its experts come and go."""

from drivetrain.moe.balance import LoadReport, Settlement, auxiliary_loss, load_metrics, mixtures_in
from drivetrain.moe.dispatch import Dispatcher, LocalDispatcher
from drivetrain.moe.graph import KnowledgeGraph, Limits
from drivetrain.moe.knowledge import Knowledge
from drivetrain.moe.knowledge_files import KnowledgeFiles
from drivetrain.moe.layer import Balance, MixtureOfExperts
from drivetrain.moe.lifecycle import Lifecycle, Rules
from drivetrain.moe.load import LoadFigures
from drivetrain.moe.night import SleepRules
from drivetrain.moe.reservoir import Reservoir
from drivetrain.moe.sleep import Sleep
from drivetrain.moe.slots import Slots
from drivetrain.moe.ways import Way

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
