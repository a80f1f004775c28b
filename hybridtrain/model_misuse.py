"""Messages for what one would do with an `nn.Module`, and a `HybridModel` does otherwise."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from hybridtrain.errors import ConfigError, UserError
from hybridtrain.graph.layer import layers_of
from hybridtrain.options import PipelineOptions
from hybridtrain.world import World

_MOVES = ("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type", "to_empty")


def check_arguments(net: Any, world: Any, options: Any, *, constructs: bool = False) -> None:
    """Checks the types of the arguments of `HybridModel`, or of its `construct`.

    Raises:
        ConfigError: one of them is something else; shows the call.
    """
    call = "HybridModel(net, World.from_env(nb_part=2), chunks=4)"
    if constructs:
        call = "HybridModel.construct(lambda: MyNet(), World.from_env(nb_part=2), chunks=4)"
        if isinstance(net, nn.Module) or not callable(net):
            what = f"the module {type(net).__name__}" if isinstance(net, nn.Module) else f"{net!r}"
            raise ConfigError(
                f"build= must be a function that makes the module, not {what[:200]}: {call}"
            )
    elif not isinstance(net, nn.Module):
        is_class = isinstance(net, type) and issubclass(net, nn.Module)
        given = f"the class {net.__name__}, not a module of it" if is_class else f"{net!r}"
        raise ConfigError(f"net= must be a torch.nn.Module, not {given[:200]}: {call}")
    if world is None:
        raise ConfigError(f"world= is missing, the processes and devices to train on: {call}")
    if not isinstance(world, World):
        raise ConfigError(f"world={str(world)[:200]} is not a World: {call}")
    if not isinstance(options, PipelineOptions | None):
        raise ConfigError(
            f"options={str(options)[:200]} is not a PipelineOptions; single settings go by name: "
            f"{call}"
        )


def sequence_first_layer(net: nn.Module) -> str | None:
    """Returns the name of the first layer if it takes the samples in dim 1, of a batch itself."""
    first = layers_of(net)[0]
    module = first.module
    if isinstance(module, nn.TransformerEncoder):
        module = module.layers[0]
    if isinstance(module, nn.TransformerEncoderLayer):
        module = module.self_attn
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first:
        return first.name or type(net).__name__
    return None


def check_grad_mode() -> None:
    """Raises a UserError under `torch.inference_mode()`, where nothing can be trained."""
    if torch.is_inference_mode_enabled():
        raise UserError(
            "train_step computes gradients, and torch.inference_mode() is on around it, where "
            "there are none: leave it out for training"
        )


def no_attribute(net: nn.Module | None, name: str) -> NoReturn:
    """Raises an AttributeError that says where to find `name`."""
    text = f"'HybridModel' object has no attribute {name!r}"
    if name in _MOVES:
        text += (
            ": its layers are on their stages' devices, World.from_env(devices=...). Convert the "
            "module before you wrap it; the option precision= computes in bf16 or fp16"
        )
    elif name == "forward":
        text += ": call model(inputs), or model.train_step(inputs, targets, loss_fn) to train"
    elif name == "backward":
        text += ": model.train_step(inputs, targets, loss_fn) runs the backward"
    elif net is not None and hasattr(net, name):
        text += f": it is not an nn.Module. Use the module that it trains: model.net.{name}"
    raise AttributeError(text)
