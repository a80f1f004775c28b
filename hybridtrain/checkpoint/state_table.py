"""A table of the state of a run: which processes have each tensor, and which one writes it.

Several processes have a tensor if they are replicas of its stage; a single process has it if it is
the only one with the stage, or the tensor's owner among the replicas. One process writes it, so
that a reader need not know the split. The modes of a save are three assignments in this table:

    tensor          in ranks    alone       gathered    joint
    0.weight        0, 2        rank 0      rank 0      rank 0
    1.weight        0, 2        rank 0      rank 0      rank 2
    5.weight        1, 3        -           rank 0      rank 1      gathered: rank 1 sends it
alone: rank 0 has every tensor and asks no other process, so the table has a single process.
gathered: rank 0 requests each tensor that it lacks when it writes it. So no process ever holds the
whole model, and no shared file system is needed. joint: each process writes a share.

The table lists optimizer state under parameter names (`optimizer_by_name`), because parameter
numbers depend on the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import KeyPath, MappingKey, tree_map_only

from hybridtrain.checkpoint.base import without_base
from hybridtrain.checkpoint.json_tree import pack
from hybridtrain.checkpoint.read import CheckpointReader
from hybridtrain.checkpoint.tensor_files import TensorInfo, check_storable, without_aliases
from hybridtrain.errors import CheckpointError, phrase
from hybridtrain.model import HybridModel
from hybridtrain.step import ShardedOptimizer, keys_of_state


def optimizer_by_name(model: HybridModel, optimizer: Optimizer | None) -> dict[str, Any]:
    """Returns `optimizer.state_dict()` with parameter names instead of numbers."""
    if optimizer is None:
        return {"state": {}, "param_groups": []}
    names = parameter_names(model, optimizer)
    state = optimizer.state_dict()
    # bitsandbytes hides its tensors from FSDP in a dict of their own, but not from other wrappers
    # such as ShardedOptimizer, and loads both
    hidden = getattr(optimizer, "_FSDP_WRAPPED_QUANT_STATE_KEY", None)
    for entry in state["state"].values():
        entry.update(entry.pop(hidden, {}))
    return {
        # an empty placeholder parameter may have state too
        "state": {names[n]: entry for n, entry in state["state"].items() if names[n]},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"] if names[number]]}
            for group in state["param_groups"]
        ],
    }


def check_groups(
    path: Path, model: HybridModel, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Checks that `state`, from `optimizer_by_name`, has the parameter groups of `optimizer`.

    Raises:
        CheckpointError: the groups differ.
    """
    groups = optimizer_by_name(model, optimizer)["param_groups"]
    groups_here = [sorted(group["params"]) for group in groups]
    elsewhere = {name for name, p in model.net.named_parameters() if p.is_meta}
    saved = [
        sorted(name for name in group["params"] if name not in elsewhere)
        for group in state["param_groups"]
    ]
    if saved != groups_here:
        raise CheckpointError(
            f"the optimizer in {path} has parameter groups that differ from optimizer=: construct "
            f"it with the same groups as before, or {phrase('start a new run')}"
        )


def load_optimizer_by_name(
    model: HybridModel, optimizer: Optimizer, reader: CheckpointReader, state: Mapping[str, Any]
) -> None:
    """Loads a `state`, from `optimizer_by_name`, on every rank; a collective call.

    Hyperparameters (learning rate, weight decay, ...) stay as set in `optimizer`, because they are
    the user's current settings. Counters that an optimizer keeps in its groups are loaded.
    """
    updated = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    updated_ids = {id(p) for group in updated.param_groups for p in group["params"]}
    parameters = {name: p for name, p in model.named_parameters() if id(p) in updated_ids}

    def to_param_device(path: KeyPath, value: Tensor) -> Tensor:
        name, kind = (key.key for key in path[:2] if isinstance(key, MappingKey))
        if name not in parameters:
            return torch.empty(0)  # another process holds or updates it
        parameter = parameters[name]
        if kind == "step":  # PyTorch's device for it, so that `load_state_dict` does not copy it
            return value
        if value.shape == parameter.shape and value.stride() != parameter.stride():
            # in the parameter's memory format, as the optimizer creates it
            moment = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
            return moment.copy_(value)
        return value.to(parameter.device)

    moments = reader.tree(state.get("state"), to_param_device)
    groups = optimizer.state_dict()["param_groups"]
    saved_groups = reader.tree(state.get("param_groups")) or [{}] * len(groups)
    for group, saved, keys in zip(groups, saved_groups, keys_of_state(updated), strict=True):
        group.update({key: saved[key] for key in keys if key in saved})
    optimizer.load_state_dict(
        {
            "state": {
                number: moments[name]
                for number, name in enumerate(parameter_names(model, optimizer))
                if name in moments and name in parameters
            },
            "param_groups": groups,
        }
    )


