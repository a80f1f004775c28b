"""Assigns a model's layers to stages by their costs: `plan` returns a `Plan`."""

from hybridtrain.planning.cost_table import CostTable
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.device_memory import DeviceMemory
from hybridtrain.planning.layout import Choices, Job, Layout, divisors
from hybridtrain.planning.layout_search import fastest_layout, find_layouts
from hybridtrain.planning.manual_split import partition, set_partition
from hybridtrain.planning.objective import needs_costs
from hybridtrain.planning.plan import Plan, StagePlan, table
from hybridtrain.planning.planner import (
    PlannedLayers,
    Planner,
    balance_by_size,
    balance_by_time,
    plan,
)
from hybridtrain.planning.price import Prediction, Price, predict_step, why_not_priced
from hybridtrain.planning.priced import PricedPlans, find_plans, in_words, model_costs

__all__ = [
    "Choices",
    "CostTable",
    "DeviceMemory",
    "Job",
    "LayerCost",
    "Layout",
    "Plan",
    "PlannedLayers",
    "Planner",
    "Prediction",
    "Price",
    "PricedPlans",
    "StagePlan",
    "balance_by_size",
    "balance_by_time",
    "divisors",
    "fastest_layout",
    "find_layouts",
    "find_plans",
    "in_words",
    "model_costs",
    "needs_costs",
    "partition",
    "plan",
    "predict_step",
    "set_partition",
    "table",
    "why_not_priced",
]
