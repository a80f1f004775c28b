"""Random draws that do not know the split.

Every random operation draws from a generator seeded by (seed, step, unit, micro-batch, replica, its
number in the unit), so that the same run draws the same dropout masks with 1, 2 or 4 stages. A unit
is a layer, or several layers that were one before a finer cut: they count their operations on from
one another. The default generator cannot give that: it is one for the whole process, and the
threads of the stages would take turns at it in any order.

Below autograd and autocast every random operation passes a `TorchDispatchMode`, whatever the
module that asked for it (`nn.Dropout`, attention's own dropout, a plain `torch.rand`). The mode
costs some microseconds an operation, so it is put only around the layers that were seen to draw:
all layers in the first step after `train()`, from then on those that drew in it.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LayerRNG:
    """Seeds the draws of every layer and remembers which layers draw.

    TraceGuards:
        step: how many training passes there were; a resumed run sets it.
        active: whether the model trains; in evaluation nothing is seeded.
        guard_all: guard every layer at every step: a layer that is recomputed must draw the same
            twice, also in the step in which it begins to draw.
    """

    def __init__(self, seed: int, replica: int) -> None:
        self.step = 0
        self.active = True
        self.guard_all = False
        self._seed = seed
        self._replica = replica
        self._units: Sequence[tuple[int, int]] = ()
        self._watching = True
        self._drawing: set[int] = set()
        self._counts: dict[tuple[int, int, int], int] = {}  # of (unit, piece, micro-batch)

    def set_units(self, units: Sequence[tuple[int, int]]) -> None:
        """Says for each layer which unit it belongs to, and its number among the unit's pieces.

        Without, each layer is a unit.
        """
        self._units = units

    def redetect(self) -> None:
        """Looks at all layers once more in the next step: a layer may have changed its mind."""
        self._watching = True

    def next_step(self) -> None:
        """Moves to the next training step; what was seen so far is what will be guarded."""
        self.step += 1
        if self.active:  # in evaluation mode nothing was seen
            self._watching = False

    def end_step(self, drew: bool) -> None:
        """`next_step`, and a look at all layers in it if something `drew` unseen.

        That is, if a default generator has moved: a layer may begin to draw later (a dropout rate
        that rises). Its draws of that one step are not seeded by its place; those of the next are.
        """
        self.next_step()
        if self.active and drew:
            self.redetect()

    def guards(self, layer: int) -> bool:
        """Whether `layer` must run inside `guard`."""
        return self.active and (self.guard_all or self._watching or layer in self._drawing)

    def guard(self, layer: int, microbatch: int) -> _SeededDraws:
        """A context in which the draws of `layer` are seeded for this step and micro-batch."""
        unit, piece = self._units[layer] if self._units else (layer, 0)
        key = struct.pack("<5q", self._seed, self.step, unit, microbatch, self._replica)
        # the pieces before this one have run by now: on this micro-batch they come first
        self._counts[unit, piece, microbatch] = 0
        before = sum(self._counts.get((unit, earlier, microbatch), 0) for earlier in range(piece))
        return _SeededDraws(self, key, before, layer, (unit, piece, microbatch))

    def drew(self, layer: int, place: tuple[int, int, int], operations: int) -> None:
        """Notes that `layer` has drawn with so many operations."""
        self._drawing.add(layer)
        self._counts[place] = operations


# Serialises the use of the process's default generators by operations that take no other.
_default_generator = threading.Lock()

# For each operation: None if it does not draw, else whether it takes a generator.
_takes_generator: dict[Any, bool | None] = {}


class _SeededDraws(TorchDispatchMode):
    def __init__(
        self, draws: LayerRNG, key: bytes, before: int, layer: int, place: tuple[int, int, int]
    ) -> None:
        super().__init__()
        self._draws = draws
        self._key = key
        self._before = before
        self._layer = layer
        self._place = place
        self._operations = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            takes = _takes_generator[func]
        except KeyError:
            takes = _takes_generator[func] = _inspect(func)
        if takes is None or kwargs.get("generator") is not None or _is_off(func, args, kwargs):
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        generator = self._next_generator(device)
        if takes:
            kwargs["generator"] = generator
            return func(*args, **kwargs)
        default = _default_generator_of(device)
        with _default_generator:
            before = default.get_state()
            default.set_state(generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                default.set_state(before)

    def _next_generator(self, device: torch.device) -> torch.Generator:
        number = struct.pack("<q", self._before + self._operations)
        self._operations += 1
        self._draws.drew(self._layer, self._place, self._operations)
        digest = hashlib.blake2b(self._key + number, digest_size=8).digest()
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(int.from_bytes(digest, "little") >> 1)


DefaultStates = tuple[bytes, list[int]]


def default_generator_states(gpus: Sequence[int]) -> DefaultStates:
    """Where the default generators of the CPU and of `gpus` are.

    It costs microseconds and no wait for a GPU, whose generator counts on the host.
    """
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        [torch.cuda.default_generators[gpu].get_offset() for gpu in gpus],
    )


def _inspect(func: Any) -> bool | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    return any(argument.name == "generator" for argument in func._schema.arguments)


# Attention is tagged as drawing, though it draws with a `dropout_p` above 0 only.
_dropout_place: dict[Any, int | None] = {}


def _is_off(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether this call of `func` does not draw: its dropout is 0."""
    if func not in _dropout_place:
        names = [argument.name for argument in func._schema.arguments]
        _dropout_place[func] = names.index("dropout_p") if "dropout_p" in names else None
    place = _dropout_place[func]
    if place is None:
        return False
    probability = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(probability == 0.0)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in args:
        if isinstance(value, Tensor):
            return value.device
    device = torch.device(kwargs.get("device") or "cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _default_generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
