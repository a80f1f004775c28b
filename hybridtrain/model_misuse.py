"""Messages for what one would do with an `nn.Module`, and a `HybridModel` does otherwise."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hybridtrain.errors import ConfigError, UserError
from hybridtrain.graph import layers_of
from hybridtrain.losses import CountedLoss
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


def check_loss_function(loss_fn: Any, net: nn.Module, world: World) -> None:
    """Checks the loss function of a training step.

    Raises:
        ConfigError: it is not a function, as where arguments are swapped, or has parameters that
            the replicas would train apart.
    """
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn= must be a function, not a {type(loss_fn).__name__}: the order is "
            f"train_step(inputs, targets, loss_fn)"
        )
    if world.replicas > 1 and (trained := trained_by_loss(loss_fn, net)):
        raise ConfigError(
            f"the loss has trainable parameters ({', '.join(trained[:3])}), and only those of the "
            f"model are averaged over the replicas: make them part of the model, whose forward may "
            f"return them beside its output, or freeze them with requires_grad_(False)"
        )


def trained_by_loss(loss_fn: Any, net: nn.Module) -> list[str]:
    """Returns the names of the trainable parameters of a loss that the model does not have."""
    inner: Any = loss_fn
    while not isinstance(inner, nn.Module):
        if isinstance(inner, partial):
            inner = inner.func
        elif isinstance(inner, CountedLoss):
            inner = inner.function
        elif isinstance(getattr(inner, "__self__", None), nn.Module):
            inner = inner.__self__
        else:
            return []
    own = [(name, p) for name, p in inner.named_parameters() if p.requires_grad]
    if not own:
        return []
    theirs = {id(parameter) for parameter in net.parameters()}
    return [name for name, parameter in own if id(parameter) not in theirs]


NO_GRAPH = (
    "the output of model(inputs) has no graph, and a backward of it would fail: "
    "model.train_step(inputs, targets, loss_fn) runs forward, loss and backward. Where no backward "
    "is meant, call the model under torch.no_grad()"
)


class StepLoss(Tensor):
    """The loss of a step: a tensor without a graph, which says so where one calls `backward`."""

    # what is computed from it is a plain tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a UserError."""
        raise UserError(
            "train_step has run the backward already: the gradients are in parameter.grad, and the "
            "optimizer's step is next"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Returns a plain tensor."""
        return self.as_subclass(Tensor).clone()

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))


def no_item(index: Any) -> NoReturn:
    """Raises a TypeError that says where to find a submodule."""
    raise TypeError(f"a HybridModel is not an nn.Sequential: write model.net[{index!r}]")


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
