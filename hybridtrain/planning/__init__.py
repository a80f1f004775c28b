"""Assigns a model's layers to stages by their costs: `plan` returns a `Plan`."""

from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.plan import Plan, StagePlan
from hybridtrain.planning.planner import (
    PlannedLayers,
    Planner,
    balance_by_size,
    balance_by_time,
    plan,
)

__all__ = [
    "LayerCost",
    "Plan",
    "PlannedLayers",
    "Planner",
    "StagePlan",
    "balance_by_size",
    "balance_by_time",
    "plan",
]
