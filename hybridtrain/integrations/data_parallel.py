"""torch.nn.DataParallel: refused around a pipelined model when it is made.

Its first call would say only that parameters are on several devices.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

from hybridtrain.errors import ConfigError, argument

if TYPE_CHECKING:
    from hybridtrain.integrations import Averages


def install(package: str, averages: Averages) -> None:
    """Changes the constructor of DataParallel, for models that `averages` is true for."""
    kind: Any = nn.DataParallel
    make = kind.__init__

    @functools.wraps(make)
    def checked(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if averages(module):
            raise ConfigError(
                "DataParallel cannot wrap a pipelined model, which uses the GPUs of this "
                "process itself: remove it. Trainers add it if they see more GPUs than the "
                f"pipeline has: pass all of them ({argument('nb_part')}), or hide the others by "
                "CUDA_VISIBLE_DEVICES"
            )
        make(self, module, *args, **kwargs)

    kind.__init__ = checked
