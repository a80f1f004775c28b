"""Recomputation: what a backward computes again instead of keeping it.

Non-reentrant throughout: a reentrant checkpoint runs a nested backward, which DDP takes for a
second gradient of the same parameter. The random operations of a layer are seeded by its place, so
that there is no generator state to restore; PyTorch restores autocast. What a stage's forwards
change is restored by `layer_state`, and `recomputation_proof` compares the two runs.
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
        snapshot: the state that it began with.
        record: its digests, in a step that compares them.
    """

    snapshot: Snapshot | None = None
    record: Record | None = None


def run_to_recompute(run: Callable[..., Any], copy: bool, *args: Any) -> Any:
    """Returns `run(piece, *args)`, whose activations the backward recomputes.

    Args:
        run: called once more, with the same arguments, in the backward; its first run fills the
            `Piece` for the second.
        copy: give `run` copies of the arguments: it may work in place, and they must be the same
            the second time.
        *args: a pytree of tensors and other values.

    Raises:
        UserError: `run` has changed an argument in place, of which it got no copy.
    """
    first = True
    given = [] if copy else [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    versions = _versions(given)
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
                # PyTorch 2.11's checkpoint must be left without an exception: else the hooks that
                # it has put into this thread stay as long as the exception, and are then removed
                # from the thread that drops it
                failure = error
                return None
        try:
            with as_recomputation(), allowing_torch_func():
                return run(piece, *args)
        except RuntimeError as error:
            # What ends a recomputation once all is there, raised inside TorchScript, comes out as
            # another error. If it was a real one, checkpoint finds that tensors are missing.
            if "TorchScript interpreter" not in str(error):
                raise
            raise StopRecomputation from error

    result = checkpoint(run_again, *args, use_reentrant=False, preserve_rng_state=False)
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None
    if _versions(given) != versions:
        raise UserError(
            "a layer that is recomputed changes what it is given in place, so that it would be "
            "recomputed from something else: declare it with an attribute inplace = True on the "
            "module that is given it, as nn.ReLU does, or recompute others "
            f"({argument('recompute')})"
        )
    return result


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Returns how often each tensor has been changed in place."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


@contextmanager
def as_recomputation() -> Iterator[None]:
    """Marks what runs inside as a second run of a layer, which counts nothing again."""
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
