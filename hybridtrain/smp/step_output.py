"""The result of a step: each tensor as a `StepOutput`, with the value of every micro-batch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from hybridtrain.errors import BatchError, UserError
from hybridtrain.smp.process_state import random_states, set_random_states
from hybridtrain.world import World

_SMALL = 1 << 16  # bytes of a CPU tensor that travels with the structure around it


class StepOutput:
    """The values of one tensor, by micro-batch.

    Args:
        outputs: the tensors.
        samples: of each micro-batch.
    """

    def __init__(self, outputs: Sequence[Tensor], samples: Sequence[int] | None = None) -> None:
        self._outputs = list(outputs)
        self._samples = list(samples) if samples else [1] * len(self._outputs)

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors, by micro-batch."""
        return self._outputs

    def reduce_mean(self) -> Tensor:
        """Returns the mean over the micro-batches; each counts by its samples if they differ."""
        if len(set(self._samples)) == 1:
            return _floating(torch.stack(self._outputs)).mean(dim=0)
        total = sum(self._samples)
        parts = zip(self._outputs, self._samples, strict=True)
        return torch.stack([_floating(t) * (n / total) for t, n in parts]).sum(dim=0)

    def reduce_sum(self) -> Tensor:
        """Returns the sum over the micro-batches."""
        return torch.stack(self._outputs).sum(dim=0)

    def concat(self) -> Tensor:
        """Returns the tensors joined along dim 0; 0-dim tensors are stacked."""
        return torch.cat(self._outputs) if self._outputs[0].dim() else self.stack()

    def stack(self) -> Tensor:
        """Returns the tensors stacked along a new dim 0."""
        return torch.stack(self._outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self._outputs})"


def _floating(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.float()


def collected(values: Sequence[Any], samples: Sequence[int]) -> Any:
    """Returns the values of the micro-batches in one structure.

    Each tensor in it becomes a `StepOutput`, and any other value a list; None stays None.

    Raises:
        BatchError: the values differ in structure.
    """
    first, spec = tree_flatten(values[0])
    columns = [first]
    for value in values[1:]:
        leaves, other = tree_flatten(value)
        if other != spec:
            raise BatchError(
                f"a step must return the same structure for each micro-batch: {spec}, {other}"
            )
        columns.append(leaves)

    def gathered(column: tuple[Any, ...]) -> Any:
        if all(isinstance(leaf, Tensor) for leaf in column):
            return StepOutput(column, samples)
        return None if all(leaf is None for leaf in column) else list(column)

    return tree_unflatten([gathered(column) for column in zip(*columns, strict=True)], spec)


def shared(values: list[Any], world: World, drawn_from: Sequence[Tensor]) -> list[Any]:
    """Returns the last stage's `values` in all processes of the pipeline; a collective call.

    It also sets their random generators to those of the last stage, if the step has drawn there, so
    that what the script draws next is the same in all of them.

    Args:
        values: by micro-batch; ignored in a process without the last stage.
        world: the processes.
        drawn_from: `random_states` from before the forward.

    Raises:
        UserError: a value cannot be pickled.
    """
    group = world.pipeline_group
    if group is None:
        return values
    last = world.processes_per_replica - 1
    here = world.pipeline_rank == last
    large: list[Tensor] = []

    def described(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.device.type == "cpu" and tensor.nbytes <= _SMALL:
            return tensor.clone() if tensor.untyped_storage().nbytes() > _SMALL else tensor
        large.append(tensor.contiguous())
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    message: list[Any] = [None]
    if here:
        states = random_states(world)
        has_drawn = not all(map(torch.equal, states, drawn_from))
        described_values = tree_map_only(Tensor, described, values)
        message = [_pickled((described_values, states if has_drawn else None))]
    # the group for objects, since reading what is pickled must not wait for a GPU
    dist.broadcast_object_list(message, group=world.pipeline_object_group, group_src=last)

    if isinstance(message[0], str):
        raise UserError(message[0])
    structure, drawn = pickle.loads(message[0])
    if drawn is not None and not here:
        set_random_states(world, drawn)

    def received(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        own = large.pop(0) if here else torch.empty_like(tensor, device=world.devices[0])
        sent = own.to(world.wire_device)
        dist.broadcast(sent.view(torch.uint8) if sent.dim() else sent, group=group, group_src=last)
        return sent.to(world.devices[0])

    found: list[Any] = tree_map_only(Tensor, received, structure)
    return values if here else found


def _pickled(content: Any) -> bytes | str:
    """Returns `content` as bytes, or the text of the error that all processes are to raise."""
    try:
        return pickle.dumps(content)
    except Exception as error:
        return (
            f"the step returns a value that cannot be sent to the other processes of the pipeline "
            f"({error}): return tensors, numbers, texts, and lists and dictionaries of them"
        )
