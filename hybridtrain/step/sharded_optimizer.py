"""An optimizer with its state sharded over the replicas, as in ZeRO stage 1.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
https://arxiv.org/abs/1910.02054. As in PyTorch's `ZeroRedundancyOptimizer`, whole parameters are
assigned to replicas. So each update is the plain optimizer's on the same tensors, and any optimizer
that treats parameters independently stays exact, also several (`CombinedOptimizer`) and Muon, which
needs whole matrices.

    gradients    equal on all replicas, averaged in the backward
    step()       replica 0 updates a, c         replica 1 updates b
    broadcast    a, c  ->                       <-  b
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from hybridtrain.errors import ConfigError, setting
from hybridtrain.model import HybridModel
from hybridtrain.step.param_groups import check_optimizer, inner_optimizers, show_weights

# Smaller parameters (in bytes) are sent together, copied into one tensor.
_PACKED_BYTES = 1 << 20


class _Share(NamedTuple):
    """A stage's parameters, the replica that updates each, and the bytes of each replica."""

    group: dist.ProcessGroup | None
    parameters: list[Parameter]
    owners: list[int]
    loads: list[int]

    def add(self, parameters: Sequence[Parameter]) -> None:
        """Assigns `parameters`, largest first, to the replica with the fewest bytes.

        Frozen ones come last, because they have no state yet.
        """
        for parameter in sorted(parameters, key=lambda p: (not p.requires_grad, -p.nbytes)):
            owner = self.loads.index(min(self.loads))
            self.parameters.append(parameter)
            self.owners.append(owner)
            self.loads[owner] += parameter.nbytes


class ReplicaShares:
    """The replica that updates each parameter of an optimizer, the same on all replicas.

    Args:
        model: the model; each of its stages has the process group of its replicas.
    """

    def __init__(self, model: HybridModel) -> None:
        self._model = model
        self._shares: dict[int, _Share] = {}
        self._own: set[int] = set()

    def add(self, parameters: Iterable[Parameter]) -> None:
        """Assigns a replica to each of `parameters`, balanced within each stage."""
        model = self._model
        stage_of: dict[int, int] = {}
        for stage in reversed(model.stages):
            stage_of |= {id(p): stage.index for p in stage.module.parameters()}
        first = model.stages[0].index  # for parameters outside any stage
        by_stage: dict[int, list[Parameter]] = {}
        for parameter in parameters:
            by_stage.setdefault(stage_of.get(id(parameter), first), []).append(parameter)
        for index, of_stage in by_stage.items():
            if index not in self._shares:
                group = model.pipeline.groups[index]
                self._shares[index] = _Share(group, [], [], [0] * model.world.data_parallel_size)
            self._shares[index].add(of_stage)
        self._own = {
            id(parameter)
            for share in self._shares.values()
            for parameter, owner in zip(share.parameters, share.owners, strict=True)
            if owner == model.world.data_parallel_rank
        }

    def owns(self, parameter: Tensor) -> bool:
        """Returns whether this replica updates `parameter`."""
        return id(parameter) in self._own

    @torch.no_grad()
    def send_updates(self) -> None:
        """Sends this replica's updates to the other replicas; a collective call of the replicas."""
        for _, share in sorted(self._shares.items()):
            if share.group is not None:
                _broadcast(share.group, share.parameters, share.owners)


