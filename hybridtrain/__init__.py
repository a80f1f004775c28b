"""Hybrid pipeline and data parallel training of PyTorch models.

from hybridtrain import HybridModel, Trainer, World
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridtrain.callbacks import Callback
    from hybridtrain.data import EvalLoader, Loader
    from hybridtrain.launch import notebook_launcher
    from hybridtrain.machine import Cluster
    from hybridtrain.microbatch import shared
    from hybridtrain.model import HybridModel, TrainStepResult
    from hybridtrain.options import PipelineOptions
    from hybridtrain.planning import partition, set_partition
    from hybridtrain.session import Session
    from hybridtrain.sharded_optimizer import ShardedOptimizer
    from hybridtrain.skip import pop, stash
    from hybridtrain.step import OptimizerStep
    from hybridtrain.trainer import Trainer, TrainerOptions
    from hybridtrain.verification import Verification, verify
    from hybridtrain.world import World

__all__ = [
    "Callback",
    "Cluster",
    "EvalLoader",
    "HybridModel",
    "Loader",
    "OptimizerStep",
    "PipelineOptions",
    "Session",
    "ShardedOptimizer",
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

__version__ = "0.2.0.dev0"

_MODULE_OF = {
    "Callback": "hybridtrain.callbacks.base",
    "EvalLoader": "hybridtrain.data.loader",
    "Loader": "hybridtrain.data.loader",
    "Session": "hybridtrain.session",
    "Cluster": "hybridtrain.machine",
    "HybridModel": "hybridtrain.model",
    "OptimizerStep": "hybridtrain.step",
    "PipelineOptions": "hybridtrain.options",
    "ShardedOptimizer": "hybridtrain.sharded_optimizer",
    "TrainStepResult": "hybridtrain.model",
    "Trainer": "hybridtrain.trainer",
    "TrainerOptions": "hybridtrain.trainer",
    "Verification": "hybridtrain.verification",
    "World": "hybridtrain.world",
    "notebook_launcher": "hybridtrain.launch.notebook",
    "partition": "hybridtrain.planning.manual_split",
    "set_partition": "hybridtrain.planning.manual_split",
    "shared": "hybridtrain.microbatch",
    "pop": "hybridtrain.skip",
    "stash": "hybridtrain.skip",
    "verify": "hybridtrain.verification",
}


def __getattr__(name: str) -> Any:
    # on first use, so that commands that only show a config do not wait a second for torch
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]
