"""Activation checkpointing by module, as smp 1.x has it.

The unit here is a layer of the pipeline. A module that was named is recomputed with the layer that
it is in, or, if it is a group of layers, each of these is. The results are the same.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn

from hybridtrain.errors import ConfigError

# not an attribute of the modules: a forward that is being traced may set none
_marked: WeakSet[nn.Module] = WeakSet()
_STRATEGIES = ("each", "contiguous")


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Recomputes the activations of `module` in the backward; call it before the first step.

    Args:
        module: a module of the model.
        preserve_rng_state: True; a recomputed layer always draws what its forward drew.
        pack_args_as_tuple: changes nothing.
        strategy: of smp for a Sequential; here each of its layers is recomputed by itself.

    Raises:
        ConfigError: the strategy is unknown, or the model is divided already.
    """
    from hybridtrain.smp.runtime import current

    if strategy not in _STRATEGIES and not strategy.startswith("group_"):
        raise ConfigError(f"strategy={strategy} is unknown: use each, contiguous or group_<n>")
    model = current().model
    if model is not None and model.partitioned and module not in _marked:
        raise ConfigError(
            "set_activation_checkpointing comes before the first step, which divides the model"
        )
    _marked.add(module)


def checkpoint(
    module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Returns `module(*args)`, in a model's forward; its activations are recomputed.

    Args:
        module: a module of the model.
        *args: its arguments.
        preserve_rng_state: as of `set_activation_checkpointing`.
        **kwargs: its arguments.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"smp.checkpoint takes a module, not {module!r:.100}")
    _marked.add(module)
    return module(*args, **kwargs)


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Returns `sequential(input)`, in a model's forward; each of its layers is recomputed.

    Args:
        sequential: a Sequential of the model.
        input: its argument.
        strategy: as of `set_activation_checkpointing`.
        preserve_rng_state: see there.
        pack_args_as_tuple: see there.
    """
    if not isinstance(sequential, nn.Sequential):
        raise ConfigError("smp.checkpoint_sequential takes an nn.Sequential")
    return checkpoint(sequential, input)


def checkpointed_names(net: nn.Module) -> list[str]:
    """Returns the names of the modules of `net` that were marked."""
    marked = [name for name, module in net.named_modules() if module in _marked]
    # the model itself is the group of all its layers
    return marked if "" not in marked else [name for name, _ in net.named_children()]
