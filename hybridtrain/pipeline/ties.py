"""Parameters that layers of different stages share, such as tied embeddings.

The first stage that has the parameter owns it. Every other stage computes with an alias: a leaf
that shares the memory on the same device, or is a copy on another device. So the threads of two
stages never add to the same gradient, and no two stages' DDPs share a parameter.

    before a step    owner's value --[1]--> alias 2, alias 3
    in the step      each stage adds to the gradient that its leaf has
    after it         owner.grad + alias 2's [2] + alias 3's [3], in the order of the stages

With stages in several processes, [1] to [3] are sends and receives. Every process handles its ends
of all ties in stage order (`ties_of`), and each end does one operation at a time, so no
two processes can wait for each other.

An alias is in the layer's instance dictionary, where Python looks first; the module keeps the
parameter itself registered, under the user's names, counted once. A parameter that is not
registered in a layer (for example, in a list), or that the loss reads, has no alias. If its
gradient must be averaged or sent, `refuse_foreign_parameters` searches the graph of the stage's
first forward for it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.nn.parameter import Parameter

from hybridtrain._base.torch_private import has_gradient_hooks
from hybridtrain.errors import SplitError, UserError
from hybridtrain.partitioning import StageOwners
from hybridtrain.pipeline.point_to_point import begin_receive, begin_send, wait
from hybridtrain.world import World

if TYPE_CHECKING:
    from hybridtrain.pipeline.forward.stage import ForwardStage


@dataclass(frozen=True)
class TiedUse:
    """A use, by a later stage, of a parameter that the stage `owner` owns."""

    module: nn.Module
    name: str
    parameter: Parameter
    owner: int


class Tie(Protocol):
    """Keeps an alias and its parameter together; a step calls both methods of all ties."""

    def refresh(self) -> None:
        """Copies the parameter's value to the alias."""

    def accumulate_into_owner(self) -> None:
        """Adds the alias's gradient to the parameter's and drops it."""


@dataclass(frozen=True)
class Alias:
    """The stand-in for a parameter that another stage owns."""

    parameter: Parameter
    alias: Parameter

    def refresh(self) -> None:
        """Copies the parameter's value, unless they share memory."""
        refuse_hooks(self.parameter)
        # in every step: no cheap check shows whether the value has changed. `Tensor._version` stays
        # the same when a fused optimizer writes (AdamW(fused=True), PyTorch 2.15), or through .data
        if self.alias.data_ptr() != self.parameter.data_ptr():
            with torch.no_grad():
                self.alias.copy_(self.parameter, non_blocking=True)  # [1]

    def accumulate_into_owner(self) -> None:
        """Adds the alias's gradient to the parameter's and drops it."""
        # Dropped in each step, whatever `zero_grad` does: the sum is in the owner's gradient.
        gradient, self.alias.grad = self.alias.grad, None
        if gradient is not None:
            here = gradient.to(self.parameter.device, non_blocking=True)
            if here is gradient and self.parameter.grad is None:
                here = gradient.clone()  # DDP keeps the memory of a gradient
            _add_gradient(self.parameter, here)  # [2], [3]


@dataclass(frozen=True)
class AliasElsewhere:
    """A tie between a parameter in this process and an alias in another process.

    Attributes:
        parameter: the parameter.
        world: the processes of the pipeline.
        peer: the process with the alias.
    """

    parameter: Parameter
    world: World
    peer: int

    def refresh(self) -> None:
        """Sends the parameter's value."""
        refuse_hooks(self.parameter)
        # Contiguous, because the receiver allocates by the shape alone.
        value = self.parameter.detach().to(self.world.wire_device).contiguous()
        # At once, so that the order of the ties is the only order; between steps there is nothing
        # to overlap with.
        wait(begin_send([value], self.world, self.peer))  # [1]

    def accumulate_into_owner(self) -> None:
        """Receives the alias's gradient, if any, and adds it to the parameter's."""
        there = torch.zeros(1, dtype=torch.uint8)  # [2], [3]: a flag first, since it may have none
        wait(begin_receive([there], self.world, self.peer))
        # In CPU memory, so reading it waits for no GPU.
        if not there:
            return
        parameter = self.parameter
        gradient = torch.empty(
            parameter.shape, dtype=parameter.dtype, device=self.world.wire_device
        )
        wait(begin_receive([gradient], self.world, self.peer))
        _add_gradient(parameter, gradient.to(parameter.device))


@dataclass(frozen=True)
class OwnerElsewhere:
    """A tie between an alias in this process and a parameter in another process.

    Attributes:
        alias: the alias.
        world: the processes of the pipeline.
        peer: the process with the parameter.
    """

    alias: Parameter
    world: World
    peer: int

    def refresh(self) -> None:
        """Receives the parameter's value."""
        alias = self.alias.detach()
        value = torch.empty(alias.shape, dtype=alias.dtype, device=self.world.wire_device)
        wait(begin_receive([value], self.world, self.peer))
        alias.copy_(value)

    def accumulate_into_owner(self) -> None:
        """Sends the alias's gradient, and drops it."""
        gradient, self.alias.grad = self.alias.grad, None
        there = torch.tensor([gradient is not None], dtype=torch.uint8)
        wait(begin_send([there], self.world, self.peer))
        if gradient is not None:
            if gradient.is_sparse:  # the owner does not know its size
                gradient = gradient.to_dense()
            gradient = gradient.to(self.world.wire_device).contiguous()
            wait(begin_send([gradient], self.world, self.peer))


