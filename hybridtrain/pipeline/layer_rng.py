"""Random operations whose draws are independent of the split.

Every random operation draws from a generator seeded by (seed, step, unit, micro-batch, replica, its
number in the unit), so that the same run draws the same dropout masks with 1, 2 or 4 stages. A unit
is a layer, or several layers that were one before a finer cut: they continue each other's count of
operations. The default generator cannot give that: the process has one, and the stages' threads
would use it in any order.

Below autograd and autocast every random operation passes through a `TorchDispatchMode`, whatever
module asked for it (`nn.Dropout`, attention's dropout, a plain `torch.rand`). The mode costs some
microseconds per operation, so only layers that were seen to draw run in it: all layers in the first
step after `train()`, from then on those that drew in that step.

A kernel outside PyTorch's operations, such as the dropout of flash-attn or apex, draws from
the default generator of its GPU unseen. So that generator is seeded by place as well, for as long
as a layer runs in the mode, where no other stage's thread uses it.

torch.compile does not work inside such a mode. Compiled layers are therefore looked at apart from
their step, in a run of the plain layer whose result is dropped (`layer_runner`); those that draw
run plainly from then on.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridtrain._torch_private import TorchDispatchMode


class LayerRNG:
    """Seeds the random operations of every layer and remembers which layers have some.

    Attributes:
        step: the number of training passes so far; a resumed run sets it.
        active: whether the model trains; nothing is seeded in evaluation.
        looks_apart: see there.
        own_generator: see there.

    Args:
        seed: of the run.
        replica: the number of this replica, which draws other numbers than the others.
        units: for each layer its unit, and its number among the unit's pieces.
        every_layer: seed every layer in every step: a layer that is recomputed must draw the same
            numbers twice, also in the first step in which it draws.
        looks_apart: the layers are compiled, and looked at as `needs_look` says, not in a step.
        own_generator: returns the default generator of the device of this thread, if no other
            thread draws from it.
    """

    def __init__(
        self,
        seed: int,
        replica: int,
        units: Sequence[tuple[int, int]],
        every_layer: bool = False,
        looks_apart: bool = False,
        own_generator: Callable[[], torch.Generator | None] | None = None,
    ) -> None:
        self.own_generator = own_generator or no_generator
        self.step = 0
        self.active = True
        self._seed = seed
        self._replica = replica
        self._units = units
        self._every_layer = every_layer and not looks_apart
        self.looks_apart = looks_apart
        self._detecting = not looks_apart
        self._unseen = set(range(len(units))) if looks_apart else set[int]()
        self._drawing: set[int] = set()
        self._counts: dict[tuple[int, int, int], int] = {}  # of (unit, piece, micro-batch)

    def redetect(self) -> None:
        """Looks at all layers in the next step: the set of random layers may have changed."""
        if self.looks_apart:
            self._unseen.update(range(len(self._units)))
        else:
            self._detecting = True

    def look_again(self, layer: int) -> None:
        """Looks at the compiled `layer` before its next run in training."""
        self._unseen.add(layer)

    def end_step(self, unseeded_draws: bool) -> None:
        """Moves to the next step; the layers seen to draw so far are those seeded from now on.

        `unseeded_draws`, a default generator that has moved, leads to another look at all layers: a
        layer may begin to draw later (a dropout rate that rises). Its draws in that one step are
        not seeded by place; those in the next are.
        """
        self.step += 1
        # In evaluation mode no layer was looked at. Compiled layers are not looked at again for a
        # default generator, which a thread that loads data may move in every step.
        if self.active and not self.looks_apart:
            self._detecting = unseeded_draws

    def draws(self, layer: int) -> bool:
        """Returns whether `layer` was seen to draw."""
        return layer in self._drawing

    def needs_look(self, layer: int) -> bool:
        """Returns whether the plain `layer` must run once inside `seeded`, before its step."""
        return self.active and layer in self._unseen

    def looked_at(self, layer: int) -> None:
        """Notes that `layer` has run as `needs_look` asked for."""
        self._unseen.discard(layer)

    def needs_seeding(self, layer: int) -> bool:
        """Returns whether `layer` must run inside `seeded`."""
        return self.active and (self._every_layer or self._detecting or layer in self._drawing)

    def seeded(self, layer: int, microbatch: int) -> _SeededDraws:
        """Returns a context in which the random operations of `layer` are seeded by place."""
        unit, piece = self._units[layer]
        key = struct.pack("<5q", self._seed, self.step, unit, microbatch, self._replica)
        # the pieces before this one have run on this micro-batch already
        self._counts[unit, piece, microbatch] = 0
        before = sum(self._counts.get((unit, earlier, microbatch), 0) for earlier in range(piece))
        return _SeededDraws(self, key, before, layer, (unit, piece, microbatch))

    def draws_before(self, layer: int, microbatch: int) -> tuple[int, ...]:
        """Returns how often each earlier piece of the unit of `layer` has drawn in this step."""
        if not self.active or layer >= len(self._units):
            return ()
        unit, piece = self._units[layer]
        return tuple(self._counts.get((unit, one, microbatch), 0) for one in range(piece))

    def continue_draws(self, layer: int, microbatch: int, counts: Sequence[int]) -> None:
        """Takes over the result of `draws_before` of another process, which has those pieces."""
        unit = self._units[layer][0]
        for piece, count in enumerate(counts):
            self._counts[unit, piece, microbatch] = count

    def note_draw(self, layer: int, place: tuple[int, int, int], operations: int) -> None:
        """Notes that `layer` has run so many random operations."""
        self._drawing.add(layer)
        self._counts[place] = operations


_CPU_GENERATOR = torch.default_generator

# Serialises the use of the process's default generators, by operations that take no other.
_default_generator_lock = threading.Lock()

# For each operation: None if it is not random, else whether it takes a generator.
_takes_generator: dict[Any, bool | None] = {}


class _SeededDraws(TorchDispatchMode):
    def __init__(
        self, rng: LayerRNG, key: bytes, before: int, layer: int, place: tuple[int, int, int]
    ) -> None:
        super().__init__()
        self._rng = rng
        self._key = key
        self._before = before
        self._layer = layer
        self._place = place
        self._operations = 0
        self._own = rng.own_generator()
        self._generators: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> Any:
        if self._own is not None:
            self._found = self._own.get_state()
            # -1: no operation has it; each piece of a unit draws other numbers
            key = self._key + struct.pack("<2q", -1, self._place[1])
            self._own.manual_seed(_seed_of(key))
            self._given = self._own.get_state()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._own is not None:
            if not torch.equal(self._own.get_state(), self._given):
                self._rng.note_draw(self._layer, self._place, self._operations)
            self._own.set_state(self._found)

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
        on_cpu = device.type == "cpu"
        default = _CPU_GENERATOR if on_cpu else torch.cuda.default_generators[device.index]
        with _default_generator_lock:
            before = default.get_state()
            default.set_state(generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                default.set_state(before)

    def _next_generator(self, device: torch.device) -> torch.Generator:
        number = struct.pack("<q", self._before + self._operations)
        self._operations += 1
        self._rng.note_draw(self._layer, self._place, self._operations)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(_seed_of(self._key + number))


def _seed_of(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def no_generator() -> None:
    """Returns None: other threads draw from the default generator of the device."""


def current_gpus_generator() -> torch.Generator | None:
    """Returns the default generator of this thread's current GPU; None where CUDA is not used."""
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]


DefaultStates = tuple[bytes, list[int]]


def default_generator_states(gpus: Sequence[int]) -> DefaultStates:
    """Returns the state of the default generators of the CPU and of `gpus`.

    Costs microseconds and waits for no GPU, whose generator counts on the host.
    """
    return (
        _CPU_GENERATOR.get_state().numpy().tobytes(),
        [torch.cuda.default_generators[gpu].get_offset() for gpu in gpus],
    )


def _inspect(func: Any) -> bool | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    return any(argument.name == "generator" for argument in func._schema.arguments)


# Attention is tagged as random, though it is with a `dropout_p` above 0 only.
_dropout_place: dict[Any, int | None] = {}


def _is_off(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Returns whether this call of `func` draws nothing: its dropout is 0."""
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
