"""Keeps the copies of a pipelined model equal, where the processes of a launcher train one each.

As DistributedDataParallel does: rank 0's values at the start, its buffers before each step, and
the mean of the gradients at the end of each backward outside of `no_sync()`. The processes use the
default group, which the trainer or the script has created.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtrain.errors import ConfigError
from hybridtrain.launch import Launch

# Gradients are averaged in pieces, which bounds the memory for them.
_PIECE_BYTES = 2**26


def processes_of(launched: int) -> int:
    """Returns the number of processes that train: of the default group, or of the launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return launched


class Replicas:
    """The copies of a model in the processes of the default group.

    Args:
        net: this process's copy.
        launch: the launcher's facts about this process.

    Attributes:
        averages: whether the end of a backward averages the gradients; see `no_sync`.
    """

    def __init__(self, net: nn.Module, launch: Launch) -> None:
        self._net = net
        self._launch = launch
        self.averages = True

    @property
    def rank(self) -> int:
        """The index of this process's copy."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
        return self._launch.rank

    @property
    def _are_several(self) -> bool:
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size() > 1
        if self._launch.size > 1:
            raise ConfigError(
                f"the launcher has started {self._launch.size} processes, but they have no process "
                "group, so gradients could not be averaged: create the trainer (or an Accelerator, "
                "or Fabric) before the first step, or call torch.distributed.init_process_group()"
            )
        return False

    def begin(self) -> None:
        """Copies rank 0's parameters and buffers to all processes; a collective call."""
        if self._are_several:
            _broadcast([*self._net.parameters(), *self._net.buffers()])

    def begin_step(self) -> Callable[[], None] | None:
        """Copies rank 0's buffers to all processes, where a backward averages gradients.

        Returns:
            what the end of the backward must call; None with one process.

        Raises:
            ConfigError: a hook waits for the whole gradient of a parameter.
        """
        if not self._are_several:
            return None
        for name, parameter in self._net.named_parameters():
            if parameter._post_accumulate_grad_hooks:
                raise ConfigError(
                    f"{name} has a hook that runs when its gradient is complete "
                    "(register_post_accumulate_grad_hook), and would get the gradient of one "
                    "process: use an optimizer that steps after the backward (not a layerwise one)"
                )
        if self.averages:
            _broadcast(list(self._net.buffers()))
        return self.finish_step

    @torch.no_grad()
    def finish_step(self) -> None:
        """Averages the gradients over the processes, unless in `no_sync`; a collective call."""
        if not (self.averages and self._are_several):
            return
        size = dist.get_world_size()
        trained = [p for p in self._net.parameters() if p.requires_grad]
        for piece in _pieces(trained):
            # a parameter that this process's batch has not used may have a gradient elsewhere
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in piece]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(size)
            dist.all_reduce(flat)
            means = flat.split([gradient.numel() for gradient in gradients])
            for parameter, mean in zip(piece, means, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(mean.view_as(parameter))
                elif mean.any():
                    parameter.grad = mean.view_as(parameter).clone()


@torch.no_grad()
def _broadcast(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        values = tensor.detach().contiguous()
        dist.broadcast(values, 0)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)


def _pieces(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Returns the parameters in pieces of one device and dtype, which the gradients share."""
    pieces: dict[object, list[list[nn.Parameter]]] = {}
    sizes: dict[object, int] = {}
    for parameter in parameters:
        kind = parameter.device, parameter.dtype
        size = parameter.numel() * parameter.element_size()
        if kind not in pieces or sizes[kind] + size > _PIECE_BYTES:
            pieces.setdefault(kind, []).append([])
            sizes[kind] = 0
        pieces[kind][-1].append(parameter)
        sizes[kind] += size
    return [piece for of_kind in pieces.values() for piece in of_kind]
