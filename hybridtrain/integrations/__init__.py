"""The trainers that people have, taught not to wrap a model that averages its own gradients.

accelerate    Accelerate, and with it the Trainers of transformers and TRL
data_parallel torch.nn.DataParallel, which transformers' Trainer uses too
lightning     Lightning's Trainer and Fabric

A trainer that a script has imported is changed at the first `pipelined(model)`, for pipelined
models alone. Another trainer is another file with a function `install`, and its name here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from torch import nn

Averages = Callable[[nn.Module], bool]
"""`averages(model)`: whether the model averages the gradients of its parameters itself."""

_FILES = {
    "accelerate": "hybridtrain.integrations.accelerate",
    "lightning": "hybridtrain.integrations.lightning",
    "pytorch_lightning": "hybridtrain.integrations.lightning",
    "torch": "hybridtrain.integrations.data_parallel",
}

_installed: set[str] = set()


def install(averages: Averages) -> None:
    """Prepares the trainers that have been imported, each once."""
    for package, file in _FILES.items():
        if package in sys.modules and package not in _installed:
            _installed.add(package)
            import_module(file).install(package, averages)


__all__ = ["Averages", "install"]
