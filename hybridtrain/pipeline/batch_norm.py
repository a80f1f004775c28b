"""Running statistics of batch norms, updated once per step instead of per micro-batch.

A batch norm in a pipeline normalises each micro-batch with that micro-batch's statistics, as the
unsplit model does under gradient accumulation, and by default updates its running statistics at
each of them. `DeferredBatchNormStats` collects mean and variance over all micro-batches of a step
and updates once, as if the mini-batch were processed at once (the idea of torchgpipe's
DeferredBatchNorm). It weights micro-batches by their samples, so that short batches are right too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hybridtrain.errors import ConfigError, setting
from hybridtrain.pipeline.recompute import is_recomputing
from hybridtrain.world import World


class DeferredBatchNormStats:
    """Updates the running statistics of the batch norms in `net` once per step."""

    def __init__(self, net: nn.Module) -> None:
        self._norms = [
            BatchNormCollector(module)
            for module in net.modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats
        ]

    def of(self, module: nn.Module) -> list[BatchNormCollector]:
        """Returns collectors for the statistics of the batch norms in `module`."""
        parts = {id(part) for part in module.modules()}
        return [collector for collector in self._norms if id(collector.norm) in parts]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Collects statistics in the block; then updates running statistics unless it failed."""
        for norm in self._norms:
            norm.begin()
        try:
            yield
            for norm in self._norms:
                norm.commit()
        finally:
            for norm in self._norms:
                norm.end()


class BatchNormCollector:
    """The statistics of one batch norm over the micro-batches of a step.

    Attributes:
        norm: the batch norm.
    """

    def __init__(self, norm: _BatchNorm) -> None:
        self.norm = norm
        self._count = 0
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None
        norm.register_forward_pre_hook(self._collect, with_kwargs=True)

    def begin(self) -> None:
        """Starts collecting if the batch norm is in training mode."""
        self.clear()
        self._active = self.norm.training
        if self._active:
            # Then PyTorch's forward normalises by the statistics of the micro-batch and updates
            # nothing.
            self.norm.track_running_stats = False

    def clear(self) -> None:
        """Drops the collected statistics."""
        self._count, self._mean, self._squares = 0, None, None

    def end(self) -> None:
        """Stops collecting."""
        if self._active:
            # Also after a failure: the flag is the user's.
            self.norm.track_running_stats = True
        self._active = False

    def commit(self) -> None:
        """Updates the running statistics with the collected statistics."""
        norm, mean, squares = self.norm, self._mean, self._squares
        if mean is None or squares is None or norm.running_mean is None:
            return
        with torch.no_grad():
            momentum = norm.momentum
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked += 1
                if momentum is None:
                    momentum = 1.0 / float(norm.num_batches_tracked)
            # Unbiased over all samples of the step, as PyTorch's running variance is.
            variance = squares / max(self._count - 1, 1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum or 0.0)
            assert norm.running_var is not None
            norm.running_var.lerp_(variance.to(norm.running_var.dtype), momentum or 0.0)

    _active = False

    def _collect(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A recomputed forward has been counted in its first run.
        if not self._active or is_recomputing():
            return
        with torch.no_grad():
            values = (args[0] if args else kwargs["input"]).detach()
            # Sums over a batch in half precision would lose the smaller deviations.
            values = values.to(torch.promote_types(values.dtype, torch.float32))
            dims = [0, *range(2, values.dim())]
            count = values.numel() // values.shape[1]
            variance, mean = torch.var_mean(values, dims, correction=0)
            if self._mean is None or self._squares is None:
                self._count, self._mean, self._squares = count, mean, variance * count
                return
            # Chan, Golub and LeVeque (1979): two sets of deviations into one
            total = self._count + count
            delta = mean - self._mean
            # Before the mean, whose old value `delta` refers to. In place: no other object has
            # these tensors.
            self._squares += variance * count + delta**2 * (self._count * count / total)
            self._mean += delta * (count / total)
            self._count = total


def with_sync_batch_norm(net: nn.Module, world: World) -> nn.Module:
    """Returns `net` with SyncBatchNorms in place of its batch norms.

    Raises:
        ConfigError: a stage has no GPU of its own.
    """
    if world.data_parallel_size == 1:
        return net
    if world.devices[0].type != "cuda":
        raise ConfigError(f"{setting('sync_batch_norm', True)} requires CUDA devices")
    if len(set(world.devices)) < len(world.devices):
        raise ConfigError(
            f"{setting('sync_batch_norm', True)} needs a GPU for every stage: NCCL collectives "
            "of two stages on one GPU may deadlock"
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    return converted