class ShardedOptimizer(Optimizer):
    """Updates a part of the parameters on each replica, and sends the result to the others.

        model = HybridModel(net, world, shard="optimizer")
        optimizer = ShardedOptimizer(model, lambda params: AdamW(params, lr=1e-3))

    Each replica of a stage keeps only the optimizer state of the parameters that it updates, about
    an equal share of the bytes. Because whole parameters are assigned, a dominant parameter limits
    the savings: its replica keeps all of its state.

    Use it like any optimizer. `param_groups` has all parameters; `state` and `state_dict()` have
    the entries of the parameters that this replica updates, in the numbering of all. All processes
    call `step` together.

    Args:
        model: a model with `shard="optimizer"`.
        make: returns the optimizer for a list of parameters; called once, with all of them, before
            any state is created.
        params: passed to `make` instead of `model.parameters()`, such as a list of groups.

    Raises:
        ConfigError: the model has another `shard`, or the optimizer needs a closure.
    """

    def __init__(
        self,
        model: HybridModel,
        make: Callable[[Any], Optimizer],
        params: Iterable[Parameter] | Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        if model.options.shard != "optimizer":
            raise ConfigError(
                f"ShardedOptimizer needs {setting('shard', 'optimizer')}, but the model has "
                f"{setting('shard', model.options.shard)}: set "
                f"{setting('shard', 'optimizer')}, or use the plain optimizer"
            )
        self._inner = make(list(model.parameters()) if params is None else params)
        check_optimizer(self._inner, f"optimizer={type(self._inner).__name__}")
        self._is_complete = False
        super().__init__([dict(group) for group in self._inner.param_groups], self._inner.defaults)
        self._is_complete = True
        self._shares = ReplicaShares(model)
        self._spread(self.param_groups)

    @property
    def inner(self) -> Optimizer:
        """The optimizer of the parameters that this replica updates."""
        return self._inner

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in `torch.optim.Optimizer`; all processes must add the same."""
        if not self._is_complete:
            super().add_param_group(param_group)
            return
        self._inner.add_param_group(dict(param_group))
        added = self._inner.param_groups[-1]
        super().add_param_group({**added, "params": list(added["params"])})
        self._spread([self.param_groups[-1]])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the parameters of all replicas; a collective call of the replicas.

        Raises:
            ConfigError: a closure is given, which would compute the loss on one replica only.
        """
        if closure is not None:
            raise ConfigError(
                "ShardedOptimizer.step does not support a closure: call train_step, then step()"
            )
        self._update(self._inner.step)

    def _update(self, action: Callable[[], object]) -> None:
        """Updates the inner optimizer's parameters, and sends them to the other replicas."""
        for group, inner_group in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner_group.update(_settings(group))
        action()
        self.state = self._inner.state  # some optimizers replace it
        for group, inner_group in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(
                _settings(inner_group)
            )  # some optimizers count their steps in their groups
        self._shares.send_updates()

    def train(self) -> None:
        """Sets the parameters to the values for training; a collective call of the replicas."""
        if hasattr(self._inner, "train"):
            self._update(partial(show_weights, self._inner, training=True))

    def eval(self) -> None:
        """Sets the parameters to the values to evaluate and save; a collective call, too."""
        if hasattr(self._inner, "eval"):
            self._update(partial(show_weights, self._inner, training=False))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of all parameters or this replica's; keeps what this replica updates.

        Raises:
            ValueError: the groups differ from this optimizer's.
        """
        groups, entries = state_dict["param_groups"], state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})  # checks the groups, and adopts them
        numbers: dict[int, Any] = {}
        for saved, current in zip(groups, self.param_groups, strict=True):
            for number, parameter in zip(saved["params"], current["params"], strict=True):
                numbers[id(parameter)] = number
        state: dict[int, Any] = {}
        own_groups: list[dict[str, Any]] = []
        count = 0
        for group, current in zip(self.param_groups, self._inner.param_groups, strict=True):
            first = count
            for parameter in current["params"]:
                if numbers[id(parameter)] in entries:
                    state[count] = entries[numbers[id(parameter)]]
                count += 1
            own_groups.append({**_settings(group), "params": list(range(first, count))})
        self._inner.load_state_dict({"state": state, "param_groups": own_groups})
        self.state = self._inner.state

    def _spread(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Assigns the parameters of new `groups` to the replicas."""
        self._shares.add(p for group in groups for p in group["params"])
        for whole, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["params"] = [p for p in whole["params"] if self._shares.owns(p)]
        for optimizer in (self._inner, *inner_optimizers(self._inner)):
            for parameter in [p for p in optimizer.state if not self._shares.owns(p)]:
                del optimizer.state[parameter]  # created by its constructor
        self.state = self._inner.state


def check_sharded(model: HybridModel, optimizer: Optimizer) -> None:
    """Checks that `optimizer` is sharded if the option `shard` of `model` requires it.

    Raises:
        ConfigError: each replica has the whole state of `optimizer`.
    """
    if model.options.shard != "optimizer" or model.world.data_parallel_size == 1:
        return
    if not isinstance(optimizer, ShardedOptimizer):
        name = type(optimizer).__name__
        raise ConfigError(
            f"{setting('shard', 'optimizer')} needs a ShardedOptimizer, but optimizer= is {name}: "
            f"use hybridtrain.ShardedOptimizer(model, lambda params: {name}(params, ...))"
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _broadcast(
    group: dist.ProcessGroup, parameters: Sequence[Tensor], owners: Sequence[int]
) -> None:
    """Sends each parameter from its owner to all of `group`, combining an owner's small ones."""
    works: list[Any] = []
    small: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for parameter, owner in zip(parameters, owners, strict=True):
        value = parameter.detach()
        # a parameter that was frozen after its backward is updated once more
        if not (parameter.requires_grad or parameter.grad is not None) or not value.numel():
            continue
        if value.nbytes < _PACKED_BYTES or not value.is_contiguous():
            small.setdefault((owner, value.device, value.dtype), []).append(value)
        else:
            works.append(dist.broadcast(value, group=group, group_src=owner, async_op=True))
    packed = []
    for (owner, _, _), values in small.items():
        flat = torch.cat([value.reshape(-1) for value in values])
        works.append(dist.broadcast(flat, group=group, group_src=owner, async_op=True))
        packed.append((flat, values))
    for work in works:
        work.wait()
    for flat, values in packed:
        parts = flat.split([value.numel() for value in values])
        for value, part in zip(values, parts, strict=True):
            value.copy_(part.view(value.shape))
