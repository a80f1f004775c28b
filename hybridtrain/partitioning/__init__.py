"""The cut of a model into stages: costs, objectives and plans.

planner        `plan(net, options, inputs, cluster)` returns a `Plan`
plan           the result, as data and as a YAML file
costs          what a layer costs for one micro-batch, and what needs no run: its weights
layer_watch    a run of a model that tells when its layers begin, forward and backward
work_counter   the work of layers in such a run, operator by operator
estimates      their times by FLOPs and bytes, without running a kernel
measurements   their times by a stopwatch
piped_layers   layers that run one after another, for callers that have layers without a model
cost_table     the costs of layers for any number of samples in a micro-batch
objective      the size of a stage, which the partitioner balances
cut_search     the search for a cut: exact, for any objective, and by moves, for any score
observed_calls the places to cut a model that runs its own forward: the calls in a run of it
manual_split   cuts by counts, names and patterns; `with partition(i):`
recompute      the layers and stages that the backward pass recomputes
stage_owners   the devices that a replica is spread over, and the processes that own them
"""

from hybridtrain.partitioning.cost_table import (
    CostTable,
    LossOfStep,
    StageSums,
    count_layers,
    counted_costs,
    counted_costs_of_one_size,
    given_costs,
    measured_costs,
)
from hybridtrain.partitioning.costs import (
    CalledLayers,
    LayerCost,
    LayerSize,
    copy_of,
    fake_like,
    layer_sizes,
    most_temporary,
    state_of,
)
from hybridtrain.partitioning.cut_search import cut_by_costs, every_cut, find_cut, improved_cut
from hybridtrain.partitioning.estimates import NotOnFakesError, model_flops
from hybridtrain.partitioning.manual_split import partition, set_partition
from hybridtrain.partitioning.objective import (
    MEASURED_SPLITS,
    Objective,
    balances,
    needs_costs,
    stage_costs,
)
from hybridtrain.partitioning.observed_calls import observe, observed_chain
from hybridtrain.partitioning.plan import Plan, StagePlan, table
from hybridtrain.partitioning.planner import (
    COST_SOURCES,
    PlannedLayers,
    Planner,
    balance_by_size,
    balance_by_time,
    plan,
)
from hybridtrain.partitioning.recompute import (
    RecomputePolicy,
    priced_mode,
    recompute_policy,
    whole_stages,
)
from hybridtrain.partitioning.stage_owners import StageOwners

__all__ = [
    "COST_SOURCES",
    "MEASURED_SPLITS",
    "CalledLayers",
    "CostTable",
    "LayerCost",
    "LayerSize",
    "LossOfStep",
    "NotOnFakesError",
    "Objective",
    "Plan",
    "PlannedLayers",
    "Planner",
    "RecomputePolicy",
    "StageOwners",
    "StagePlan",
    "StageSums",
    "balance_by_size",
    "balance_by_time",
    "balances",
    "copy_of",
    "count_layers",
    "counted_costs",
    "counted_costs_of_one_size",
    "cut_by_costs",
    "every_cut",
    "fake_like",
    "find_cut",
    "given_costs",
    "improved_cut",
    "layer_sizes",
    "measured_costs",
    "model_flops",
    "most_temporary",
    "needs_costs",
    "observe",
    "observed_chain",
    "partition",
    "plan",
    "priced_mode",
    "recompute_policy",
    "set_partition",
    "stage_costs",
    "state_of",
    "table",
    "whole_stages",
]
