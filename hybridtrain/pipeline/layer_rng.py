"""Random operations with draws that are independent of the split.

Every random operation draws from a generator seeded by (seed, step, unit, micro-batch, replica,
index in the unit), so that the same run draws the same dropout masks with 1, 2 or 4 stages. A unit
is a layer, or several layers that a finer cut made from one; they share a count of operations. The
default generator cannot do this: a process has only one, and the stages' threads would use it in
any order.

PyTorch's dispatcher intercepts every random operation while a layer runs, regardless of the calling
module (`nn.Dropout`, attention's dropout, a plain `torch.rand`), and passes all other operations
through. So every training step watches every layer, even layers that have never drawn.

A kernel outside PyTorch's operations, such as the dropout of flash-attn or apex, draws from the
default generator of its GPU, which the dispatcher does not see. So while a layer runs, that
generator is seeded by place too, provided that no other stage's thread uses it.

Compiled code draws different numbers than the uncompiled layer. So a separate run of the uncompiled
layer, before its step, determines whether a compiled layer draws (`forward/layers` discards the
result); layers that draw run uncompiled from then on. If a layer starts to draw without notice, it
draws by place in its compiled code until the end of the step.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

from hybridtrain._base.shares import MicrobatchPlace
from hybridtrain._base.torch_private import InterceptedDraws, find_random_operations, is_traced
from hybridtrain.errors import UserError, argument
from hybridtrain.world import World


class LayerRNG:
    """Seeds the random operations of every layer and records which layers have any.

    Attributes:
        step: the number of training passes so far; a resumed run sets it.
        active: whether the model trains; nothing is seeded in evaluation.
        probes_compiled: see the arguments.
        own_generator: see the arguments.
        refuses_own_seeds: whether a forward that has set the random state itself may not draw.
        seeds_evaluations: whether layers draw by place in evaluations too; for comparisons.
        counts: how often each (unit, micro-batch) has drawn in the last step; filled by the
            processes that run them.

    Args:
        seed: the seed of the run.
        replica: the index of the drawing logical replica, if a step does not specify it.
        probes_compiled: the layers are compiled, and run plainly before a step to see whether they
            draw; see `needs_probe`.
        own_generator: returns the default generator of this thread's device, or None; no function
            if another thread draws from this generator too.
    """

    def __init__(
        self,
        seed: int,
        replica: int,
        probes_compiled: bool = False,
        own_generator: Callable[[], torch.Generator | None] | None = None,
    ) -> None:
        self.own_generator = own_generator
        self.step = 0
        self.active = True
        self.seeds_evaluations = False
        self.refuses_own_seeds = False
        self._seed = seed
        self._replica = replica
        self._places: Sequence[MicrobatchPlace] | None = None
        self._units: Sequence[int] = ()
        self.probes_compiled = probes_compiled
        self._unseen: set[int] = set()
        self._drawing: set[int] = set()
        self._seen: set[int] = set()  # layers that drew in this step
        self.counts: dict[tuple[int, int], int] = {}
        find_random_operations()

    @classmethod
    def of_world(cls, seed: int, world: World, probes_compiled: bool = False) -> LayerRNG:
        """Returns the random numbers of a model in this process."""
        # Two stages on one GPU draw from its one default generator, in any order.
        shared = len(set(world.devices)) < len(world.devices) or world.devices[0].type != "cuda"
        generator = None if shared else current_gpus_generator
        return cls(seed, world.owned_replicas.start, probes_compiled, generator)

    def follow(self, units: Sequence[tuple[int, int]]) -> None:
        """Sets the places of the layers in the forward, once the model is split.

        Args:
            units: for each layer, its unit and its index among the unit's pieces.
        """
        self._units = [unit for unit, _ in units]
        self._unseen = set(range(len(units))) if self.probes_compiled else set()

    def reprobe(self) -> None:
        """Probes all compiled layers in the next step: further layers may draw by then."""
        find_random_operations()
        if self.probes_compiled:
            self._unseen.update(range(len(self._units)))

    def end_step(self) -> None:
        """Moves to the next step."""
        self.step += 1
        self._drawing |= self._seen
        # After the threads of the step have ended, so no lock is needed.
        self._seen.clear()

    def draws(self, layer: int) -> bool:
        """Returns whether `layer` has drawn, before this step or in a probe."""
        return layer in self._drawing

    def needs_probe(self, layer: int) -> bool:
        """Returns whether the plain `layer` must run once with its draws, before its step."""
        return self.active and layer in self._unseen

    def mark_probed(self, layer: int) -> None:
        """Records that `layer` has run as `needs_probe` requested."""
        self._unseen.discard(layer)
        if layer in self._seen:
            self._drawing.add(layer)

    def drawing_in(self, microbatch: int) -> _ForwardDraws | _NotSeeded:
        """Returns a context for a whole forward, which names each layer with `at`.

        It begins in the first stage of this thread.
        """
        return _ForwardDraws(self, microbatch) if self.active else _NOT_SEEDED

    def drawing_in_part(self, microbatch: int, begins_here: bool) -> _ForwardDraws | _NotSeeded:
        """Returns the same for a forward on fake tensors, or of which other processes run parts.

        Args:
            microbatch: the index of the micro-batch.
            begins_here: whether its first stage is one of this process.
        """
        return _DrawsOfParts(self, microbatch, begins_here) if self.active else _NOT_SEEDED

    def rehearsing(self) -> LayerRNG:
        """Returns the same random numbers, for a forward that leaves no trace in these."""
        scratch = copy.copy(self)
        # What `note_draw` writes.
        scratch.counts, scratch._seen = {}, set()
        # Nothing is drawn on fake tensors, and a real device's generator must not be touched.
        scratch.own_generator = None
        return scratch

    def seeded_again(self, microbatch: int, position: DrawPosition | None) -> Any:
        """Returns a context in which a layer repeats the draws that it made from `position` on."""
        if position is None:
            return _NOT_SEEDED
        draws = _ForwardDraws(self, microbatch)
        draws.resume(position)
        return draws

    def seed_of_unit(self, unit: int, microbatch: int, *number: int) -> int:
        """Returns the seed of the random operation with index `number` in a unit."""
        return self._seed_of(self.step, unit, microbatch, *number)

    def _seed_of(self, step: int, unit: int, microbatch: int, *number: int) -> int:
        """Returns the seed of a random operation of a unit, by the place of the micro-batch."""
        replica = self._replica
        if self._places is not None:
            replica, ahead, microbatch = self._places[microbatch]
            step += ahead
        return seed_of(self._seed, step, unit, microbatch, replica, *number)

    def begin_step(self, active: bool, places: Sequence[MicrobatchPlace] | None = None) -> None:
        """Starts a step, in which layers draw by place if `active`; see `Step.places`."""
        self._places = places
        self.active = active or self.seeds_evaluations
        self.counts.clear()

    def seeds_in_order(
        self, counts: Mapping[tuple[int, int], int], microbatch: int, step: int
    ) -> list[int]:
        """Returns the seeds of all draws of a micro-batch of the last step, layer by layer.

        Args:
            counts: the `counts` of all processes of the pipeline after the step.
            microbatch: the index of the micro-batch.
            step: the number of the step.
        """
        return [
            self._seed_of(step, unit, microbatch, number)
            for unit in dict.fromkeys(self._units)
            for number in range(counts.get((unit, microbatch), 0))
        ]

    def note_draw(self, layer: int, unit: int, microbatch: int, operations: int) -> None:
        """Records the number of random operations of a unit, with all layers that it is cut into.

        Args:
            layer: the layer that runs, or has run last.
            unit: the unit.
            microbatch: the index of the micro-batch.
            operations: the number.
        """
        # From the thread of the stage. Each key below belongs to one unit and micro-batch, which
        # one thread runs at a time.
        self._seen.add(layer)
        # a recomputation repeats the first of them
        counted = self.counts.get((unit, microbatch), 0)
        self.counts[unit, microbatch] = max(counted, operations)


_CPU_GENERATOR = torch.default_generator

# Serialises the use of the process's default generators, by operations that take no other.
default_generator_lock = threading.Lock()


def _state_of_default() -> Tensor:
    """Returns the state of the CPU's default generator, between two uses of it by other threads."""
    with default_generator_lock:
        return _CPU_GENERATOR.get_state()