def parameter_names(model: HybridModel, optimizer: Optimizer) -> list[str]:
    """Returns the name of each parameter of `optimizer`, in the order of its state's numbers.

    The name is "" for the empty placeholder of a process whose stages have no trainable parameters.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    # a non-empty unknown parameter is a mistake
    return [name_of[id(p)] if p.numel() or id(p) in name_of else "" for p in trained]


def _check_loadable(tensors: Mapping[str, Tensor]) -> None:
    """Refuses state that a module stores but does not load, as 4-bit layers of bitsandbytes do.

    Raises:
        CheckpointError: a tensor has further tensors below its name.
    """
    for name in tensors:
        if (owner := name.rpartition(".")[0]) in tensors:
            raise CheckpointError(
                f"cannot save {owner}: its module also stores {name}, which it does not load again "
                "(as 4-bit layers of bitsandbytes). Save only the adapter, by save_pretrained() of "
                "PEFT, or quantize by hybridtrain.models.quantize(net) instead"
            )


Form = Literal["alone", "gathered", "joint"]
"""Assigns each tensor to the process that writes it; see the module docstring."""

Key = tuple[str, str]
"""The stem of a file, and the name of a tensor in it."""

_END = -1


@dataclass(frozen=True)
class _Part:
    """The state held by one process."""

    tensors: dict[Key, TensorInfo]
    aliases: dict[Key, str]
    extra: dict[str, Any]
    optimizer: Any


class StateTable:
    """The tensors of a model and its optimizer, over all processes.

    Constructing it is a collective call, and every process constructs the same table; with `alone`,
    it covers only this process.

    Args:
        model: its parameters and buffers go into the files `model`.
        optimizer: its state goes into the files `optimizer`; None: an empty state does.
        form: who writes.
        group: a gloo group of all processes, for `gathered`, with a long timeout for rank 0's
            writes.

    Attributes:
        form: as passed.
        rank: the rank of this process in the table.
        infos: each tensor of the whole state once, in the order of the model's names.
        written_by: the rank that writes each tensor.
        aliases: by the stem of a file, further names of a tensor and its first name.
        optimizer: the result of `optimizer_by_name` for the whole model; tensors of other processes
            are meta tensors.
        extra: non-tensor results of `get_extra_state`, by name.

    Raises:
        CheckpointError: a process has a value that cannot be saved, or the optimizers of the
            processes have different groups.
    """

    def __init__(
        self,
        model: HybridModel,
        optimizer: Optimizer | None,
        form: Form = "alone",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.form, self._group = form, group
        self.rank = 0 if form == "alone" else model.world.rank
        self._own: dict[Key, Tensor] = {}

        def describe() -> tuple[dict[str, Any], _Part]:
            optimizer_state = optimizer_by_name(model, optimizer)
            return optimizer_state, self._describe(model, optimizer_state)

        if form == "alone":
            optimizer_state, part = describe()
            parts = [part]
        else:
            # A value that cannot be saved is an error on all processes, before any of them gathers.
            optimizer_state, part = model.world.on_all(describe)
            parts = model.world.gather(part)
        self.extra = {k: v for part in reversed(parts) for k, v in part.extra.items()}
        trees = [
            tree_map_only(TensorInfo, lambda info: info.empty("meta"), part.optimizer)
            for part in parts
        ]
        # Only these entries have tensors; the other ranks' entries describe theirs.
        trees[self.rank] = optimizer_state
        self.optimizer = _merged(trees, model)
        infos: dict[Key, TensorInfo] = {}
        self._holders: dict[Key, list[int]] = {}
        for rank, part in enumerate(parts):
            # By rank, so that the holders of a tensor are in the same order everywhere: `serve`
            # asks the first.
            for key, info in part.tensors.items():
                infos.setdefault(key, info)
                self._holders.setdefault(key, []).append(rank)
        # The model's own order, which all processes have: numbers in it name tensors in messages.
        order = [("model", name) for name in model.net.state_dict()]
        order += [("optimizer", name) for name in pack("optimizer", self.optimizer)[1]]
        self.infos = {key: infos[key] for key in order if key in infos}
        self._numbers = {key: number for number, key in enumerate(self.infos)}
        self.written_by = self._spread() if form == "joint" else dict.fromkeys(self.infos, 0)
        self.aliases: dict[str, dict[str, str]] = {"model": {}, "optimizer": {}}
        for part in reversed(parts):
            for (stem, name), first in part.aliases.items():
                if (stem, name) not in self.infos:
                    self.aliases[stem][name] = first

    def _describe(self, model: HybridModel, optimizer_state: dict[str, Any]) -> _Part:
        is_first = self.form == "alone" or model.world.data_parallel_rank == 0
        state = without_base(model, model.pipeline.local_state_dict(), optimizer_state["state"])
        tensors_of_model = {n: value for n, value in state.items() if isinstance(value, Tensor)}
        _check_loadable(tensors_of_model)
        groups = {
            # between steps, replicas may have different buffers; replica 0's are saved
            "model": {
                name: tensor
                for name, tensor in tensors_of_model.items()
                if is_first or isinstance(tensor, nn.Parameter)
            },
            "optimizer": pack("optimizer", optimizer_state)[1],
        }
        aliases: dict[Key, str] = {}
        for stem, tensors in groups.items():
            check_storable(tensors)
            unique, first_names = without_aliases(tensors)
            self._own |= {(stem, name): tensor for name, tensor in unique.items()}
            aliases |= {(stem, name): first for name, first in first_names.items()}
        extra = {name: value for name, value in state.items() if name not in tensors_of_model}
        return _Part(
            {key: TensorInfo.of(tensor) for key, tensor in self._own.items()},
            aliases,
            extra if is_first else {},
            tree_map_only(Tensor, TensorInfo.of, optimizer_state),
        )

    def add(self, stem: str, tensors: Mapping[str, Tensor]) -> None:
        """Adds tensors that rank 0 has and writes, such as averaged weights; call it on rank 0.

        Raises:
            CheckpointError: a tensor cannot be stored.
        """
        check_storable(tensors)
        unique, self.aliases[stem] = without_aliases(tensors)
        for name, tensor in unique.items():
            self._own[stem, name] = tensor
            self.infos[stem, name] = TensorInfo.of(tensor)
            self.written_by[stem, name] = 0

    def value(self, key: Key) -> Tensor:
        """Returns a tensor that this process writes; with `gathered`, another one may send it."""
        if key in self._own:
            return self._own[key]
        # A broadcast, so that all other processes hear it; only the holder answers.
        self._ask(self._numbers[key])
        received = self.infos[key].empty()
        dist.recv(_flat(received), group=self._group, group_src=self._holders[key][0])
        return received

    def serve(self) -> None:
        """Sends tensors that rank 0 requests until it calls `end`; returns at once on rank 0."""
        keys = list(self._numbers)
        # The others' whole part of a save. Rank 0 also ends it after a failure, see `saving`.
        while self.rank and (number := self._ask(_END)) != _END:
            if self.rank == self._holders[keys[number]][0]:
                value = self._own[keys[number]]
                plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
                dist.send(_flat(plain), group=self._group, group_dst=0)

    def end(self) -> None:
        """Releases the other processes from `serve`; rank 0 calls it."""
        self._ask(_END)

    def _ask(self, number: int) -> int:
        """Returns rank 0's `number` on every process."""
        # The value counts only on rank 0.
        asked = torch.tensor([number])
        dist.broadcast(asked, group=self._group, group_src=0)
        return int(asked)

    def _spread(self) -> dict[Key, int]:
        """Assigns each tensor to a rank that has it, balanced by bytes, largest first."""
        bytes_of: dict[int, int] = {}
        written_by: dict[Key, int] = {}
        for key in sorted(self.infos, key=lambda key: -self.infos[key].nbytes):
            # Deterministic, because each process computes the assignment of all.
            rank = min(self._holders[key], key=lambda rank: (bytes_of.get(rank, 0), rank))
            bytes_of[rank] = bytes_of.get(rank, 0) + self.infos[key].nbytes
            written_by[key] = rank
        return written_by


def _flat(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor: gloo does not support every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _merged(trees: list[Mapping[str, Any]], model: HybridModel) -> dict[str, Any]:
    """Merges the optimizer states of the processes into one for the whole model.

    Raises:
        CheckpointError: they have different numbers of groups.
    """
    if len(trees) == 1:
        return dict(trees[0])  # in the optimizer's order
    groups = [tree["param_groups"] for tree in trees]
    if len({len(process_groups) for process_groups in groups}) > 1:
        raise CheckpointError(
            "the optimizers of the processes have different numbers of parameter groups: create "
            "the same groups in each process, even if some are empty"
        )
    order = {name: index for index, (name, _) in enumerate(model.net.named_parameters())}
    merged = []
    for same in zip(*groups, strict=True):
        names = {name for group in same for name in group["params"]}
        merged.append({**same[0], "params": sorted(names, key=order.__getitem__)})
    # Reversed, so that the lowest rank's entry wins, as in `infos`.
    state = {name: entry for tree in reversed(trees) for name, entry in tree["state"].items()}
    return {
        "state": {name: state[name] for name in sorted(state, key=order.__getitem__)},
        "param_groups": merged,
    }
