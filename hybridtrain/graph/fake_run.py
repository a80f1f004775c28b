"""Runs a forward on tensors without data, and notes the operators that it calls.

Two such runs that differ show that the forward depends on something that changes by itself. They
take a hundredth of the time of a `torch.export`, which would have to run twice instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map, tree_map_only

from hybridtrain._torch_private import FakeTensorMode, TorchDispatchMode
from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.traced_graph import current_user_line


class FakeForward:
    """A module, and arguments for it, with tensors that have no data: the real ones stay unchanged.

    A buffer that is changed in place, as a batch norm's, would be changed by a run on no data too.
    """

    def __init__(self, module: nn.Module, signature: CallSignature, values: list[Any]) -> None:
        self._module = module
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._args, self._kwargs = signature.split(self._faked(values))
        self._state: dict[str, Tensor] = {}
        fakes: dict[int, Any] = {}
        named = (module.named_parameters, module.named_buffers)
        for name, tensor in (pair for each in named for pair in each(remove_duplicate=False)):
            if id(tensor) not in fakes:  # tied ones stay so
                fakes[id(tensor)] = self._faked(tensor)
            self._state[name] = fakes[id(tensor)]

    def run(self, with_lines: bool = False) -> FakeRun:
        """Runs the forward, which changes the module only where its own code does so."""
        run = FakeRun({id(tensor): name for name, tensor in self._state.items()}, with_lines)
        # a forward that reads the data of a tensor is one that torch.export cannot follow either
        with torch.random.fork_rng([]), torch.no_grad(), self._mode, run:
            functional_call(self._module, self._state, self._args, self._kwargs)
        return run

    def _faked(self, values: Any) -> Any:
        return tree_map_only(Tensor, self._mode.from_tensor, values)


class FakeRun(TorchDispatchMode):
    """The operators that one forward calls, each with its arguments.

    Attributes:
        calls: a text for each call, of the operator, the shapes of tensors, the names of parameters
            and buffers, and the other arguments.
        lines: the user's line of each, if asked for.
    """

    def __init__(self, names: Mapping[int, str], with_lines: bool) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.lines: list[str] = []
        self._names = names
        self._with_lines = with_lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the call."""
        kwargs = kwargs or {}
        self.calls.append(f"{func} {tree_map(self._noted, (args, kwargs))!r}")
        if self._with_lines:
            self.lines.append(current_user_line())
        return func(*args, **kwargs)

    def _noted(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        return tuple(argument.shape), argument.dtype, self._names.get(id(argument))


def first_change(one: FakeRun, other: FakeRun) -> int | None:
    """Returns the number of the first call in which two runs differ; None if they are equal."""
    for number, (ours, theirs) in enumerate(zip_longest(one.calls, other.calls)):
        if ours != theirs:
            return number
    return None