class _NotSeeded:
    """The context of an evaluation: random operations draw as usual."""

    seeds_device = True  # so that the places of layers are not noted
    position = None
    counts = None
    operations = 0

    def at(self, layer: int, unit: int) -> None:
        """See `_ForwardDraws`."""

    def go_on(self, counts: Any) -> None:
        """See `_ForwardDraws`."""

    def skip(self, operations: int) -> None:
        """See `_ForwardDraws`."""

    def at_unit(self, unit: int) -> None:
        """See `_ForwardDraws`."""

    def enter_stage(self) -> None:
        """See `_ForwardDraws`."""

    def leave_stage(self) -> None:
        """See `_ForwardDraws`."""

    def __enter__(self) -> _NotSeeded:
        return self

    def __exit__(self, *error: object) -> None:
        pass


_NOT_SEEDED = _NotSeeded()


class _SeededDraws(InterceptedDraws):
    """A context in which each random operation draws from a generator with a seed of its own."""

    _own: torch.Generator | None = None  # the device's, if no other thread draws from it

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def _next_seed(self) -> int:
        """Returns the seed of the next random operation."""
        raise NotImplementedError

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of `operation`, drawn from a generator seeded by place."""
        # A generator of the caller's own is not this project's to seed.
        if kwargs.get("generator") is not None or is_off(operation, args, kwargs):
            return operation(*args, **kwargs)
        if is_traced(args):  # also by a layer that compiles a part of itself
            return operation(*args, **kwargs)
        device = _device_of(args, kwargs)
        if self._own is not None and device == self._own.device and not _takes_generator(operation):
            return self._draw_from(self._own, operation, args, kwargs)
        return _drawn_from(self._next_generator(device), operation, args, kwargs)

    def _draw_from(
        self,
        generator: torch.Generator,
        operation: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Returns the result of `operation`, drawn from a generator that only this thread uses.

        A dropout on a GPU draws from its default generator; a seed and an offset are all of its
        state, and take no lock and no copy.
        """
        # Neither reads the device, so the host does not wait.
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(self._next_seed())
        try:
            return operation(*args, **kwargs)
        finally:
            generator.manual_seed(seed)
            generator.set_offset(offset)

    def _next_generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(self._next_seed())


