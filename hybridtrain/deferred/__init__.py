"""Models that get their memory and their values stage by stage."""

from hybridtrain.deferred.modules import (
    CannotDefer,
    construct,
    deferred_init,
    is_deferred,
    materialize,
    materialize_rest,
)

__all__ = [
    "CannotDefer",
    "construct",
    "deferred_init",
    "is_deferred",
    "materialize",
    "materialize_rest",
]
