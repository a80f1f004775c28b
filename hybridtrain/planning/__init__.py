"""A chain of layers into stages: what the layers cost, and where to cut.

>>> plan(net, PipelineOptions(chunks=8, split="time"), example_inputs, Cluster.of_cpus(4))
"""

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
