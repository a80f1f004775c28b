"""The draws of a loss for some samples, given again to its calls for parts of them.

Draws of PyTorch are cut as the samples are (`RecordedDraws`, `SameDraws`). Draws of Python and
NumPy cannot be seen: each call begins with the same numbers, and must take equally many
(`HostDraws`).
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
    """The draws for a part are not those for its samples."""


class RecordedDraws(InterceptedDraws):
    """Notes the random numbers that are drawn inside of it.

    Attributes:
        drawn: the results of the random operations, in their order.
    """

    for_other_threads = False

    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of `operation`, and notes it."""
        result = operation(*args, **kwargs)
        numbers = result[1] if operation is _DROPOUT else result
        self.drawn.append(tree_map_only(Tensor, lambda t: t.detach().clone(), numbers))
        return result


class SameDraws(InterceptedDraws):
    """Gives the calls for some of the samples the numbers that were drawn for them.

    A tensor with all samples in dim 0 is cut; any other tensor is the same for each part.

    Args:
        drawn: see `RecordedDraws`, for all samples.
        start: the number of the first sample of the part.
        size: the number of samples in the part.
        samples: the number of all samples.
    """

    for_other_threads = False

    def __init__(self, drawn: Sequence[Any], start: int, size: int, samples: int) -> None:
        self._drawn = iter(drawn)
        self._start, self._size, self._samples = start, size, samples

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what was drawn for these samples in place of the result of `operation`.

        Raises:
            OtherDrawsError: nothing was drawn for them, or it depends on more than the shapes.
        """
        numbers = next(self._drawn, None)
        if operation is _DROPOUT:  # its result has the input in it
            if not args[2]:
                return operation(*args, **kwargs)  # off
            mask = self._cut(numbers, args[0])
            keeps = 1 - args[1]
            return args[0] * mask / keeps if keeps else args[0] * 0, mask
        if operation.overloadpacket.__name__.endswith("_"):  # in place
            return args[0].copy_(self._cut(numbers, args[0]))
        result = operation(*args, **kwargs)  # for its shape
        if isinstance(result, Tensor) and result.requires_grad:  # it has the input in it
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
        return part.clone()


class HostDraws:
    """Gives each call of a loss the same numbers of Python and NumPy.

    Args:
        held: objects that a copy of the loss holds, among them perhaps generators.
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
        before = [read() for read, _ in self._generators]
        try:
            yield
            after = pickle.dumps([read() for read, _ in self._generators])
        finally:
            for (_, write), state in zip(self._generators, before, strict=True):
                write(state)
        if self._after not in (None, after):
            raise OtherDrawsError
        self._after = after
