"""Hybrid pipeline and data parallel training of PyTorch models.

from hybridtrain import HybridModel, Trainer, World
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridtrain._base.microbatch import shared
    from hybridtrain._base.skip import pop, stash
    from hybridtrain.data import EvalLoader, Loader
    from hybridtrain.launch import notebook_launcher
    from hybridtrain.loop import Callback, Session, Trainer, TrainerOptions
    from hybridtrain.model import HybridModel, TrainStepResult
    from hybridtrain.options import PipelineOptions
    from hybridtrain.partitioning import StageOwners, partition, set_partition
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
    "pop",
    "set_partition",
    "shared",
    "stash",
    "verify",
]

__version__ = "0.2.0"

_MODULE_OF = {
    "Callback": "hybridtrain.loop.callbacks.base",
    "EvalLoader": "hybridtrain.data.loader",
    "Loader": "hybridtrain.data.loader",
    "Session": "hybridtrain.loop.session",
    "StageOwners": "hybridtrain.partitioning.stage_owners",
    "HybridModel": "hybridtrain.model",
    "OptimizerStep": "hybridtrain.step",
    "PipelineOptions": "hybridtrain.options",
    "ShardedOptimizer": "hybridtrain.step.sharded_optimizer",
    "TrainStepResult": "hybridtrain.model",
    "Trainer": "hybridtrain.loop.trainer",
    "TrainerOptions": "hybridtrain.loop.trainer",
    "Verification": "hybridtrain.verification",
    "World": "hybridtrain.world",
    "notebook_launcher": "hybridtrain.launch.notebook",
    "partition": "hybridtrain.partitioning.manual_split",
    "set_partition": "hybridtrain.partitioning.manual_split",
    "shared": "hybridtrain._base.microbatch",
    "pop": "hybridtrain._base.skip",
    "stash": "hybridtrain._base.skip",
    "verify": "hybridtrain.verification",
}


def __getattr__(name: str) -> Any:
    # on first use, so that commands that only show a config do not wait a second for torch
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]
