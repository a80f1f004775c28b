"""Data parallelism of one stage in which each replica keeps a part of the weights and gradients.

What FSDP2 (`torch.distributed.fsdp.fully_shard`) does around each forward of a layer is done here
around a step. So there is no collective for a micro-batch, and replicas may have different numbers
of them:

    begin_step    all-gather the weights, one layer after the other
    F0 F1 B0 B1   whole weights, gradients added up as without shards
          last B  reduce-scatter the gradients of a layer when all have come
    end_step      free the whole weights

`fully_shard` itself cannot be used: it cannot be undone, which a model that was changed after
wrapping needs; what it has added up without a reduction outlives `zero_grad`; and it hangs hooks
onto the modules, which a second tracing would meet. Parameters and gradients are laid out as its
own, as `DTensor`s cut along the first dimension.

Not cut, but the same on all replicas, are a parameter that stages share, one without a dimension,
and one that is not contiguous in memory, as in the format `channels_last`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import Parameter, is_lazy
from torch.utils.hooks import RemovableHandle

from hybridtrain.accelerator import put
from hybridtrain.errors import ConfigError
from hybridtrain.pipeline.reducer import broadcast, no_gradient, use_in_sync_batch_norms
from hybridtrain.pipeline.shard_unit import Shard, ShardUnit, stand_in_for, units_of
from hybridtrain.sharded_tensors import copy_of, not_averaged, whole_gradient


class StageShards:
    """Keeps a part of a stage on each replica; has the methods of `StageReducer`.

    Args:
        net: the model; where it has a parameter of this stage, it shows the sharded one.
        layers: the stage's layers.
        module: the same under one root.
        names: its own parameters under the user's names.
        tied: the ids of the parameters that several stages share.
        group: the processes that have this stage, one per replica.
        find_unused_parameters: as in DDP.

    Raises:
        ConfigError: a parameter cannot be sharded.
    """

    def __init__(
        self,
        net: nn.Module,
        layers: Sequence[nn.Module],
        module: nn.Module,
        names: Mapping[str, Parameter],
        tied: frozenset[int],
        group: dist.ProcessGroup,
        find_unused_parameters: bool,
    ) -> None:
        self._net = net
        self._layers = layers
        self._module = module
        self._names = names
        self._tied = tied
        self._group = group
        self._find_unused = find_unused_parameters
        self._wholes = {id(parameter): parameter for parameter in names.values()}
        self._units: list[ShardUnit] = []
        self._copied: list[Parameter] = []
        self._stand_ins: dict[int, Parameter] = {}
        self._swaps: list[tuple[dict[str, Any], str, Parameter, Parameter]] = []
        self._hooks: list[RemovableHandle] = []
        self._works: list[Any] = []
        self._missing: list[set[int]] = []  # while a backward reduces, the gradients to come
        self._in_step = self._trains = self._reduced = False
        _check(module, names)
        use_in_sync_batch_norms(module, group)
        broadcast([*names.values(), *module.buffers()], group)
        if names:
            self._shard()
        self.build()

    def _shard(self) -> None:
        """Cuts the parameters, and shows the model their stand-ins."""
        names, here = self._names, {id(p) for p in self._net.parameters()}
        mesh = DeviceMesh.from_group(self._group, next(iter(names.values())).device.type)
        self._mesh = mesh
        self._units = units_of(self._by_layer(), lambda named: ShardUnit(named, self._group, mesh))
        shards = {id(shard.whole): shard for unit in self._units for shard in unit.shards}
        self._copied = [p for p in names.values() if id(p) not in shards]
        self._stand_ins = {number: shard.parameter for number, shard in shards.items()}
        for parameter in self._copied:
            if id(parameter) in here:  # an alias stands for a parameter of another stage
                copied = copy_of(parameter, mesh)
                self._stand_ins[id(parameter)] = stand_in_for(parameter, copied)
        self._swaps = self._places()
        for number, stand_in in self._stand_ins.items():
            gradient, self._wholes[number].grad = self._wholes[number].grad, None
            if gradient is not None:  # from before
                stand_in.grad = copy_of(gradient, mesh)
        for unit in self._units:
            unit.take_own_parts()
            unit.free()
        self._show(whole=False)

    def build(self) -> None:
        """Averages the gradients of those parameters that require one now."""
        for number, stand_in in self._stand_ins.items():
            self._wholes[number].requires_grad_(stand_in.requires_grad)
        trained = {id(p) for p in self._names.values() if p.requires_grad}
        self._order: list[set[int]] = []
        self._reduced_together: list[ShardUnit | Parameter] = []
        for unit in reversed(self._units):  # as the backward comes to them
            if own := {id(shard.whole) for shard in unit.shards} & trained:
                self._order.append(own)
                self._reduced_together.append(unit)
        for parameter in self._copied:
            if id(parameter) in trained:
                self._order.append({id(parameter)})
                self._reduced_together.append(parameter)
        self._place_of = {number: i for i, own in enumerate(self._order) for number in own}
        self._next = 0
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            self._wholes[number].register_post_accumulate_grad_hook(self._has_gradient)
            for number in self._place_of
        ]

    def close(self) -> None:
        """Puts the whole parameters back for good; a collective call."""
        if not self._in_step:
            self.begin_step(trains=True)
        self._swaps = self._places()  # the model may have been changed
        self._show(whole=True)
        for hook in self._hooks:
            hook.remove()
        self._units, self._stand_ins, self._swaps, self._hooks = [], {}, [], []
        self._in_step = False

    def sync_buffers(self) -> None:
        """Copies replica 0's buffers (running statistics) to all replicas; a collective call."""
        broadcast(list(self._module.buffers()), self._group)

    def begin_step(self, trains: bool) -> None:
        """Makes the weights whole; a collective call.

        Args:
            trains: gradients are going to be added to those that there are.
        """
        self._in_step, self._trains, self._reduced = True, trains, False
        before: ShardUnit | None = None
        for unit in self._units:  # one is on its way while the one before is copied
            unit.begin_gather()
            if before is not None:
                before.end_gather()
            before = unit
        if before is not None:
            before.end_gather()
        self._show(whole=True)
        if trains:
            for number, stand_in in self._stand_ins.items():
                if stand_in.requires_grad and stand_in.grad is not None:
                    self._wholes[number].grad = whole_gradient(stand_in.grad)
                    stand_in.grad = None

    def end_step(self) -> None:
        """Frees the whole weights; gradients go to the parameters that the user sees."""
        if not self._in_step:
            return
        self._in_step = False
        if self._trains:
            self._put_gradients()
        self._show(whole=False)
        for unit in self._units:
            unit.free()

    def prepare_for_backward(self, roots: Sequence[Any]) -> None:
        """Has the next backward reduce the gradients; a layer's when all of them are there."""
        if not self._find_unused:  # else it is not known which are still to come
            self._next = 0
            self._missing = [set(one) for one in self._order]
            self._reduce_complete()

    def reset(self) -> None:
        """Forgets a prepared backward that failed, so that the next step can begin."""
        self._missing, self._works = [], []
        for unit in self._units:
            unit.drop_gradients()

    def check_reduced(self) -> None:
        """Makes sure that the prepared backward has reduced every gradient.

        Raises:
            UserError: a parameter got no gradient; names those without one.
        """
        if self._find_unused:
            self._reduce_used()
        elif self._next < len(self._order):
            left: set[int] = set().union(*self._missing)
            raise no_gradient([name for name, p in self._names.items() if id(p) in left])
        for unit in self._units:
            unit.end_reduce()
        for work in self._works:
            work.wait()
        self._works, self._missing, self._reduced = [], [], True

    def begin_load(self) -> None:
        """Shows whole parameters that have this replica's part of the values alone."""
        for unit in self._units:
            unit.put_own_parts()
        self._show(whole=True)

    def end_load(self) -> None:
        """Keeps this replica's part of what was loaded."""
        for unit in self._units:
            unit.take_own_parts()
            unit.free()
        self._show(whole=False)

    def shards(self) -> list[Shard]:
        """Returns the parameters that are cut."""
        return [shard for unit in self._units for shard in unit.shards]

    # --- parameters

    def _by_layer(self) -> list[list[tuple[str, Parameter]]]:
        """Returns the parameters to be cut, each in the first layer that has it."""
        storages = Counter(p.untyped_storage()._cdata for p in self._names.values())
        left = {}
        for name, parameter in self._names.items():
            storage = parameter.untyped_storage()
            if storages[storage._cdata] > 1 or not self._can_be_cut(parameter):
                continue
            if not storage.resizable() or storage.nbytes() != parameter.nbytes:
                # memory that nothing else has, so that it may be given back
                parameter.data = parameter.detach().clone()
            left[id(parameter)] = name, parameter
        layers = []
        for layer in self._layers:
            if found := [left.pop(id(p)) for p in layer.parameters() if id(p) in left]:
                layers.append(found)
        return layers

    def _can_be_cut(self, parameter: Parameter) -> bool:
        return (
            parameter.dim() > 0
            and parameter.numel() > 0
            and parameter.is_contiguous()
            and not parameter.is_complex()
            and id(parameter) not in self._tied
        )

    def _places(self) -> list[tuple[dict[str, Any], str, Parameter, Parameter]]:
        """Returns where the model has the parameters: a table, a name, the whole, its stand-in."""
        pairs = {
            id(each): (self._wholes[number], stand_in)
            for number, stand_in in self._stand_ins.items()
            for each in (self._wholes[number], stand_in)
        }
        modules = {id(m): m for root in (self._net, self._module) for m in root.modules()}
        return [
            (module._parameters, name, *pairs[id(parameter)])
            for module in modules.values()
            if not isinstance(module, torch.jit.ScriptModule)
            for name, parameter in module._parameters.items()
            if id(parameter) in pairs
        ]

    def _show(self, whole: bool) -> None:
        """Has the model show the whole parameters, or their stand-ins."""
        for table, name, parameter, stand_in in self._swaps:
            now, then = (stand_in, parameter) if whole else (parameter, stand_in)
            if table.get(name) is now:  # or the user has put another one there
                table[name] = then

    # --- gradients

    def _has_gradient(self, parameter: Tensor) -> None:
        """Called by autograd in each backward, after the gradient was added."""
        if self._missing:
            self._missing[self._place_of[id(parameter)]].discard(id(parameter))
            self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Begins to reduce what is there, in the order that all replicas have."""
        while self._next < len(self._order) and not self._missing[self._next]:
            self._begin_reduce(self._next, self._order[self._next])
            self._next += 1

    def _reduce_used(self) -> None:
        """Reduces the gradients that at least one replica has."""
        numbers = [number for number in self._wholes if number in self._place_of]
        wholes = [self._wholes[number] for number in numbers]
        if not wholes:
            return
        used = torch.tensor([p.grad is not None for p in wholes], dtype=torch.uint8)
        used = put(used, wholes[0].device)
        # the host must know which, and so waits for the device here, once per step and stage
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        chosen = {number for number, one in zip(numbers, used.tolist(), strict=True) if one}
        for place, own in enumerate(self._order):
            self._begin_reduce(place, own & chosen)

    @torch.no_grad()
    def _begin_reduce(self, place: int, trained: set[int]) -> None:
        unit = self._reduced_together[place]
        if isinstance(unit, ShardUnit):
            unit.begin_reduce(trained)
        elif trained:
            if unit.grad is None:
                unit.grad = torch.zeros_like(unit)
            unit.grad.div_(self._group.size())
            # of any memory format, which all replicas have alike
            flat = unit.grad.as_strided((unit.grad.numel(),), (1,))
            self._works.append(dist.all_reduce(flat, group=self._group, async_op=True))

    def _put_gradients(self) -> None:
        """Gives the stand-ins what the step has left in the whole parameters."""
        for unit in self._units:
            unit.put_gradients()
        for number, stand_in in self._stand_ins.items():
            gradient, self._wholes[number].grad = self._wholes[number].grad, None
            if gradient is not None:
                distribute = copy_of if self._reduced else not_averaged
                stand_in.grad = distribute(gradient, self._mesh)


def _check(module: nn.Module, names: Mapping[str, Parameter]) -> None:
    """Refuses what cannot be sharded.

    Raises:
        ConfigError: names the parameter or the module.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(True for _ in part.parameters()):
            raise ConfigError(
                f"shard=full cannot take the parameters of TorchScript's module {name} apart: use "
                f"shard=optimizer, or the module that it was made of"
            )
        if getattr(part, "sparse", False) is True and hasattr(part, "num_embeddings"):
            raise ConfigError(
                f"shard=full cannot cut the sparse gradients of {name}: make it with "
                f"sparse=False, or use shard=optimizer"
            )
    for name, parameter in names.items():
        if is_lazy(parameter):
            raise ConfigError(
                f"shard=full needs to know the shape of {name}: run the model on a batch before "
                f"you wrap it, or use shard=optimizer"
            )
