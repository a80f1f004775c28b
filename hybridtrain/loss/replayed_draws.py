"""The draws of a loss for some samples, given again to its calls for parts of them.

Draws of PyTorch are cut as the samples are (`RecordedDraws`, `SameDraws`). Draws of Python and
NumPy cannot be seen: each call begins with the same numbers, and must take equally many
(`HostDraws`).
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybridtrain._base.torch_private import InterceptedDraws

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

    A tensor whose dim 0 is that of all samples is cut; another one is the same for each part.

    Args:
        drawn: of `RecordedDraws`, for all samples.
        start: the first sample of the part.
        size: its samples.
        samples: all of them.
    """

    for_other_threads = False

    def __init__(self, drawn: Sequence[Any], start: int, size: int, samples: int) -> None:
        self._drawn = iter(drawn)
        self._start, self._size, self._samples = start, size, samples

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what was drawn for these samples in place of the result of `operation`.

        Raises:
            OtherDrawsError: there is no such, or it depends on more than the shapes.
        """
        numbers = next(self._drawn, None)
        if operation is _DROPOUT:  # its result has the input in it
            if not args[2]:
                return operation(*args, **kwargs)  # off
            mask = self._own(numbers, args[0])
            keeps = 1 - args[1]
            return args[0] * mask / keeps if keeps else args[0] * 0, mask
        if operation.overloadpacket.__name__.endswith("_"):  # in place
            return args[0].copy_(self._own(numbers, args[0]))
        result = operation(*args, **kwargs)  # for its shape
        if isinstance(result, Tensor) and result.requires_grad:  # it has the input in it
            raise OtherDrawsError
        return self._own(numbers, result)

    def _own(self, numbers: Any, like: Any) -> Tensor:
        if not isinstance(numbers, Tensor) or not isinstance(like, Tensor):
            raise OtherDrawsError
        if numbers.shape != like.shape and numbers.dim() and numbers.shape[0] == self._samples:
            numbers = numbers[self._start : self._start + self._size]
        if numbers.shape != like.shape:
            raise OtherDrawsError
        own: Tensor = numbers.clone()
        return own


class HostDraws:
    """Gives each call of a loss the same numbers of Python and NumPy.

    Args:
        held: objects that a copy of the loss holds, among them perhaps generators.
    """

    def __init__(self, held: Iterable[Any]) -> None:
        # each a function that reads the state, and one that sets it
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
            (random.getstate, random.setstate),
            (np.random.get_state, np.random.set_state),
        ]
        for each in held:
            if isinstance(each, random.Random):
                self._generators.append((each.getstate, each.setstate))
            elif isinstance(each, np.random.RandomState):
                self._generators.append((each.get_state, each.set_state))
            elif isinstance(each, np.random.Generator):
                bits = each.bit_generator
                state = partial(getattr, bits, "state"), partial(setattr, bits, "state")
                self._generators.append(state)
        self._after: bytes | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Puts the generators back after a call.

        Raises:
            OtherDrawsError: it has drawn more or fewer numbers than the call before.
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
