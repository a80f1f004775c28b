"""Assigns a model's layers to stages by their costs, and prices a run on a machine.

A plan for options that are given:

planner            `plan(net, options, inputs, cluster)` returns a `Plan`
plan               the result, as data and as a YAML file
costs              what a layer costs for one micro-batch: counted, and measured
estimates          the same by FLOPs and bytes, without running a kernel
objective          the cost of a stage, and the exact best cut
manual_split       cuts by counts, names and patterns; `with partition(i):`

A search for the options, on a machine that need not be there:

cost_table         the costs of layers for any number of samples in a micro-batch
layout             the ways to spread a model over a machine
stage_needs        what the stages of a layout need: memory, and times of actions and messages
price              the time of a step by simulation, and the fastest layouts that fit
priced             plans with their prices, as a table
"""

from hybridtrain.planning.cost_table import CostTable, LossOfStep, count_layers
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.fully_sharded import fully_sharded
from hybridtrain.planning.layout import Choices, Job, Layout, divisors
from hybridtrain.planning.manual_split import partition, set_partition
from hybridtrain.planning.objective import Objective, cut_by_costs, needs_costs, stage_costs
from hybridtrain.planning.plan import Plan, StagePlan, table
from hybridtrain.planning.planner import (
    PlannedLayers,
    Planner,
    balance_by_size,
    balance_by_time,
    plan,
)
from hybridtrain.planning.price import (
    Prediction,
    Price,
    find_layouts,
    predict_step,
    proposed,
    why_not_priced,
)
from hybridtrain.planning.priced import PricedPlans, find_plans, in_words, model_costs
from hybridtrain.planning.stage_needs import DeviceMemory

__all__ = [
    "Choices",
    "CostTable",
    "DeviceMemory",
    "Job",
    "LayerCost",
    "Layout",
    "LossOfStep",
    "Objective",
    "Plan",
    "PlannedLayers",
    "Planner",
    "Prediction",
    "Price",
    "PricedPlans",
    "StagePlan",
    "balance_by_size",
    "balance_by_time",
    "count_layers",
    "cut_by_costs",
    "divisors",
    "find_layouts",
    "find_plans",
    "fully_sharded",
    "in_words",
    "model_costs",
    "needs_costs",
    "partition",
    "plan",
    "predict_step",
    "proposed",
    "set_partition",
    "stage_costs",
    "table",
    "why_not_priced",
]
