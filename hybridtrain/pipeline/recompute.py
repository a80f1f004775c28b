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


def run_to_recompute(run: Callable[[Piece], Any], inputs: Any, device: torch.device) -> Any:
    """Returns `run(piece)`; the backward recomputes its activations.

    Args:
        run: called once more in the backward; its first run fills the `Piece` for the second. It
            holds its inputs itself: a checkpoint would keep them on their device.
        inputs: a pytree with the tensors that it starts from.
        device: their device.

    Raises:
        UserError: `run` has changed an input in place.
    """
    first = True
    originals = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    versions = _versions(originals)
    piece = Piece()
    failure: BaseException | None = None

    def run_again(_: Tensor) -> Any:
        nonlocal first, failure
        if first:
            first = False
            try:
                with allowing_torch_func():
                    return run(piece)
            except BaseException as error:
                # PyTorch 2.11's checkpoint must exit without an exception. Otherwise the hooks that
                # it has put into this thread stay as long as the exception, and are then removed
                # from the thread that drops the exception
                failure = error
                return None
        try:
            with as_recomputation(), allowing_torch_func():
                return run(piece)
        except RuntimeError as error:
            # The exception that ends a complete recomputation changes its type if raised inside
            # TorchScript. After a real error, checkpoint reports missing tensors.
            if "TorchScript interpreter" not in str(error):
                raise
            raise StopRecomputation from error

    # the argument tells the checkpoint which device's autocast to restore
    of_device = torch.empty(0, device=device)
    result = checkpoint(run_again, of_device, use_reentrant=False, preserve_rng_state=False)
    if failure is not None:
        try:
            # In the frame of the caller, with its traceback; the reference to it is dropped,
            # because it holds this frame.
            raise failure
        finally:
            failure = None
    # Right after the forward: the backward could only see that the inputs differ now, not who has
    # changed them.
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
    # Inference tensors have no version; PyTorch raises.
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


@contextmanager
def as_recomputation() -> Iterator[None]:
    """Marks the block as the second run of a layer, which must not update counters again."""
    # Restored, not reset: a recomputation may contain another one.
    before = _state.recomputing
    _state.recomputing = True
    try:
        yield
    finally:
        _state.recomputing = before


# By thread: other stages' threads run first forwards at the same time.
class _State(threading.local):
    recomputing = False


_state = _State()


def is_recomputing() -> bool:
    """Returns whether this thread runs a layer for the second time, in a backward."""
    return _state.recomputing
