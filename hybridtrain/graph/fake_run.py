"""Runs a forward on tensors without data, and notes the operators that it calls.

Two such runs that differ show that the forward depends on something that changes by itself. They
take a hundredth of the time of a `torch.export`, which would have to run twice instead.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from hybridtrain._torch_private import FakeTensor, FakeTensorMode, TorchDispatchMode
from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.traced_graph import current_user_line


class FakeRun(TorchDispatchMode):
    """The operators that one forward calls, each with its arguments.

    Attributes:
        calls: a text for each call, of the operator, the shapes of tensors, and the other
            arguments; parameters and buffers count as themselves.
    """

    def __init__(self, with_lines: bool = False) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.lines: list[str] = []
        self._with_lines = with_lines

    @classmethod
    def of(
        cls,
        module: nn.Module,
        signature: CallSignature,
        values: list[Any],
        with_lines: bool = False,
    ) -> FakeRun:
        """Runs the forward of `module`, which is not changed unless its own code does so."""
        run = cls(with_lines)
        # a forward that reads the data of a tensor is one that torch.export cannot follow either
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.random.fork_rng([]), torch.no_grad(), mode:
            args, kwargs = signature.split(tree_map_only(Tensor, mode.from_tensor, values))
            with run:
                module(*args, **kwargs)
        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the call."""
        kwargs = kwargs or {}
        self.calls.append(f"{func} {tree_map(_noted, (args, kwargs))!r}")
        if self._with_lines:
            self.lines.append(current_user_line())
        return func(*args, **kwargs)


def first_change(one: FakeRun, other: FakeRun) -> int | None:
    """Returns the number of the first call in which two runs differ; None if they are equal."""
    for number, (ours, theirs) in enumerate(zip_longest(one.calls, other.calls)):
        if ours != theirs:
            return number
    return None


def _noted(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    shape = tuple(argument.shape), argument.dtype
    return shape if isinstance(argument, FakeTensor) else (*shape, id(argument))
