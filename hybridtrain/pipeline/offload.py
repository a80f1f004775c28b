"""Activations that wait for their backward outside of the device.

    actions on a device   F0     F1     F2     F3     B0     F4          `schedule.offload`
    compute              [1]    [1]    [1]    [1]    [5]
    copies to the host       [2] 0> [3][2] 1>                            on a GPU, in side streams
    copies back                           [4] <0

[1] While a forward runs, saved-tensor hooks give autograd a `SavedTensor` in the place of each
tensor that it saves, and recomputed layers keep their inputs as such. All that share memory share a
`SavedStorage`. [2] After the forward the storages are copied to host memory. [3] The tensors on the
device are dropped once that is done, before the next action but one: the host runs ahead of a GPU,
and would otherwise allocate more. [4] The values come back one action before their backward.
[5] The backward waits for them. Nothing else holds a storage, so what it frees is free.

What stays alive anyway is not moved: parameters, buffers, the samples of the batch, slices of a
larger tensor. Nor are small tensors, those on another device, and those without plain memory, such
as sparse ones and subclasses.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain._base.accelerator import Event, accelerator_of
from hybridtrain._base.microbatch import map_tensors
from hybridtrain._base.tensors import storage_id
from hybridtrain._base.torch_private import (
    PackedTensor,
    allowing_torch_func,
    without_torch_function,
)
from hybridtrain.pipeline.host_memory import HostBuffer, HostMemory
from hybridtrain.pipeline.timeline import Timeline, now
from hybridtrain.pipeline.transfer import side_stream
from hybridtrain.schedule import Action, Held, Offloading, Schedule, offload_copies

Noted = Callable[[Any, Any], None] | None
"""Takes the marks (see `timeline`) of the begin and the end of copies; None: nobody asks."""

_SMALLEST = (
    4096  # bytes of a storage; to start the copy of a smaller one takes longer than the copy
)

# A copy begins at a multiple of so many bytes of its storage, as tensors do: kernels may depend on
# the alignment of their inputs.
_ALIGNMENT = 64


class StayingTensor(PackedTensor):
    """A saved tensor that is not moved.

    PyTorch does not compare the versions of saved tensors with hooks, so this does.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # the output of a node, if it held its own graph, would hold itself
        self._tensor: Tensor | None = tensor if tensor.is_leaf else tensor.detach()
        # Of the tensor itself: a detached one shares its counter.
        self._version = tensor._version

    def tensor(self) -> Tensor:  # noqa: D102
        if self._tensor is None:
            raise _freed()
        if self._tensor._version != self._version:
            raise _changed_in_place(self._tensor, self._tensor._version, self._version)
        return self._tensor

    def free(self) -> None:  # noqa: D102
        self._tensor = None


class SavedTensor(PackedTensor):
    """A saved tensor that may be away.

    Args:
        tensor: the tensor.
        storage: what it shares with other tensors.

    Attributes:
        requires_grad: whether the tensor requires a gradient.
    """

    __slots__ = ("__weakref__", "_place", "_storage", "_tensor", "_version", "requires_grad")

    def __init__(self, tensor: Tensor, storage: SavedStorage) -> None:
        self.requires_grad = tensor.requires_grad
        self._storage: SavedStorage | None = storage
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        # What a view of the storage needs, once the tensor itself is gone.
        self._place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        storage.add(self, self._tensor)

    @property
    def present(self) -> Tensor | None:
        """The tensor, as long as it has not left."""
        return self._tensor

    def tensor(self) -> Tensor:  # noqa: D102
        if self._storage is None:
            raise _freed()
        if self._tensor is None:
            return self._storage.returned(*self._place)
        if self._tensor._version != self._version:
            raise _changed_in_place(self._tensor, self._tensor._version, self._version)
        return self._tensor

    def let_go(self) -> None:
        """Drops the tensor, which has been copied, unless it has changed since it was saved."""
        # A tensor that was changed must still be there for `tensor()` to report the change.
        if self._tensor is not None and self._tensor._version == self._version:
            self._tensor = None

    def free(self) -> None:  # noqa: D102
        self._storage = self._tensor = None


