"""A rehearsal: one forward on fake tensors, which tells each process what will cross its borders.

With stages in several processes, each process runs the model's forward for each micro-batch, but
only the layers of its own stages. It must know in advance what the others need of it, and what the
layers of the others return:

    forward        | input | layer 0 | code | layer 1 | code | layer 2 | loss |
    stage                       0                 1              2
    numbers                   1          2      3        4       5
    borders                            [2]              [2, 4]

All processes see the same layers and the same operations between layers, in the same order: that
numbers the values. A value that a later stage uses crosses each border on its way. All processes
rehearse each kind of micro-batch alone, and come to the same result.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hybridtrain._base.tensors import version_of
from hybridtrain._base.torch_private import FakeTensor, FakeTensorMode
from hybridtrain._base.values import same_constant
from hybridtrain.pipeline.forward.glue import PLAIN

Number = tuple[int, int] | str
"""What a value is called in all processes.

The event that made it and its place among the results, or for a parameter or buffer its name. Calls
of layers and operations between layers are events.
"""


class Crossing(NamedTuple):
    """A value that crosses a border.

    Attributes:
        number: the number of the value.
        requires_grad: whether its gradient crosses back.
    """

    number: Number
    requires_grad: bool


class ValueFormat(NamedTuple):
    """What a tensor is without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> ValueFormat:
        """Returns the format of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


@dataclass(frozen=True)
class InputElsewhere:
    """A floating-point input of the forward, which only the first process has."""

    form: ValueFormat


class LayerOutput:
    """What a layer has returned in a rehearsal, for processes that do not run it.

    Args:
        output: any pytree.
        arguments: the arguments of the layer; the output may contain tensors of them.
        draws: the places of the draws after it.

    Attributes:
        draws: see the arguments.
        formats: the formats of the tensors that it has made.
    """

    def __init__(self, output: Any, arguments: Any, draws: Any) -> None:
        self.draws = draws
        leaves, self._spec = tree_flatten(output)
        given = {id(leaf): place for place, leaf in enumerate(tree_flatten(arguments)[0])}
        made: dict[int, int] = {}
        self._made: dict[FakeTensorMode, list[Tensor | None]] = {}
        self.formats: list[ValueFormat] = []
        self._leaves: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._leaves.append(leaf)
            elif id(leaf) in given:
                self._leaves.append(_Given(given[id(leaf)]))
            else:
                if id(leaf) not in made:
                    made[id(leaf)] = len(self.formats)
                    self.formats.append(ValueFormat.of(leaf))
                self._leaves.append(_Made(made[id(leaf)]))
        self._is_made = self._spec.is_leaf() and type(self._leaves[0]) is _Made

    def stand_in(self, mode: FakeTensorMode, device: torch.device, arguments: Any) -> Any:
        """Returns an output without values, of the same tensors as for earlier micro-batches.

        Args:
            mode: the mode of the fake tensors, of one thread.
            device: the device that they claim.
            arguments: the arguments of this call.
        """
        return self._with_tensors(
            self._made.setdefault(mode, [None] * len(self.formats)), mode, device, arguments
        )

    def after(self, draws: Any) -> LayerOutput:
        """Returns the output of an equal layer with other draws before it."""
        output = copy.copy(self)
        output.draws, output._made = draws, {}
        return output

    def with_formats(self, formats: Sequence[ValueFormat]) -> LayerOutput:
        """Returns the output of the layer for arguments of other sizes."""
        output = copy.copy(self)
        output.formats, output._made = list(formats), {}
        return output

    def agrees_with(self, output: Any) -> bool:
        """Returns whether an output with values has the structure, shapes, dtypes and plain values
        of this one."""
        if type(output) is Tensor and self._is_made:  # most often
            form = self.formats[0]
            return output.shape == form.shape and output.dtype is form.dtype
        leaves, spec = tree_flatten(output)
        if spec != self._spec:
            return False
        for leaf, mine in zip(leaves, self._leaves, strict=True):
            if type(mine) is _Made:
                form = self.formats[mine.number]
                if not isinstance(leaf, Tensor):
                    return False
                if (leaf.shape, leaf.dtype) != (form.shape, form.dtype):
                    return False
            elif type(mine) in PLAIN and not same_constant(leaf, mine):
                return False
        return True

    def has_structure_of(self, other: LayerOutput) -> bool:
        """Returns whether two outputs differ in the formats of their tensors alone.

        Only if they consist of tensors and plain values.
        """
        mine = [(type(leaf), leaf) for leaf in self._leaves]
        return (
            self._spec == other._spec
            and all(kind in PLAIN or kind in (_Given, _Made) for kind, _ in mine)
            and mine == [(type(leaf), leaf) for leaf in other._leaves]
        )

    def new(self, mode: FakeTensorMode, device: torch.device, arguments: Any) -> Any:
        """Returns an output without values, of new tensors; see `stand_in`."""
        made: list[Tensor | None] = [fake_of(form, mode, device) for form in self.formats]
        return self._with_tensors(made, mode, device, arguments)

    def _with_tensors(
        self,
        made: list[Tensor | None],
        mode: FakeTensorMode,
        device: torch.device,
        arguments: Any,
    ) -> Any:
        leaves: list[Any] = []
        given: list[Any] | None = None
        for leaf in self._leaves:
            if type(leaf) is _Given:
                given = given or tree_leaves(arguments)
                leaf = given[leaf.place]
            elif type(leaf) is _Made:
                tensor = made[leaf.number]
                # New, or code between layers has changed it.
                if tensor is None or version_of(tensor):
                    form = self.formats[leaf.number]
                    tensor = made[leaf.number] = fake_of(form, mode, device)
                leaf = tensor
            leaves.append(leaf)
        # Most layers return a single tensor.
        return leaves[0] if self._spec.is_leaf() else tree_unflatten(leaves, self._spec)


class _Given(NamedTuple):
    """A tensor that the layer was given."""

    place: int


class _Made(NamedTuple):
    """A tensor that the layer has made."""

    number: int


def fake_of(form: ValueFormat, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Returns a fake tensor: not a leaf if it needs a gradient, so that code may change it."""
    # not by an operation in the mode, which takes ten times as long
    with torch.enable_grad(), _no_inference(), torch._C.DisableTorchFunction():
        memory = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
        if form.requires_grad:
            return _NotALeaf.apply(_LEAF, memory, mode, device)  # type: ignore[no-any-return]
        return FakeTensor(mode, memory, device)