class DrawPosition(NamedTuple):
    """A place among the draws of a micro-batch.

    Attributes:
        layer: the layer.
        unit: its unit.
        operations: how often the unit has drawn.
        offset: the offset of the device's generator, see `_ForwardDraws`.
    """

    layer: int
    unit: int
    operations: int
    offset: int


class _ForwardDraws(_SeededDraws):
    """The draws of a whole forward: in units, and in the code after each of them.

    One thread runs all pieces of a unit, so it counts the draws of the unit, wherever that is cut.
    The generator of a device, if only this thread draws from it, has the seed of the unit while the
    forward is in a stage of the device; its offset goes on from piece to piece.

    Args:
        rng: counts them.
        microbatch: the index of the micro-batch.

    Attributes:
        layer: the layer that runs, or has run last: a draw reads where it is.
        unit: its unit.
        seeds_device: whether the generator of the device is seeded. Then `at` must be called; if
            not, setting `layer` and `unit` does the same, in less time.
    """

    _begins_here = True

    def __init__(self, rng: LayerRNG, microbatch: int) -> None:
        super().__init__()
        self._rng = rng
        self._microbatch = microbatch
        self.layer = self.unit = 0  # code before the first layer belongs to it
        self.seeds_device = False
        self._counts: dict[int, int] = {}  # of the draws of each unit so far
        self._offsets: dict[int, int] = {}  # of the device's generator, after each unit so far
        # only where no other thread draws: one that takes no generator changes this state meanwhile
        self._state = _state_of_default() if rng.refuses_own_seeds else None

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of `operation`, drawn from a generator seeded by place.

        Raises:
            UserError: the forward has set the random state itself.
        """
        if (
            self._state is not None
            and kwargs.get("generator") is None
            and not is_traced(args)  # then nothing is drawn, and real tensors cannot be compared
            and not torch.equal(self._state, _state_of_default())
        ):
            raise UserError(
                "the forward sets the state of the random generator (torch.manual_seed, fork_rng "
                "or set_rng_state) and then draws from it, but random numbers in training are "
                "seeded by step, layer and micro-batch: draw them with a generator of their own "
                "(generator=torch.Generator().manual_seed(...)), or once, into a buffer"
            )
        return super().draw(operation, args, kwargs)

    def at(self, layer: int, unit: int) -> None:
        """Records that `layer`, a piece of `unit`, runs next."""
        self.layer = layer
        self.at_unit(unit)

    def at_unit(self, unit: int) -> None:
        """Records that code of `unit` runs next; in a unit that goes on, the count goes on."""
        if unit != self.unit:
            self._note_unseen()
            self.unit = unit
            self._seed_own()

    def enter_stage(self) -> None:
        """Seeds the generator of this thread's device, if no other thread draws from it."""
        if self._rng.own_generator is not None:
            self._own = self._rng.own_generator()
            self.seeds_device = self._own is not None
            if self._own is not None:
                # The state that a code outside of the layers goes on with, see `leave_stage`.
                self._found = self._own.initial_seed(), self._own.get_offset()
                self._seed_own()

    def leave_stage(self) -> None:
        """Restores the generator of this thread's device."""
        if self._own is not None:
            self._note_unseen()
            seed, offset = self._found
            self._own.manual_seed(seed)
            self._own.set_offset(offset)
            self._own, self.seeds_device = None, False

    def __enter__(self) -> _ForwardDraws:
        if self._begins_here and self._rng.own_generator is not None:
            self.enter_stage()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._own is not None:
            self.leave_stage()

    def _seed_own(self) -> None:
        if self._own is not None:
            # no operation has the number -1
            self._own.manual_seed(self._rng.seed_of_unit(self.unit, self._microbatch, -1))
            self._own.set_offset(self._offsets.get(self.unit, 0))

    def _note_unseen(self) -> None:
        if self._own is not None:
            offset = self._own.get_offset()
            # The offset has moved without an intercepted operation: a kernel that the dispatcher
            # does not see has drawn.
            if offset != self._offsets.get(self.unit, 0):
                self._offsets[self.unit] = offset
                self._note_operations()

    def _next_seed(self) -> int:
        number = self.operations
        self.skip(1)
        self._note_operations()
        return self._rng.seed_of_unit(self.unit, self._microbatch, number)

    def _note_operations(self) -> None:
        self._rng.note_draw(self.layer, self.unit, self._microbatch, self.operations)

    @property
    def position(self) -> DrawPosition:
        """The place of the next draw."""
        offset = 0 if self._own is None else self._own.get_offset()
        return DrawPosition(self.layer, self.unit, self.operations, offset)

    @property
    def counts(self) -> tuple[int, int, Mapping[int, int]]:
        """The layer, the unit, and how often each unit has drawn, for `go_on`."""
        # A copy: the forward goes on, and changes its own.
        return self.layer, self.unit, dict(self._counts)

    @property
    def operations(self) -> int:
        """How often the unit has drawn."""
        return self._counts.get(self.unit, 0)

    def skip(self, operations: int) -> None:
        """Counts draws of the unit; those on fake tensors are not made here."""
        self._counts[self.unit] = self.operations + operations

    def go_on(self, counts: tuple[int, int, Mapping[int, int]]) -> None:
        """Goes on where another process has left this forward."""
        self.layer, self.unit, before = counts
        self._counts = dict(before)

    def resume(self, position: DrawPosition) -> None:
        """Goes on from `position`, in the device of this thread once the context is entered."""
        self.layer, self.unit, operations, offset = position
        self._counts[self.unit] = operations
        self._offsets[self.unit] = offset