class SavedStorage:
    """The memory of saved tensors of one micro-batch, on the device or in the host.

    Args:
        memory: the device.
        tensor: the first of the tensors; all have its dtype.

    Attributes:
        dtype: the dtype.
        begin, end: the elements of the storage that have been saved.
        stays: whether it stays on the device; False until it is asked to leave.
    """

    __slots__ = (
        *("__weakref__", "_alive", "_buffer", "_device", "_flat", "_memory", "_tensors"),
        *("begin", "dtype", "end", "stays"),
    )

    def __init__(self, memory: DeviceMemory, tensor: Tensor) -> None:
        self.dtype, self._device = tensor.dtype, tensor.device
        self.begin, self.end = int(tensor.storage_offset()), 0
        self._memory = memory
        # Weak, so that the node of the graph alone decides how long a tensor lives.
        self._tensors: list[ref[SavedTensor]] = []
        self._buffer: HostBuffer | None = None  # from the beginning of the copy to the host on
        self._flat: Tensor | None = None  # what has come back
        self.stays = False
        self._alive = memory.alive(tensor)

    def add(self, saved: SavedTensor, tensor: Tensor) -> None:
        """Adds a tensor."""
        offset, per_line = int(tensor.storage_offset()), _ALIGNMENT // self.dtype.itemsize
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        # Rounded down, so that the tensor that comes back has its old alignment.
        self.begin = min(self.begin, offset // per_line * per_line)
        self.end = max(self.end, offset + sum((n - 1) * step for n, step in sizes) + 1)
        self._tensors.append(ref(saved))

    @property
    def nbytes(self) -> int:
        """The bytes that have been saved."""
        return (self.end - self.begin) * self.dtype.itemsize

    @property
    def is_on_device(self) -> bool:
        """Whether its memory on the device exists, whoever holds it."""
        return self._alive is not None and not self._alive.expired()

    def to_copy(self) -> Tensor | None:
        """Returns what is to be copied to the host; None if there is nothing, or it stays."""
        if self.stays or self._buffer is not None:
            return None
        # It has come back once, and leaves again.
        if self._flat is not None:
            return self._flat
        tensors = (saved.present for tensor in self._tensors if (saved := tensor()) is not None)
        tensor = next((tensor for tensor in tensors if tensor is not None), None)
        if tensor is None:
            return None
        if 2 * self.nbytes <= tensor.untyped_storage().nbytes():  # such as a part of the batch
            self.stays = True
            return None
        return tensor.as_strided((self.end - self.begin,), (1,), self.begin)

    def copied_to(self, buffer: HostBuffer) -> None:
        """Notes that a copy to the host has begun."""
        self._buffer = buffer

    def let_go(self) -> None:
        """Drops the memory on the device, which has been copied."""
        if self._buffer is None:  # was wanted in the meantime
            return
        self._flat = None
        for tensor in self._tensors:
            if (saved := tensor()) is not None:
                saved.let_go()

    def take_buffer(self) -> HostBuffer | None:
        """Returns the copy in the host, which is no longer needed; None if nothing is away."""
        # Taken also if nothing is away: a later `let_go` must not drop what is wanted now.
        buffer, self._buffer = self._buffer, None
        held = (saved for tensor in self._tensors if (saved := tensor()) is not None)
        # The copy to the host has begun, but nothing was dropped: the original is used.
        if self._flat is not None or all(saved.present is not None for saved in held):
            return None
        return buffer

    def come_back(self, flat: Tensor) -> None:
        """Takes its memory on the device."""
        self._flat = flat
        self._alive = self._memory.alive(flat)

    def returned(self, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        """Returns a tensor that has left and come back; if it is still away, it comes now."""
        # A backward that does not follow the schedule, such as one of the user's own: slow, but
        # right.
        if self._flat is None:
            self._memory.wait_for(self._memory.bring([self]))
        assert self._flat is not None
        return self._flat.as_strided(shape, stride, offset - self.begin)


class Activations:
    """What autograd and recomputations keep of one micro-batch in a stage.

    Holds nothing itself: a storage lives as long as the nodes of the graph that need it.

    Args:
        memory: the device of the stage.
        stays: the storages that stay on it, by `storage_id`.
    """

    def __init__(self, memory: DeviceMemory, stays: set[int]) -> None:
        self._memory = memory
        self._stays = stays
        # Weak too: see the class.
        self._storages: WeakValueDictionary[Any, SavedStorage] = WeakValueDictionary()
        self._arrived: Event | None = None

    def save(self, tensor: Tensor) -> SavedTensor | None:
        """Returns what can be held in the place of a tensor; None if the tensor stays."""
        if (
            type(tensor) is not self._memory.tensor_type
            or tensor.layout != torch.strided
            or tensor.device != self._memory.device
            or (tensor.is_quantized or tensor.is_inference() or tensor.is_neg())
            or (tensor.dtype.is_complex and tensor.is_conj())
        ):
            return None
        number = storage_id(tensor)
        if number in self._stays or tensor.untyped_storage().nbytes() < _SMALLEST:
            return None
        # A storage that is seen through two dtypes is two storages here, since a copy has one
        # dtype.
        key = number, tensor.dtype
        storage = self._storages.get(key)
        if storage is None:
            self._storages[key] = storage = SavedStorage(self._memory, tensor)
        return SavedTensor(tensor, storage)

    def kept(self, tree: Any) -> Any:
        """Returns a pytree of values with a `SavedTensor` for each tensor that can leave."""
        with without_torch_function():
            return map_tensors(lambda tensor: self.save(tensor) or tensor, tree)  # type: ignore[arg-type, return-value]

    @property
    def storages(self) -> list[SavedStorage]:
        """The storages that are needed."""
        return list(self._storages.values())

    def come_back(self, note: Noted) -> None:
        """Begins to copy all storages back.

        Args:
            note: takes the begin and the end of the copies; None: nobody asks.
        """
        self._arrived = self._memory.bring(self.storages, note) or self._arrived

    def wait(self) -> None:
        """Makes the device wait until they are there."""
        arrived, self._arrived = self._arrived, None
        self._memory.wait_for(arrived)

    def clear(self) -> None:
        """Waits for copies to memory that will be freed, after a failed step."""
        if self._arrived is not None:
            # On the host: the memory goes back to the allocator, which does not know the side
            # stream.
            self._arrived.synchronize()


class DeviceMemory:
    """Copies between a device and the host's memory.

    Args:
        device: the device; on a CPU a copy is another buffer, at once.

    Attributes:
        device: the device.
        host: the host's memory for it.
        tensor_type: the type of its plain tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._accelerator = accelerator_of(device)
        self.host = HostMemory(self._accelerator)
        self.tensor_type = Tensor if self._accelerator is None else self._accelerator.tensor_type
        # by action: the storages that leave, and the event after which they have left
        self._leaving: deque[tuple[list[SavedStorage], Event | None]] = deque()

    @property
    def offloading(self) -> Offloading:
        """How long copies to the host take."""
        return "instant" if self._accelerator is None else "overlapped"

    def alive(self, tensor: Tensor) -> StorageWeakRef | None:
        """Returns what tells whether a tensor's memory exists; None where the allocator counts."""
        return StorageWeakRef(tensor.untyped_storage()) if self._accelerator is None else None

    def after_action(self, saved: Sequence[SavedStorage], note: Noted = None) -> None:
        """Begins to copy storages to the host, at the end of an action.

        Args:
            saved: the storages.
            note: see `Activations.come_back`.
        """
        accelerator, timed = self._accelerator, note is not None
        with torch.no_grad(), without_torch_function():
            copies = [(s, flat) for s in saved if (flat := s.to_copy()) is not None]
            if accelerator is None:
                start = now()
                for storage, flat in copies:
                    buffer = self.host.take(storage.nbytes)
                    buffer.part(flat.dtype, flat.numel()).copy_(flat)
                    storage.copied_to(buffer)
                    storage.let_go()
                if copies and note is not None:
                    note(start, now())
                return
            buffers, event = [], None
            if copies:
                stream = side_stream(self.device, "offload", "out")
                # The action that has just been queued computes what is copied.
                stream.wait_stream(accelerator.current_stream(self.device))
                begun = accelerator.record_event(stream, timing=True) if timed else None
                with accelerator.using([stream]):
                    for storage, flat in copies:
                        buffer = self.host.take(storage.nbytes)
                        if buffer.ready is not None:  # the last copy out of it
                            stream.wait_event(buffer.ready)
                        accelerator.copy_into(buffer.part(flat.dtype, flat.numel()), flat)
                        storage.copied_to(buffer)
                        buffers.append(buffer)
                # One event for all: the copies of an action leave together, and `let_go` waits
                # once.
                event = accelerator.record_event(stream, timing=timed)
                if note is not None:
                    note(begun, event)
            for buffer in buffers:
                buffer.ready = event
            self._leaving.append(([storage for storage, _ in copies], event))

    def bring(self, saved: Sequence[SavedStorage], note: Noted = None) -> Event | None:
        """Begins to copy storages back to the device, and returns when they are there.

        Args:
            saved: the storages.
            note: see `Activations.come_back`.
        """
        accelerator, timed = self._accelerator, note is not None
        away = [(s, buffer) for s in saved if (buffer := s.take_buffer()) is not None]
        if not away:
            return None
        with torch.no_grad(), without_torch_function():
            start = now()
            flats = [
                torch.empty(s.end - s.begin, dtype=s.dtype, device=self.device) for s, _ in away
            ]
            if accelerator is None:
                for (storage, buffer), flat in zip(away, flats, strict=True):
                    flat.copy_(buffer.part(flat.dtype, flat.numel()))
                    storage.come_back(flat)
                if note is not None:
                    note(start, now())
                return None
            stream = side_stream(self.device, "offload", "in")
            # the memory comes from the current stream, which may still use it
            stream.wait_stream(accelerator.current_stream(self.device))
            begun = accelerator.record_event(stream, timing=True) if timed else None
            with accelerator.using([stream]):
                for (storage, buffer), flat in zip(away, flats, strict=True):
                    if buffer.ready is not None:
                        stream.wait_event(buffer.ready)
                    accelerator.copy_into(flat, buffer.part(flat.dtype, flat.numel()))
                    # Before the copy has run: its readers wait for the event by `wait_for`.
                    storage.come_back(flat)
            event = accelerator.record_event(stream, timing=timed)
            for _, buffer in away:
                # The buffer is free for another storage now, for its host's bookkeeping; that one
                # waits for this event.
                buffer.ready = event
            if note is not None:
                note(begun, event)
            return event

    def wait_for(self, event: Event | None) -> None:
        """Makes the current stream of the device wait for an event."""
        if event is not None:
            assert self._accelerator is not None
            self._accelerator.current_stream(self.device).wait_event(event)

    def let_go(self, but: int = 0) -> None:
        """Drops what has left after an action, and waits until it has.

        Args:
            but: the number of the last actions that are left out.
        """
        while len(self._leaving) > but:
            # In the order of the copies, which one stream runs.
            saved, event = self._leaving.popleft()
            if event is not None:
                # The host waits, because only the host can drop a tensor. With `but` the copy is an
                # action old, so this wait is short.
                event.synchronize()
            for storage in saved:
                storage.let_go()


class StageOffload:
    """What of a stage waits outside of its device.

    Args:
        memory: the device.

    Attributes:
        memory: the device.
        most_on_device: the most bytes of activations that can leave and were on the device at the
            same time; counted on a CPU alone, in steps that are observed.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.most_on_device = 0
        self._activations: dict[int, Activations] = {}  # by micro-batch

    def begin_saving(self, microbatch: int, stays: set[int]) -> None:
        """Begins the forward of a micro-batch in this thread.

        Args:
            microbatch: its index.
            stays: as for `Activations`.
        """
        activations = self._activations[microbatch] = Activations(self.memory, stays)
        # Thread-local: the forward of a micro-batch runs in one thread, and other stages run in
        # others at the same time.
        _here.activations = activations

    def nbytes(self, microbatch: int) -> int:
        """Returns the bytes of a micro-batch that can leave the device."""
        return sum(storage.nbytes for storage in self._activations[microbatch].storages)

    def storages(self, microbatch: int) -> list[SavedStorage]:
        """Returns the storages of a micro-batch."""
        activations = self._activations.get(microbatch)
        return [] if activations is None else activations.storages

    def come_back(self, microbatch: int, note: Noted = None) -> None:
        """Begins to copy a micro-batch back; see `Activations.come_back`."""
        if (activations := self._activations.get(microbatch)) is not None:
            activations.come_back(note)

    def wait(self, microbatch: int) -> None:
        """Makes the device wait until a micro-batch is there."""
        if (activations := self._activations.get(microbatch)) is not None:
            activations.wait()

    def end(self, microbatch: int) -> None:
        """Forgets a micro-batch, at the end of its backward."""
        # The storages are weak, so this drops only the bookkeeping.
        self._activations.pop(microbatch, None)

    def count(self) -> None:
        """Counts what is on the device."""
        storages = (s for held in self._activations.values() for s in held.storages)
        nbytes = sum(s.nbytes for s in storages if s.is_on_device and not s.stays)
        self.most_on_device = max(self.most_on_device, nbytes)

    def take(self, microbatch: int) -> Activations | None:
        """Returns a micro-batch, for `put_back`, and forgets it."""
        return self._activations.pop(microbatch, None)

    def put_back(self, microbatch: int, activations: Activations | None) -> None:
        """Knows a micro-batch again."""
        if activations is not None:
            self._activations[microbatch] = activations

    def clear(self) -> None:
        """Drops everything after a failed step."""
        for activations in self._activations.values():
            activations.clear()
        self._activations.clear()
        # Waits for the copies out, whose sources must live until then.
        self.memory.let_go()


class StepCopies:
    """The copies of one step, around the actions of the devices of this process.

    Args:
        schedule: the schedule.
        stages: the stages of this process, by their index; one at least.
        stays: the storages that stay on their devices, by `storage_id`.
        counts: whether to count what is on the devices.
        timeline: records when the copies run.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, StageOffload],
        stays: set[int],
        counts: bool,
        timeline: Timeline | None = None,
    ) -> None:
        self._copies = offload_copies(schedule, next(iter(stages.values())).memory.offloading)
        self._stages = stages
        self._stays = stays
        self._counts = counts
        self._timeline = timeline
        self._lane_of = schedule.lane_of

    def _noting(self, held: Held, back: bool) -> Noted:
        """Returns what takes the begin and the end of copies; None if nothing is recorded."""
        if self._timeline is None:
            return None
        return partial(self._timeline.record_copy, self._lane_of[held[0]], held, back)

    def stays(self, values: Any) -> Any:
        """Returns values whose tensors stay on their devices, such as samples of the batch."""
        self._stays.update(storage_id(t) for t in tree_leaves(values) if isinstance(t, Tensor))
        return values

    def before(self, action: Action) -> None:
        """Waits for what an action uses, and begins to bring back what the next one uses."""
        own = self._stages[action.stage]
        # The last action's copies still run, beside this action.
        own.memory.let_go(but=1)
        # Before the action is queued: the copies of the next one overlap with it.
        for held in self._copies[action].back:
            stage, microbatch = held
            self._stages[stage].come_back(microbatch, self._noting(held, back=True))
        if action.kind == "F":
            own.begin_saving(action.microbatch, self._stays)
        else:
            own.wait(action.microbatch)

    def after(self, action: Action) -> None:
        """Begins to move away what the next actions do not use."""
        own, away = self._stages[action.stage], self._copies[action].away
        if action.kind == "F":
            stop_saving()
        # Before the count, which is of what stays after the action.
        if action.ends_microbatch:
            own.end(action.microbatch)
        if self._counts:
            own.count()
        leaves = [] if away is None else own.storages(action.microbatch)
        own.memory.after_action(leaves, self._noting(action[1:], back=False))

    def finish(self) -> None:
        """Ends a step in which nothing has failed."""
        # Stages of one device share it.
        for memory in {stage.memory for stage in self._stages.values()}:
            memory.let_go()
            memory.host.end_step()


