"""How tensors without memory came about, so that it can be done over, with memory.

An operation is known by the memory that it reads and writes. Views need no entry: a tensor is a
window onto its memory (offset, sizes, strides), and every entry names the windows it worked on.
The entries form a graph, each with those that wrote last what it reads, so that what nobody needs
any more is gone, and nothing but what one memory depends on is run for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage


class CannotDefer(Exception):
    """A constructor does what cannot be put off: the model has to be built as usual."""


@dataclass(eq=False)
class Memory:
    """What tensors share that are views of one another; known by its identity."""

    nbytes: int


@dataclass(frozen=True)
class Window:
    """How a tensor looks at its memory."""

    memory: Memory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, memory: Memory) -> Window:
        """The one through which `tensor` looks."""
        return cls(
            memory, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def on(self, storage: UntypedStorage) -> Tensor:
        """The tensor, where `storage` is the memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, eq=False)
class Operation:
    """One entry of the tape.

    TraceGuards:
        number: its place on the tape.
        func: what is called.
        args: its arguments, with windows for tensors.
        kwargs: those by name.
        after: the operations that wrote last to the memory that it reads.
        writes: the memory that it changes or makes.
        makes: for each tensor in its result, the window, if its memory is new.
        draws_from: for a random operation, the state of the default generator before it.
    """

    number: int
    func: Any
    args: Any
    kwargs: Any
    after: tuple[Operation, ...]
    writes: tuple[Memory, ...]
    makes: tuple[Window | None, ...]
    draws_from: Tensor | None = None

    def run(self, contents: Contents) -> Tensor | None:
        """Does it over.

        Args:
            contents: of all memory, as they were before; they become what they were after it.

        Returns:
            for a random operation, the state of the default generator after it; the generator
            itself stays where it is.
        """

        def real(window: Window) -> Tensor:
            memory = window.memory
            if memory not in contents:  # about to be overwritten, or never written
                contents[memory] = (self, UntypedStorage(memory.nbytes))
            return window.on(contents[memory][1])

        args, kwargs = replaced_in((self.args, self.kwargs), Window, real)
        if self.draws_from is None:
            tensors, after = tensors_in(self.func(*args, **kwargs)), None
        else:
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(self.draws_from)
            try:
                tensors = tensors_in(self.func(*args, **kwargs))
                after = torch.default_generator.get_state()
            finally:
                torch.default_generator.set_state(before)
        for window, tensor in zip(self.makes, tensors, strict=True):
            if window is not None:
                contents[window.memory] = (self, _laid_out(tensor, window))
        for memory in self.writes:
            contents[memory] = (self, contents[memory][1])
        return after


# What is in some memory, and the operation that wrote to it last.
Contents = dict[Memory, tuple[Operation, UntypedStorage]]


def replay(wanted: Iterable[Operation], known: Contents) -> Contents:
    """Runs operations, and all that they depend on, in their order.

    Args:
        wanted: the operations.
        known: what need not be computed; it is used up, as later operations may change it.

    Returns:
        the contents of all memory that these operations work on.
    """

    def is_known(operation: Operation) -> bool:
        return all(memory in known and known[memory][0] is operation for memory in operation.writes)

    needed: set[Operation] = set()
    pending = list(wanted)
    while pending:
        operation = pending.pop()
        if operation not in needed:
            needed.add(operation)
            if not is_known(operation):
                pending.extend(operation.after)
    contents: Contents = {}
    for operation in sorted(needed, key=attrgetter("number")):
        if is_known(operation):
            contents.update({memory: known[memory] for memory in operation.writes})
        else:
            operation.run(contents)
    return contents


@dataclass(eq=False)
class Deferred:
    """What is known of memory that is not there yet.

    TraceGuards:
        memory: which.
        last: the operation that wrote to it last, if any did.
        placed: the real memory, once there is some, by device.
    """

    memory: Memory
    last: Operation | None = None
    placed: WeakValueDictionary[torch.device, UntypedStorage] = field(
        default_factory=WeakValueDictionary
    )

    def contents(self, known: Contents) -> Contents:
        """What is in it, and in what that depends on; see `replay`."""
        if self.last is None:
            nothing = Operation(0, None, (), {}, (), (self.memory,), ())
            return {self.memory: (nothing, UntypedStorage(self.memory.nbytes))}
        return replay([self.last], known)

    def on(self, device: torch.device, values: bool) -> UntypedStorage:
        """The real memory on `device`, made now if need be; without `values` uninitialised."""
        storage = self.placed.get(device)
        if storage is None:
            if values:
                storage = self.contents({})[self.memory][1]
            if storage is None or device.type != "cpu":
                here = storage
                storage = UntypedStorage(self.memory.nbytes, device=device)
                if here is not None:
                    storage.copy_(here)
            self.placed[device] = storage
        return storage


_deferred: WeakKeyDictionary[UntypedStorage, Deferred] = WeakKeyDictionary()


def find(tensor: Tensor) -> Deferred | None:
    """What is known of the memory of `tensor`; None if it has memory, or is none of ours."""
    if tensor.device.type != "meta" or tensor.layout is not torch.strided:
        return None
    return _deferred.get(tensor.untyped_storage())


def alive() -> WeakSet[Deferred]:
    """What some tensor still looks at."""
    return WeakSet(_deferred.values())


def defer(tensor: Tensor) -> Deferred:
    """Begins the tape of the memory of `tensor`, which is on `meta`, if there is none."""
    storage = tensor.untyped_storage()
    if storage not in _deferred:
        _deferred[storage] = Deferred(Memory(storage.nbytes()))
    return _deferred[storage]


def window_of(tensor: Tensor) -> Window:
    """How `tensor`, which is deferred, looks at its memory.

    Raises:
        CannotDefer: it is no plain view of plain memory, or is not deferred.
    """
    deferred = find(tensor)
    if deferred is None or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise CannotDefer(f"a tensor of another kind: {tensor.layout}, on {tensor.device}")
    deferred.memory.nbytes = tensor.untyped_storage().nbytes()  # `resize_` may have changed it
    return Window.of(tensor, deferred.memory)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, list | tuple):
        return [tensor for item in tree for tensor in tensors_in(item)]
    return []


def replaced_in(arguments: Any, kind: Any, function: Callable[[Any], Any]) -> Any:
    """The arguments of an operation, with `function` of each that is of `kind` in its place."""
    if isinstance(arguments, kind):
        return function(arguments)
    if isinstance(arguments, dict):
        return {name: replaced_in(item, kind, function) for name, item in arguments.items()}
    if type(arguments) in (list, tuple):
        return type(arguments)(replaced_in(item, kind, function) for item in arguments)
    return arguments


def _laid_out(tensor: Tensor, window: Window) -> UntypedStorage:
    """The memory of `tensor`, in the layout of `window`, which later views are views of."""
    storage = tensor.untyped_storage()
    if Window.of(tensor, window.memory) == window and storage.nbytes() == window.memory.nbytes:
        return storage
    storage = UntypedStorage(window.memory.nbytes)
    window.on(storage).copy_(tensor)
    return storage