class _DrawsOfParts(_ForwardDraws):
    """The draws of a forward of which other processes run parts, on fake tensors here.

    Args:
        rng, microbatch: as for `_ForwardDraws`.
        begins_here: whether the first stage is in this process. Otherwise the context does not
            touch the device's generator: before its turn, another forward may draw from it.
    """

    def __init__(self, rng: LayerRNG, microbatch: int, begins_here: bool) -> None:
        super().__init__(rng, microbatch)
        self._begins_here = begins_here

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draws by place; a draw on fake tensors is only counted."""
        if not is_traced(args):
            return super().draw(operation, args, kwargs)
        if kwargs.get("generator") is None and not is_off(operation, args, kwargs):
            self.skip(1)
        return operation(*args, **kwargs)


class ReplayedDraws(_SeededDraws):
    """Makes an uncut module repeat the draws of a pipeline's layers.

    Args:
        seeds: the seeds of all draws, in order; see `LayerRNG.seeds_in_order`.

    Attributes:
        left: the unused seeds.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self.left = list(seeds)

    def _next_seed(self) -> int:
        if not self.left:
            raise UserError("the uncut module draws more often than the stages")
        return self.left.pop(0)


class DrawsOf(InterceptedDraws):
    """A context in which this thread draws from a generator instead of the default generator.

    Args:
        generator: a CPU generator; draws on other devices are unchanged.
    """

    for_other_threads = False

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of `operation`, drawn from the generator."""
        if kwargs.get("generator") is not None or _device_of(args, kwargs).type != "cpu":
            return operation(*args, **kwargs)
        return _drawn_from(self._generator, operation, args, kwargs)


def _drawn_from(
    generator: torch.Generator, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns the result of a random operation that draws from `generator` and advances it."""
    if _takes_generator(operation):
        kwargs["generator"] = generator
        return operation(*args, **kwargs)
    device = generator.device
    on_cpu = device.type == "cpu"
    default = _CPU_GENERATOR if on_cpu else torch.cuda.default_generators[device.index]
    # Other stages' threads may be in such an operation too, and there is one default generator per
    # device.
    with default_generator_lock:
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            return operation(*args, **kwargs)
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)


