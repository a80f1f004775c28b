"""Hybrid pipeline and data parallel training of PyTorch models.

from hybridtrain import HybridModel, Trainer, World
"""

from typing import TYPE_CHECKING

from hybridtrain._base.registry import import_on_first_use

if TYPE_CHECKING:
    from hybridtrain._base.microbatch import shared
    from hybridtrain._base.skip import pop, stash
    from hybridtrain.data import EvalLoader, Loader
    from hybridtrain.launch import notebook_launcher
    from hybridtrain.loop import Callback, Session, Trainer, TrainerOptions
    from hybridtrain.model import HybridModel, TrainStepResult
    from hybridtrain.options import PipelineOptions
    from hybridtrain.partitioning import StageOwners, partition, set_partition
    from hybridtrain.piped import pipelined, unpipelined
    from hybridtrain.step import OptimizerStep, ShardedOptimizer
    from hybridtrain.verification import Verification, verify
    from hybridtrain.world import World

__all__ = [
    "Callback",
    "EvalLoader",
    "HybridModel",
    "Loader",
    "OptimizerStep",
    "PipelineOptions",
    "Session",
    "ShardedOptimizer",
    "StageOwners",
    "TrainStepResult",
    "Trainer",
    "TrainerOptions",
    "Verification",
    "World",
    "notebook_launcher",
    "partition",
    "pipelined",
    "pop",
    "set_partition",
    "shared",
    "stash",
    "unpipelined",
    "verify",
]

__version__ = "0.3.0"

# commands that only show a config do not wait a second for torch
import_on_first_use(
    __name__,
    [
        "hybridtrain.loop.callbacks.base:Callback",
        "hybridtrain.data.eval_loader:EvalLoader",
        "hybridtrain.data.loader:Loader",
        "hybridtrain.loop.session:Session",
        "hybridtrain.partitioning.stage_owners:StageOwners",
        "hybridtrain.model:HybridModel",
        "hybridtrain.step:OptimizerStep",
        "hybridtrain.options:PipelineOptions",
        "hybridtrain.step.sharded_optimizer:ShardedOptimizer",
        "hybridtrain.model:TrainStepResult",
        "hybridtrain.loop.trainer:Trainer",
        "hybridtrain.loop.trainer:TrainerOptions",
        "hybridtrain.verification:Verification",
        "hybridtrain.world:World",
        "hybridtrain.launch.notebook:notebook_launcher",
        "hybridtrain.partitioning.manual_split:partition",
        "hybridtrain.partitioning.manual_split:set_partition",
        "hybridtrain._base.microbatch:shared",
        "hybridtrain._base.skip:pop",
        "hybridtrain._base.skip:stash",
        "hybridtrain.verification:verify",
        "hybridtrain.piped.switch:pipelined",
        "hybridtrain.piped.switch:unpipelined",
    ],
)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]
