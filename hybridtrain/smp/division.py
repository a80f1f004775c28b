"""Partitioning a model, by marks or by costs, and activation checkpointing of modules.

The unit of recomputation is a layer of the pipeline: a marked module is recomputed with the layer
that contains it, or, if it contains several layers, each of these is recomputed. Results are the
same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from hybridtrain._base.microbatch import Microbatch
from hybridtrain.errors import ConfigError, SplitError, UserError, naming
from hybridtrain.model import HybridModel
from hybridtrain.partitioning import observe, plan, table
from hybridtrain.smp.config import NAMING
from hybridtrain.smp.runtime import Runtime, current

log = logging.getLogger("hybridtrain")

# not an attribute of the modules, which belong to the user
_marked: WeakSet[nn.Module] = WeakSet()
_STRATEGIES = ("each", "contiguous")


def partitioned_model(
    net: nn.Module,
    runtime: Runtime,
    example: Microbatch,
    *,
    measures: bool,
    settings: Mapping[str, Any],
) -> HybridModel:
    """Returns the pipeline of `net`; a collective call.

    Args:
        net: the script's module.
        runtime: the configuration and the processes.
        example: the inputs of a micro-batch.
        measures: partition by measured costs instead of estimates.
        settings: further options.
    """
    world, config = runtime.world, runtime.config
    seed = world.broadcast(torch.initial_seed()) & (2**63 - 1)
    options = replace(config.options(seed), **settings)
    by_costs = config.auto_partition and "split" not in config.own
    searched = replace(options, split="balanced") if by_costs else options
    costs = "measured" if measures else "estimated"

    def decide() -> tuple[list[str], list[str], str]:
        try:
            made = plan(net, searched, example, world.stage_owners, costs=costs)
        except SplitError as error:
            if not by_costs:
                raise
            log.info("partitioned by parameters, because costs cannot be estimated: %s", error)
            made = plan(net, replace(options, split="size"), example, world.stage_owners)
        begins = [names[0] for names in made.layer_names[1:]]
        _, ran = observe(net, example.inputs)  # a forward may mark modules itself
        names = dict.fromkeys([*checkpointed_names(net), *checkpointed_names(ran)])
        return begins, list(names), table(made)

    begins, recomputed, shown = world.from_main(decide)
    if by_costs:
        options = replace(options, split=begins)
    if recomputed and options.recompute == "never":
        options = replace(options, recompute=recomputed)
    if world.is_main:
        log.info("partition of the model:\n%s", shown)
    return HybridModel(net, world, options, example_inputs=example)


@naming(NAMING)
def get_partition(module: nn.Module) -> int:
    """Returns the stage of `module`, or of its first part.

    Raises:
        UserError: the model has not been partitioned yet, or this process's stages do not contain
            the module.
    """
    model = current().model
    if model is None:
        raise UserError("there is no smp.DistributedModel yet: create it first")
    hybrid = model.partitioned_hybrid()
    parts = {id(part) for part in module.modules()}
    tensors = {id(t) for t in (*module.parameters(), *module.buffers())}
    for index, layers in enumerate(hybrid.pipeline.planned.stages):
        for layer in layers:
            tensors_of_layer = (*layer.module.parameters(), *layer.module.buffers())
            if parts & {id(m) for m in layer.module.modules()} or tensors & {
                id(t) for t in tensors_of_layer
            }:
                return index
    raise UserError(f"{type(module).__name__} is not a module of the model")


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **options: Any
) -> Iterator[None]:
    """Creates the modules inside the block with parameters of `dtype`.

    With `fp16` or `bf16` in the configuration, parameters are fp32: the master weights, which the
    forward casts to the lower precision.

    Raises:
        ConfigError: `tensor_parallelism` is True.
    """
    refuse_tensor_parallelism(tensor_parallelism)
    previous_dtype = torch.get_default_dtype()
    if dtype is not None and current().config.precision == "fp32":
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous_dtype)


def refuse_tensor_parallelism(enabled: bool) -> None:
    """Raises a ConfigError if `enabled` is True."""
    if enabled:
        raise ConfigError(
            "tensor parallelism is not supported: remove it, or enable it only if "
            "smp.tp_size() > 1, which is never the case"
        )


@contextmanager
def tensor_parallelism(enabled: bool = True, **options: Any) -> Iterator[None]:
    """Has no effect unless `enabled`, which raises an error."""
    refuse_tensor_parallelism(enabled)
    yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: Any) -> None:
    """Has no effect unless `enabled`, which raises an error."""
    refuse_tensor_parallelism(enabled)


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Has no effect: parameters are initialized when they are created."""
    yield


def default_partition() -> int | None:
    """Returns the configured stage of unmarked modules."""
    return current().config.default_partition


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Recomputes the activations of `module` in the backward; call it before the first step.

    Args:
        module: a module of the model.
        preserve_rng_state: True; a recomputed layer always draws the numbers of its forward.
        pack_args_as_tuple: has no effect.
        strategy: smp's strategy for a Sequential; here each of its layers is recomputed separately.

    Raises:
        ConfigError: the strategy is unknown, or the model has already been partitioned.
    """
    if strategy not in _STRATEGIES and not strategy.startswith("group_"):
        raise ConfigError(f"strategy={strategy} is unknown: use each, contiguous or group_<n>")
    model = current().model
    if model is not None and model.partitioned and module not in _marked:
        raise ConfigError(
            "call set_activation_checkpointing before the first step, which partitions the model"
        )
    _marked.add(module)


def checkpoint(
    module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Returns `module(*args)` inside a model's forward, and recomputes its activations.

    Args:
        module: a module of the model.
        *args: its positional arguments.
        preserve_rng_state: as in `set_activation_checkpointing`.
        **kwargs: its keyword arguments.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"smp.checkpoint takes a module, not {module!r:.100}")
    _marked.add(module)
    return module(*args, **kwargs)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Returns `sequential_module(input)` inside a model's forward, and recomputes each layer.

    Args:
        sequential_module: a Sequential of the model.
        input: its argument.
        strategy: as in `set_activation_checkpointing`.
        preserve_rng_state: as in `set_activation_checkpointing`.
        pack_args_as_tuple: as in `set_activation_checkpointing`.
    """
    if not isinstance(sequential_module, nn.Sequential):
        raise ConfigError("smp.checkpoint_sequential takes an nn.Sequential")
    return checkpoint(sequential_module, input)


def checkpointed_names(net: nn.Module) -> list[str]:
    """Returns the names of the marked modules of `net`, or of a copy that has run its forward."""
    marked = [name for name, module in net.named_modules() if module in _marked]
    # marking the model itself marks all its layers
    return marked if "" not in marked else [name for name, _ in net.named_children()]
