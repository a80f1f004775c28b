"""Activation checkpointing: what a backward computes once more instead of keeping it.

Non-reentrant throughout: a reentrant checkpoint runs a backward of its own inside the backward,
which DDP takes for a second gradient of the same parameter. The draws of a layer are seeded by its
place, so that there is no random state to put back, and autocast is put back by PyTorch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from hybridtrain.errors import ConfigError

CheckpointSpec = str | Sequence[str] | Mapping[str, int]


@dataclass(frozen=True)
class CheckpointPolicy:
    """What is recomputed: whole stages for some micro-batches, or some layers for all of them.

    TraceGuards:
        mode: `never`, `except_last` or `always`: for which micro-batches whole stages are.
        layers: the numbers of the layers that are, one by one.
    """

    mode: str = "never"
    layers: frozenset[int] = frozenset()

    def whole_stage(self, microbatch: int, chunks: int) -> bool:
        """Whether micro-batch `microbatch` of `chunks` is recomputed stage by stage."""
        return self.mode == "always" or (self.mode == "except_last" and microbatch + 1 < chunks)


def checkpoint_policy(spec: CheckpointSpec, names: Sequence[str] | None) -> CheckpointPolicy:
    """Reads `pipeline.checkpoint`.

    Args:
        spec: `never`, `except_last`, `always`; `{every: k}` for every kth layer; or a list of names
            of layers, or of groups of layers (`blocks` for `blocks.0`, ...).
        names: the model's layers; None if they are not known yet, to check the rest.

    Raises:
        ConfigError: it is none of these, or names no layer.
    """
    if isinstance(spec, str):
        if spec not in ("never", "except_last", "always"):
            raise ConfigError(
                f"pipeline.checkpoint={spec} is unknown: use never, except_last, always, "
                f"{{every: k}} or a list of layer names"
            )
        return CheckpointPolicy(spec)
    if isinstance(spec, Mapping):
        every = spec.get("every")
        if set(spec) != {"every"} or type(every) is not int or every < 1:
            raise ConfigError(
                f"pipeline.checkpoint={dict(spec)}: use {{every: k}} with k of 1 or more"
            )
        return CheckpointPolicy(layers=frozenset(range(0, len(names or ()), every)))
    if names is None:
        return CheckpointPolicy()
    chosen: set[int] = set()
    for wanted in spec:
        found = {i for i, name in enumerate(names) if f"{name}.".startswith(f"{wanted}.")}
        if not found:
            raise ConfigError(
                f"pipeline.checkpoint: there is no layer {wanted!r}; the layers are: "
                f"{', '.join(names)}"
            )
        chosen |= found
    return CheckpointPolicy(layers=frozenset(chosen))


def recomputed(run: Callable[..., Any], module: nn.Module, copy: bool, *args: Any) -> Any:
    """`run(*args)`, whose activations are computed once more in the backward.

    Running statistics in `module` move in the first run only. With `copy`, `run` gets copies of
    the arguments: it may work in place, and they must be the same the second time.
    """
    first = True
    failure: BaseException | None = None

    def once_more(*args: Any) -> Any:
        nonlocal first, failure
        if copy:
            args = tree_map_only(Tensor, torch.clone, args)
        if first:
            first = False
            try:
                return run(*args)
            except BaseException as error:
                # PyTorch 2.11's checkpoint must be left the normal way: else the hooks that it has
                # put into this thread stay as long as the exception, and are then taken out of
                # the thread that drops it
                failure = error
                return None
        with frozen_running_stats(module):
            return run(*args)

    result = checkpoint(once_more, *args, use_reentrant=False, preserve_rng_state=False)
    if failure is None:
        return result
    try:
        raise failure
    finally:
        failure = None


class _State(threading.local):
    recomputing = False


_state = _State()


def is_recomputing() -> bool:
    """Whether this thread runs a layer for the second time, in a backward."""
    return _state.recomputing


def works_in_place(module: nn.Module) -> bool:
    """Whether a module in `module` says that it may change its input: `ReLU(inplace=True)`."""
    return any(getattr(part, "inplace", False) for part in module.modules())


@contextmanager
def frozen_running_stats(module: nn.Module) -> Iterator[None]:
    """Keeps the batch norms in `module` from moving their running statistics.

    They move copies instead: a batch norm without any would save fewer tensors for its backward
    than it did in the forward, which the checkpoint takes for an error.
    """
    kept = [
        (part, dict(part._buffers))
        for part in module.modules()
        if (isinstance(part, _NormBase) and part.training and part.track_running_stats)
        or isinstance(part, GraphModule)  # whose own code may move them
    ]
    for norm, buffers in kept:
        norm._buffers.update({k: b if b is None else b.clone() for k, b in buffers.items()})
    _state.recomputing = True
    try:
        yield
    finally:
        _state.recomputing = False
        for norm, buffers in kept:
            norm._buffers.update(buffers)
