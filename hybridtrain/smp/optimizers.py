"""`smp.optimizers`: the timm versions of apex's optimizers, with norms over all stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridtrain.errors import ConfigError
from hybridtrain.smp.runtime import current

if TYPE_CHECKING:
    from torch.optim import Optimizer

_OF_TIMM = {"FusedLAMB": "Lamb", "FusedLamb": "Lamb", "FusedNovoGrad": "NvNovoGrad"}


def __getattr__(name: str) -> Any:
    if name not in _OF_TIMM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from timm import optim
    except ImportError as error:
        raise ConfigError(
            f"smp.optimizers.{name} needs {_OF_TIMM[name]} of timm: pip install "
            f"'hybridtrain[smp]', or use an optimizer of torch.optim"
        ) from error
    kind = getattr(optim, _OF_TIMM[name])
    return _clipping(kind) if _OF_TIMM[name] == "Lamb" else kind


def _clipping(kind: Any) -> type[Optimizer]:
    """Returns a LAMB class with `max_grad_norm` applied over all stages."""

    class FusedLAMB(kind):  # type: ignore[misc]
        def __init__(self, params: Any, *args: Any, max_grad_norm: float = 1.0, **kwargs: Any):
            super().__init__(params, *args, max_grad_norm=None, **kwargs)
            self._max_grad_norm = max_grad_norm

        def step(self, closure: Any = None) -> Any:
            model = current().model
            if self._max_grad_norm and model is not None and model.partitioned:
                model.clip_grad_norm_(self._max_grad_norm)
            return super().step(closure)

    return FusedLAMB