def _no_inference() -> AbstractContextManager[object]:
    # An inference tensor has no version, and could not be used in a later step with gradients.
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class _NotALeaf(torch.autograd.Function):
    """Makes a fake tensor that needs a gradient."""

    @staticmethod
    def forward(
        ctx: Any, leaf: Tensor, memory: Tensor, mode: FakeTensorMode, device: torch.device
    ) -> Tensor:
        return FakeTensor(mode, memory, device)


_LEAF = torch.zeros((), requires_grad=True)


@dataclass
class Rehearsal:
    """What a kind of micro-batch does.

    Attributes:
        outputs: what each call of a layer returns, in the order of the calls.
        borders: what crosses the border after each stage; nothing after the last.
        events: the number of events before each stage begins.
        draws: the places of the draws where each stage begins, see `_ForwardDraws.counts`.
        strides: those of values that cross and are not contiguous: sums over them depend on it.
    """

    outputs: list[LayerOutput] = field(default_factory=list)
    borders: list[list[Crossing]] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    draws: list[Any] = field(default_factory=list)
    strides: dict[Number, tuple[int, ...]] = field(default_factory=dict)
    _inputs: dict[Any, Tensor] = field(default_factory=dict)

    def input(self, number: Number, form: ValueFormat, mode: FakeTensorMode, device: Any) -> Tensor:
        """Returns an input without values, the same one as for earlier micro-batches."""
        tensor = self._inputs.get((mode, number))
        if tensor is None or version_of(tensor):
            tensor = self._inputs[mode, number] = fake_of(form, mode, device)
        return tensor

    @cached_property
    def digest(self) -> str:
        """A text that is equal in all processes if they will take the same path."""
        formats = [output.formats for output in self.outputs]
        return repr((self.borders, self.events, formats))

    @cached_property
    def wanted(self) -> list[frozenset[Number]]:
        """The numbers of what crosses the border after each stage."""
        return [frozenset(crossing.number for crossing in border) for border in self.borders]


class Uses:
    """Collects which value each stage uses, and so what crosses the borders.

    Args:
        stages: the number of stages.
    """

    def __init__(self, stages: int) -> None:
        # of each stage: the values of earlier stages that it has, in the order of their first use
        self._used: list[dict[Number, bool]] = [{} for _ in range(stages)]
        self._homes: dict[Number, int] = {}

    def add(self, number: Number, home: int, stage: int, requires_grad: bool) -> None:
        """Notes that a stage uses a value of an earlier stage, its home."""
        self._homes[number] = home
        self._used[stage][number] = self._used[stage].get(number, False) or requires_grad

    def borders(self) -> list[list[Crossing]]:
        """Returns what crosses the border after each stage."""
        borders: list[list[Crossing]] = []
        coming: Mapping[Number, bool] = {}
        for stage in reversed(range(len(self._used))):
            borders.append([Crossing(*crossing) for crossing in coming.items()])
            passing = {n: grad for n, grad in coming.items() if self._homes[n] < stage}
            coming = {
                number: passing.get(number, False) or self._used[stage].get(number, False)
                for number in {**self._used[stage], **passing}
            }
        assert not coming, "the first stage uses a value of an earlier one"
        return borders[::-1]
