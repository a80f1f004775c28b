"""Hybrid pipeline and data parallel training of PyTorch models.

from hybridtrain import HybridModel, Trainer, World
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridtrain.model import HybridModel, TrainStepResult
    from hybridtrain.planning.marks import partition, set_partition
    from hybridtrain.skip import pop, stash
    from hybridtrain.trainer import Trainer
    from hybridtrain.world import World

__version__ = "0.1.0"

__all__ = [
    "HybridModel",
    "TrainStepResult",
    "Trainer",
    "World",
    "partition",
    "pop",
    "set_partition",
    "stash",
]

_HOME = {
    "HybridModel": "hybridtrain.model",
    "TrainStepResult": "hybridtrain.model",
    "Trainer": "hybridtrain.trainer",
    "World": "hybridtrain.world",
    "partition": "hybridtrain.planning.marks",
    "set_partition": "hybridtrain.planning.marks",
    "pop": "hybridtrain.skip",
    "stash": "hybridtrain.skip",
}


def __getattr__(name: str) -> Any:
    # on first use, so that looking at a config does not wait a second for torch
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