def seed_of(*key: int) -> int:
    """Returns the seed for `key`; the numbers for different keys are unrelated."""
    # A fixed byte order and size, so that all hosts draw the same numbers.
    packed = struct.pack(f"<{len(key)}q", *key)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


class BackwardDraws(InterceptedDraws):
    """Refuses draws in a backward that repeat draws of a forward, which were seeded by place.

    A model's own gradient checkpointing restores the default generators for its recomputation, but
    the forward did not draw from them.
    """

    in_backward = True

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of `operation`, which belongs to the backward itself.

        Raises:
            UserError: the operation belongs to a recomputed forward.
        """
        drawn_by_place = kwargs.get("generator") is None and not is_off(operation, args, kwargs)
        if drawn_by_place and _inside_checkpoint():
            raise UserError(
                "the model's own gradient checkpointing recomputes a layer that draws random "
                "numbers, such as dropout, and would draw different numbers: turn it off, and "
                f"set {argument('recompute')} instead"
            )
        return operation(*args, **kwargs)


def _inside_checkpoint() -> bool:
    # PyTorch does not tell whether a checkpoint recomputes, and this runs only at a draw in a
    # backward.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def current_gpus_generator() -> torch.Generator | None:
    """Returns the default generator of this thread's current GPU; None without CUDA."""
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]


@functools.cache
def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


# Attention is tagged as random, but it is random only with a `dropout_p` above 0.
_dropout_place: dict[Any, int | None] = {}


def is_off(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
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
