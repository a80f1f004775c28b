"""Engines: what executes a step's schedule, by the name that `engine=` chooses."""

from collections.abc import Callable, Sequence

import torch

from hybridtrain.pipeline.engines.threads import ThreadEngine
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.step import Engine

__all__ = ["ENGINES", "ThreadEngine"]

# An engine is made from the stages that this process owns and from its devices.
ENGINES: dict[str, Callable[[Sequence[Stage], Sequence[torch.device]], Engine]] = {
    "local": ThreadEngine
}
