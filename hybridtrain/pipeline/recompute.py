"""Recomputation of activations in the backward, instead of storing them.

All checkpoints are non-reentrant: a reentrant checkpoint runs a nested backward, which DDP takes
for a second gradient of the same parameter. A layer's random operations are seeded by its place, so
there is no generator state to restore; PyTorch restores autocast. `layer_state` restores the state
that a stage's forwards change, and `recomputation_proof` compares the two runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hybridtrain._base.microbatch import map_tensors
from hybridtrain._base.torch_private import StopRecomputation, allowing_torch_func
from hybridtrain.errors import UserError, argument
from hybridtrain.pipeline.layer_state import Snapshot
from hybridtrain.pipeline.recomputation_proof import Record


@dataclass
class Piece:
    """One forward that will be recomputed.

    Attributes:
        snapshot: the state before the forward.
        record: its digests, in a step that compares them.
    """

    snapshot: Snapshot | None = None
    record: Record | None = None


def run_to_recompute(run: Callable[..., Any], copy: bool, *args: Any) -> Any:
    """Returns `run(piece, *args)`; the backward recomputes its activations.

    Args:
        run: called once more, with the same arguments, in the backward; its first run fills the
            `Piece` for the second.
        copy: pass copies of the arguments to `run`, which may work in place; the second run needs
            the original values.
        *args: a pytree of tensors and other values.

    Raises:
        UserError: `run` has changed an argument in place without `copy`.
    """
    first = True
    originals = [] if copy else [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    versions = _versions(originals)
    piece = Piece()
    failure: BaseException | None = None

    def run_again(*args: Any) -> Any:
        nonlocal first, failure
        if copy:
            args = map_tensors(torch.clone, args)
        if first:
            first = False
            try:
                with allowing_torch_func():
                    return run(piece, *args)
            except BaseException as error:
                # PyTorch 2.11's checkpoint must exit without an exception. Otherwise the hooks that
                # it has put into this thread stay as long as the exception, and are then removed
                # from the thread that drops the exception
                failure = error
                return None
        try:
            with as_recomputation(), allowing_torch_func():
                return run(piece, *args)
        except RuntimeError as error:
            # The exception that ends a complete recomputation changes its type if raised inside
            # TorchScript. After a real error, checkpoint reports missing tensors.
            if "TorchScript interpreter" not in str(error):
                raise
            raise StopRecomputation from error

    result = checkpoint(run_again, *args, use_reentrant=False, preserve_rng_state=False)
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None
    if _versions(originals) != versions:
        raise UserError(
            "a recomputed layer changes its input in place, so its recomputation would start from "
            "different values: declare it with an attribute inplace = True on the module that gets "
            "this input, as nn.ReLU does, or recompute other layers "
            f"({argument('recompute')})"
        )
    return result


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the version counter of each tensor."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


@contextmanager
def as_recomputation() -> Iterator[None]:
    """Marks the block as the second run of a layer, which must not update counters again."""
    before = _state.recomputing
    _state.recomputing = True
    try:
        yield
    finally:
        _state.recomputing = before


class _State(threading.local):
    recomputing = False


_state = _State()


def is_recomputing() -> bool:
    """Returns whether this thread runs a layer for the second time, in a backward."""
    return _state.recomputing