class _Here(threading.local):
    activations: Activations | None = None


_here = _Here()  # the stage and micro-batch in whose forward this thread is


def stop_saving() -> None:
    """Ends the forward of a stage in this thread."""
    _here.activations = None


def kept(tree: Any) -> Any:
    """Returns values that a recomputation needs, with what can leave the device as `SavedTensor`s.

    See `restored`.
    """
    return tree if _here.activations is None else _here.activations.kept(tree)


def restored(tree: Any) -> Any:
    """Returns the values of `kept`; a tensor that occurs twice is one tensor again."""
    tensors: dict[int, Tensor] = {}

    def tensor(saved: SavedTensor) -> Tensor:
        if id(saved) not in tensors:
            # A new leaf: the recomputation must not continue the graph that the value came from.
            value = saved.tensor().detach()
            tensors[id(saved)] = value.requires_grad_(saved.requires_grad)
        return tensors[id(saved)]

    with without_torch_function():
        return tree_map_only(SavedTensor, tensor, tree)


def pack(tensor: Tensor) -> PackedTensor:
    """The pack hook."""
    with without_torch_function():
        # None outside of a forward, as in a recomputation, whose tensors are used at once.
        activations = _here.activations
        saved = None if activations is None else activations.save(tensor)
        return saved or StayingTensor(tensor)


def unpack(packed: PackedTensor) -> Tensor:
    """The unpack hook."""
    with without_torch_function():
        return packed.tensor()


@contextmanager
def saving() -> Iterator[None]:
    """Lets what autograd saves in this thread leave its device.

    The hooks are two functions of the module, because compiled code is compiled again for others.
    """
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), allowing_torch_func():
        yield


def _freed() -> RuntimeError:
    return RuntimeError("a node of the graph ran again after its saved tensors were freed")


def _changed_in_place(tensor: Tensor, version: int, expected: int) -> RuntimeError:
    """Returns the error for a change that PyTorch does not look for if there are hooks."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {version}; expected "
        f"version {expected} instead"
    )
