"""The cost of a run on given hardware, and the search for the best layout.

layout         parallel layouts: devices per pipeline, replicas, schedule, recomputation, sharding
stage_needs    memory of a layout's stages, and the times of their actions and messages
bounds         lower bounds of the time of a step, in closed form
price          the simulated time of a step
search         the search for the fastest layouts that fit
prediction     the predicted numbers of the one layout of a run
plan_table     plans with their prices, as a table
unequal        the places of unequal devices, and the shares of replicas
fully_sharded  the price of FSDP2, for comparison
"""

from hybridtrain._base.hardware import Hardware
from hybridtrain.price.fully_sharded import fully_sharded
from hybridtrain.price.layout import Choices, ParallelLayout, StepWork, divisors
from hybridtrain.price.plan_table import (
    PricedPlans,
    choice_in_words,
    find_plans,
    in_words,
    model_costs,
    offload_in_words,
    recompute_option,
)
from hybridtrain.price.prediction import Prediction, predict_step, why_not_priced
from hybridtrain.price.price import Price
from hybridtrain.price.search import DoesNotFit, find_layouts, proposed
from hybridtrain.price.stage_needs import DeviceMemory
from hybridtrain.price.unequal import EQUAL, Arrangement, arranged, arrangements

__all__ = [
    "EQUAL",
    "Arrangement",
    "Choices",
    "DeviceMemory",
    "DoesNotFit",
    "Hardware",
    "ParallelLayout",
    "Prediction",
    "Price",
    "PricedPlans",
    "StepWork",
    "arranged",
    "arrangements",
    "choice_in_words",
    "divisors",
    "find_layouts",
    "find_plans",
    "fully_sharded",
    "in_words",
    "model_costs",
    "offload_in_words",
    "predict_step",
    "proposed",
    "recompute_option",
    "why_not_priced",
]
