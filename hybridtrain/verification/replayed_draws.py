"""Replays the random numbers of a loss's call for a batch in its calls for parts of the batch.

PyTorch's random tensors are recorded and split along the samples (`RecordedDraws`, `SameDraws`).
Draws from Python's and NumPy's generators cannot be intercepted: each call starts from the same
generator state and must draw the same number of values (`HostDraws`).
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybridtrain._base.torch_private import InterceptedDraws
from hybridtrain._base.user_code import state_functions

_DROPOUT = torch.ops.aten.native_dropout.default


class OtherDrawsError(Exception):
    """The random numbers for a part differ from the recorded numbers of its samples."""


class RecordedDraws(InterceptedDraws):
    """Records the random numbers that are drawn in its context.

    Attributes:
        drawn: the results of the random operations, in order.
    """

    for_other_threads = False

    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of `operation` and records it."""
        result = operation(*args, **kwargs)
        # Of a dropout, the mask: the result depends on the input.
        numbers = result[1] if operation is _DROPOUT else result
        self.drawn.append(tree_map_only(Tensor, lambda t: t.detach().clone(), numbers))
        return result


class SameDraws(InterceptedDraws):
    """Replays, for a part of the samples, the random numbers recorded for these samples.

    A tensor with all samples in dim 0 is split; any other tensor is the same for each part.

    Args:
        drawn: `RecordedDraws.drawn` of the call for all samples.
        start: the index of the first sample of the part.
        size: the number of samples in the part.
        samples: the number of all samples.
    """

    for_other_threads = False

    def __init__(self, drawn: Sequence[Any], start: int, size: int, samples: int) -> None:
        self._drawn = iter(drawn)
        self._start, self._size, self._samples = start, size, samples

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the recorded numbers for these samples instead of the result of `operation`.

        Raises:
            OtherDrawsError: nothing was recorded, or the result depends on more than the shapes.
        """
        numbers = next(self._drawn, None)
        if operation is _DROPOUT:  # its result depends on the input
            if not args[2]:
                return operation(*args, **kwargs)  # off
            mask = self._cut(numbers, args[0])
            keeps = 1 - args[1]
            return args[0] * mask / keeps if keeps else args[0] * 0, mask
        if operation.overloadpacket.__name__.endswith("_"):  # in place
            return args[0].copy_(self._cut(numbers, args[0]))
        result = operation(*args, **kwargs)  # for its shape
        if isinstance(result, Tensor) and result.requires_grad:  # it depends on the input
            raise OtherDrawsError
        return self._cut(numbers, result)

    def _cut(self, numbers: Any, like: Any) -> Tensor:
        if not isinstance(numbers, Tensor) or not isinstance(like, Tensor):
            raise OtherDrawsError
        part: Tensor = numbers
        if part.shape != like.shape and part.dim() and part.shape[0] == self._samples:
            part = part[self._start : self._start + self._size]
        if part.shape != like.shape:
            raise OtherDrawsError
        # The loss may work in place, and the numbers are needed for the next part.
        return part.clone()


class HostDraws:
    """Makes each call of a loss draw the same numbers from Python's and NumPy's generators.

    Args:
        held: objects that the copy of the loss references; generators among them are included.
    """

    def __init__(self, held: Iterable[Any]) -> None:
        functions = map(state_functions, [random, np.random, *held])
        self._generators = [pair for pair in functions if pair is not None]
        self._after: bytes | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Restores the generators after the call in the block.

        Raises:
            OtherDrawsError: the call has drawn more or fewer numbers than the call before.
        """
        states_before = [read() for read, _ in self._generators]
        try:
            yield
            states_after = pickle.dumps([read() for read, _ in self._generators])
        finally:
            for (_, write), state in zip(self._generators, states_before, strict=True):
                write(state)
        # Compared by the state after: equal states mean equally many draws, since all calls start
        # from the same one.
        if self._after not in (None, states_after):
            raise OtherDrawsError
        self._after = states_after