def refuse_hooks(parameter: Parameter) -> None:
    """Checks that no hook would see only a part of a shared parameter's gradient.

    Several stages compute its parts at different times, and the step sums them at its end.

    Raises:
        UserError: the parameter has a hook.
    """
    if has_gradient_hooks(parameter):
        raise UserError(
            f"a parameter of shape {tuple(parameter.shape)} that layers of several stages share "
            f"has a hook (register_hook or register_post_accumulate_grad_hook), which would see "
            f"the gradient of only one stage: change parameter.grad after train_step instead, or "
            f"cut the model so that these layers are in one stage"
        )


@torch.no_grad()
def _add_gradient(parameter: Parameter, gradient: torch.Tensor) -> None:
    """Adds `gradient`, or assigns it without a copy, to the gradient of `parameter`."""
    if parameter.grad is None:
        parameter.grad = gradient
    elif parameter.grad.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient + parameter.grad  # dense, as autograd adds them
    else:
        parameter.grad += gradient


def tied_uses(stages: Sequence[Sequence[nn.Module]]) -> list[list[TiedUse]]:
    """Returns for each stage its uses of parameters that earlier stages own."""
    owner: dict[int, int] = {}
    uses: list[list[TiedUse]] = [[] for _ in stages]
    for index, layers in enumerate(stages):
        # Each module once: a layer may be used in one stage under two names.
        for module in {id(m): m for layer in layers for m in layer.modules()}.values():
            # Not `named_parameters`, which gives a tied parameter once.
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                first = owner.setdefault(id(parameter), index)
                if first != index:
                    uses[index].append(TiedUse(module, name, parameter, first))
    return uses


def refuse_foreign_parameters(
    used: Sequence[Parameter], allowed: Collection[int], names: Mapping[int, str], stage: object
) -> None:
    """Checks that the backward of a stage does not add to gradients of another stage.

    Args:
        used: the parameters that the graph of the stage leads to.
        allowed: the `id` of each parameter that the stage has.
        names: the names of the model's parameters in this process, by their `id`.
        stage: the stage, for the message.

    Raises:
        SplitError: it would add to the gradient of another stage's parameter.
    """
    for parameter in used:
        if id(parameter) in allowed:
            continue
        name = names.get(id(parameter))
        what = repr(name) if name else f"of shape {tuple(parameter.shape)}"
        raise SplitError(
            f"the forward of {stage} uses a parameter ({what}) that none of its layers has "
            f"registered, so its gradient would not reach the owning stage, or would not be "
            f"averaged over the replicas. In a layer, tie it by an attribute "
            f"(layer.weight = other.weight) instead of a list, dict or closure. In a loss, such as "
            f"a penalty, use weight_decay, or let the layer that owns it return the penalty"
        )


def remove_aliases(net: nn.Module) -> None:
    """Removes aliases of an earlier pipeline from the layers of `net`."""
    for module in net.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it never has an alias
        for name in module._parameters:
            module.__dict__.pop(name, None)


def place_with_aliases(
    module: nn.Module, device: torch.device, uses: Sequence[TiedUse]
) -> list[Alias]:
    """Moves `module` to `device` and gives it aliases for the parameters in `uses`."""
    for use in uses:
        # `module.to` would move the owner's parameter to this stage's device.
        use.module._parameters[use.name] = None
    try:
        module.to(device)
    finally:
        for use in uses:
            use.module._parameters[use.name] = use.parameter
    aliases: dict[int, Alias] = {}
    for use in uses:
        if id(use.parameter) not in aliases:
            value = use.parameter.detach()
            # another process has the value, and sends it before each step
            value = torch.empty_like(value, device=device) if value.is_meta else value.to(device)
            alias = Parameter(value, requires_grad=use.parameter.requires_grad)
            # a copy of the module has no pipeline: it ties parameters as in the user's model
            alias.__deepcopy__ = partial(copy.deepcopy, use.parameter)  # type: ignore[method-assign]
            aliases[id(use.parameter)] = Alias(use.parameter, alias)
        # `nn.Module.__getattr__` is asked only for what the instance dictionary lacks.
        use.module.__dict__[use.name] = aliases[id(use.parameter)].alias
    placed = list(aliases.values())
    for number, placed_alias in enumerate(placed):
        # DDP finds an alias only if it is registered.
        module.register_parameter(f"alias_{number}", placed_alias.alias)
    return placed


def ties_of(
    stages: Sequence[ForwardStage],
    uses: Sequence[Sequence[TiedUse]],
    world: World,
    owners: StageOwners,
) -> list[Tie]:
    """Returns this process's ends of all ties, in stage order, the same on all processes."""
    here, process_of = world.pipeline_rank, owners.process_of
    stage_at = {stage.index: stage for stage in stages}
    ties: list[Tie] = []
    for index, stage_uses in enumerate(uses):
        user = process_of(index)
        # One tie for all uses in a stage: they share one alias. In the order of the layers,
        # which all processes have.
        for use in {id(use.parameter): use for use in stage_uses}.values():
            home = process_of(use.owner)
            if user == here:
                alias = next(a for a in stage_at[index].aliases if a.parameter is use.parameter)
                if home == here:
                    ties.append(alias)
                else:
                    ties.append(OwnerElsewhere(alias.alias, world, home))
            elif home == here:
                ties.append(AliasElsewhere(use.parameter, world, user))
    return ties
