"""A table of all tensors of a run: the processes that have each, and the one that writes it.

A tensor is in several processes if they are replicas of a stage, and in one if only its stage or
its owner among the replicas has it. Each is written by one of these, so that a reader need not know
of splits. Every process makes the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hybridtrain.checkpoint.optimizer_state import optimizer_by_name
from hybridtrain.checkpoint.tensor_files import check_storable, without_aliases
from hybridtrain.checkpoint.trees import pack
from hybridtrain.errors import CheckpointError
from hybridtrain.model import HybridModel

Key = tuple[str, str]
"""The stem of a file, and the name of a tensor in it."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor without its values, as processes tell each other of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """Returns the description of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def meta(self) -> Tensor:
        """Returns a meta tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class _Part:
    """The state that one process has."""

    tensors: dict[Key, TensorInfo]
    aliases: dict[Key, str]
    extra: dict[str, Any]
    optimizer: Any
    problem: str | None = None


class StateTable:
    """The tensors of a model and its optimizer over all processes; a collective call.

    Attributes:
        infos: each tensor of the whole state once, in the order of the model's names.
        holders: the ranks that have it, ascending.
        aliases: by the stem of a file, further names of a tensor and its first one.
        optimizer: the state of `optimizer_by_name` for the whole model; tensors of other processes
            are meta tensors.
        extra: what `get_extra_state` returned, unless it is a tensor, by name.

    Raises:
        CheckpointError: a process has a value that is not saved, or the optimizers of the processes
            have different groups.
    """

    def __init__(self, model: HybridModel, optimizer: Optimizer) -> None:
        self._rank = model.world.rank
        self._own: dict[Key, Tensor] = {}
        own: dict[str, Any] = {}
        try:
            own = optimizer_by_name(model, optimizer)
            part = self._describe(model, own)
        except CheckpointError as error:
            part = _Part({}, {}, {}, None, str(error))
        parts = model.world.gather(part)
        for problem in (part.problem for part in parts):
            if problem is not None:
                raise CheckpointError(problem)
        self.extra = {k: v for part in reversed(parts) for k, v in part.extra.items()}
        trees = [tree_map_only(TensorInfo, TensorInfo.meta, part.optimizer) for part in parts]
        trees[self._rank] = own
        self.optimizer = _merged(trees, model)
        infos: dict[Key, TensorInfo] = {}
        self.holders: dict[Key, list[int]] = {}
        for rank, part in enumerate(parts):
            for key, info in part.tensors.items():
                infos.setdefault(key, info)
                self.holders.setdefault(key, []).append(rank)
        order = [("model", name) for name in model.net.state_dict()]
        order += [("optimizer", name) for name in pack("optimizer", self.optimizer)[1]]
        self.infos = {key: infos[key] for key in order if key in infos}
        self.aliases: dict[str, dict[str, str]] = {"model": {}, "optimizer": {}}
        for part in reversed(parts):
            for (stem, name), first in part.aliases.items():
                if (stem, name) not in self.infos:
                    self.aliases[stem][name] = first

    def _describe(self, model: HybridModel, own: dict[str, Any]) -> _Part:
        state = model.pipeline.own_state()
        tensors_of_model = {n: value for n, value in state.items() if isinstance(value, Tensor)}
        groups = {
            # between two steps each replica may have other buffers, of which the first's are saved
            "model": {
                name: tensor
                for name, tensor in tensors_of_model.items()
                if model.world.replica == 0 or isinstance(tensor, nn.Parameter)
            },
            "optimizer": pack("optimizer", own)[1],
        }
        aliases: dict[Key, str] = {}
        for stem, tensors in groups.items():
            check_storable(tensors)
            kept, others = without_aliases(tensors)
            self._own |= {(stem, name): tensor for name, tensor in kept.items()}
            aliases |= {(stem, name): first for name, first in others.items()}
        extra = {name: value for name, value in state.items() if name not in tensors_of_model}
        return _Part(
            {key: TensorInfo.of(tensor) for key, tensor in self._own.items()},
            aliases,
            {} if model.world.replica else extra,
            tree_map_only(Tensor, TensorInfo.of, own),
        )

    def value(self, key: Key) -> Tensor:
        """Returns the tensor, which this process has."""
        return self._own[key]

    def assigned(self) -> dict[Key, int]:
        """Returns for each tensor the rank that writes it: evenly by bytes, the largest first."""
        bytes_of: dict[int, int] = {}
        writer: dict[Key, int] = {}
        for key in sorted(self.infos, key=lambda key: -self.infos[key].nbytes):
            rank = min(self.holders[key], key=lambda rank: (bytes_of.get(rank, 0), rank))
            bytes_of[rank] = bytes_of.get(rank, 0) + self.infos[key].nbytes
            writer[key] = rank
        return writer


def _merged(trees: list[Mapping[str, Any]], model: HybridModel) -> dict[str, Any]:
    """Returns the state of an optimizer over the whole model from those of its processes.

    Raises:
        CheckpointError: they have different numbers of groups.
    """
    groups = [tree["param_groups"] for tree in trees]
    if len({len(each) for each in groups}) > 1:
        raise CheckpointError(
            "the optimizers of the processes have different numbers of parameter groups: make the "
            "same groups in each process, also where one is empty"
        )
    order = {name: index for index, (name, _) in enumerate(model.net.named_parameters())}
    merged = []
    for same in zip(*groups, strict=True):
        names = {name for group in same for name in group["params"]}
        merged.append({**same[0], "params": sorted(names, key=order.__getitem__)})
    state = {name: entry for tree in reversed(trees) for name, entry in tree["state"].items()}
    return {
        "state": {name: state[name] for name in sorted(state, key=order.__getitem__)},
        "param_groups": merged,
    }
