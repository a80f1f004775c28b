"""Devices that compute while the host runs ahead, on a CPU: `cpu:0`, `cpu:1`, ...

They drive the engines through `hybridtrain._base.accelerator`, as CUDA does. On the host a tensor
of such a device is shape, strides and a block of memory. An operation works out the shapes of its
results, takes memory for them and goes into a stream, whose worker thread computes on that memory
later. As with CUDA's allocator, memory goes back when the host drops the tensor: at once to the
stream that it was allocated in, to others when the streams noted by `record_stream` have come so
far.

    host     a = x @ w      b = a + 1     del a      c = b * 2      takes the memory of `a`
    stream                  x @ w         a + 1      b * 2

What it cannot show: speed, the order in which a GPU adds up, NCCL, and what differs between kinds
of copies. What a layer makes by `torch.arange(device=...)` is made on the host and copied.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from hybridtrain._base import accelerator as door
from hybridtrain._base.accelerator import PeakMemory
from hybridtrain.pipeline import default_generator_lock

PATIENCE_S = 30
_ROUND = 512  # bytes of the smallest block
_TOTAL = 2**30  # bytes of a device; more are there all the same
aten = torch.ops.aten
_TAKES_LENGTHS = aten._pack_padded_sequence.default  # in CPU memory, beside a tensor of a device
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}


class Event:
    """A place in a stream."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self.at = 0.0

    def _pass(self) -> None:
        self.at = time.perf_counter()
        self._passed.set()

    @property
    def done(self) -> bool:
        return self._passed.is_set()

    def comes(self, seconds: float) -> bool:
        """Whether the device comes to it in this time."""
        return self._passed.wait(seconds)

    def synchronize(self) -> None:
        if not self._passed.wait(PATIENCE_S):
            raise TimeoutError("a stream of a stand-in device does not move on")

    def elapsed_time(self, end: Event) -> float:
        self.synchronize()
        end.synchronize()
        return (end.at - self.at) * 1e3


class Stream:
    """A queue of work and the thread that does it."""

    def __init__(self, device: torch.device, gpus: StandInGPUs) -> None:
        self.device = device
        self._gpus = gpus
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name=f"stream of {device}").start()

    def queue(self, work: Callable[[], None] | None) -> None:
        self._work.put(work)

    def record_event(self) -> Event:
        event = Event()
        self.queue(event._pass)
        return event

    def wait_event(self, event: Event) -> None:
        self.queue(event.synchronize)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def _run(self) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                try:
                    work()
                except BaseException as error:
                    self._gpus.errors.append(error)
                del work


class Gate:
    """Stops a stream for as long as a block runs."""

    def __init__(self, stream: Stream) -> None:
        self._open = threading.Event()
        stream.queue(lambda: self._open.wait(PATIENCE_S) and None)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()


class Block:
    """Memory that a tensor has, and the streams that may still read it when it is dropped."""

    def __init__(self, memory: Tensor, stream: Stream, pool: Pool) -> None:
        self.memory = memory
        self.stream = stream
        self.readers: set[Stream] = set()
        self._end = weakref.finalize(self, pool.free, memory, stream, self.readers)


class Pool:
    """The caching allocator of one device."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: dict[tuple[Stream, int], list[Tensor]] = {}
        self._pending: list[tuple[list[Event], Stream, Tensor]] = []
        self.allocated = self.reserved = self.peak = 0

    def take(self, nbytes: int, stream: Stream) -> Block:
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        with self._lock:
            waiting = []
            for events, own, memory in self._pending:
                if all(event.done for event in events):
                    self._give_back(own, memory)
                else:
                    waiting.append((events, own, memory))
            self._pending = waiting
            free = self._free.get((stream, size))
            if free:
                memory = free.pop()
            else:
                memory = torch.empty(size, dtype=torch.uint8)
                self.reserved += size
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
            return Block(memory, stream, self)

    def free(self, memory: Tensor, stream: Stream, readers: set[Stream]) -> None:
        with self._lock:
            if readers:
                events = [reader.record_event() for reader in readers]
                self._pending.append((events, stream, memory))
            else:
                self._give_back(stream, memory)

    def _give_back(self, stream: Stream, memory: Tensor) -> None:
        self.allocated -= memory.numel()
        self._free.setdefault((stream, memory.numel()), []).append(memory)


class DeviceTensor(Tensor):
    """A tensor of a stand-in device, as the host knows it."""

    meta: Tensor
    block: Block

    @staticmethod
    def __new__(cls, meta: Tensor, block: Block, device: torch.device) -> DeviceTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        tensor.meta, tensor.block = meta, block
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def data_ptr(self) -> int:
        return self.block.memory.data_ptr() + self.storage_offset() * self.element_size()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.block.memory.untyped_storage()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return StandInGPUs.present.run(func, args, kwargs or {})


class StandInGPUs:
    """Some devices `cpu:0`, `cpu:1`, ...; see `hybridtrain._base.accelerator.Accelerator`.

    Args:
        count: how many.
        operation_s: how long each operation takes, in seconds.
        copy_s: how long each copy between devices or from the host takes.

    Attributes:
        errors: what operations have raised.
        syncs: how often the host has waited for values.
    """

    present: StandInGPUs

    def __init__(self, count: int, operation_s: float = 0.0, copy_s: float = 0.0) -> None:
        self.devices = [torch.device("cpu", index) for index in range(count)]
        self.operation_s, self.copy_s = operation_s, copy_s
        self.errors: list[BaseException] = []
        self.syncs = 0
        self._streams: list[Stream] = []
        self.pools = {device: Pool() for device in self.devices}
        self._default = {device: self.new_stream(device) for device in self.devices}
        self._current = threading.local()

    # What the engines ask for

    def has(self, device: torch.device) -> bool:
        return device in self.pools

    def new_stream(self, device: torch.device) -> Stream:
        self._streams.append(Stream(device, self))
        return self._streams[-1]

    def current_stream(self, device: torch.device) -> Stream:
        return getattr(self._current, "streams", {}).get(device, self._default[device])

    def default_stream(self, device: torch.device) -> Stream:
        return self._default[device]

    @contextmanager
    def using(self, streams: Iterable[Stream]) -> Iterator[None]:
        before = getattr(self._current, "streams", {})
        self._current.streams = before | {stream.device: stream for stream in streams}
        try:
            yield
        finally:
            self._current.streams = before

    def record_event(self, stream: Stream, timing: bool = False) -> Event:
        return stream.record_event()

    def record_stream(self, tensor: Any, stream: Stream) -> None:
        if stream is not tensor.block.stream:
            tensor.block.readers.add(stream)

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        target = self.current_stream(device)
        meta = torch.empty_like(tensor.meta if isinstance(tensor, DeviceTensor) else tensor,
                                device="meta")  # fmt: skip
        copied = self._new(meta, device)
        to = real_memory(copied)
        if not isinstance(tensor, DeviceTensor):
            own = tensor.clone()  # pageable memory is read before the call returns
            target.queue(lambda: self._copied(to, own))
            return copied
        # as CUDA does: in the source's stream, with a barrier on both sides
        source, read = self.current_stream(tensor.device), real_memory(tensor)
        source.wait_stream(target)
        source.queue(lambda: self._copied(to, read))
        target.wait_stream(source)
        return copied

    def to_host(self, tensor: Tensor) -> Tensor:
        host, read = torch.empty(tensor.shape, dtype=tensor.dtype), real_memory(tensor)
        self.current_stream(tensor.device).queue(lambda: self._copied(host, read))
        return host

    @property
    def tensor_type(self) -> type[Tensor]:
        return DeviceTensor

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_into(self, target: Tensor, source: Tensor) -> None:
        device = (target if isinstance(target, DeviceTensor) else source).device
        to, read = (real_memory(t) if isinstance(t, DeviceTensor) else t for t in (target, source))
        self.current_stream(device).queue(lambda: self._copied(to, read))

    def set_device(self, device: torch.device) -> None:
        modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
        if not any(isinstance(mode, _Moves) for mode in modes):
            _Moves().__enter__()  # for the life of this thread, a stage's

    def synchronize(self, device: torch.device) -> None:
        for stream in list(self._streams):
            if stream.device == device:
                stream.record_event().synchronize()

    def peak_memory(self, device: torch.device) -> PeakMemory:
        return PeakMemory(self.pools[device].peak, self.pools[device].reserved)

    def total_memory(self, device: torch.device) -> int:
        return _TOTAL

    def reset_peak_memory(self, device: torch.device) -> None:
        self.pools[device].peak = self.pools[device].allocated

    # Operations

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queues an operation and returns its results, as the host knows them."""
        flat, spec = tree_flatten((args, kwargs))
        own = [leaf for leaf in flat if isinstance(leaf, DeviceTensor)]
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            return self._moved(func, args, kwargs)
        if func is aten.copy_.default and args[0].device != args[1].device:
            return self._copied_into(*args[:2])
        device = own[0].device
        if func is _TAKES_LENGTHS and not isinstance(args[1], DeviceTensor):
            return self._packed(device, *args)
        for leaf in flat:
            if isinstance(leaf, Tensor) and leaf.device != device and leaf.dim():
                raise RuntimeError(f"{func}: tensors on two devices, {device} and {leaf.device}")
        if func in _READS:
            self.syncs += 1
            self.synchronize(device)
            return func(*tree_map_only(DeviceTensor, real_memory, args), **kwargs)

        def described(leaf: Any) -> Any:
            if isinstance(leaf, DeviceTensor):
                return leaf.meta
            if isinstance(leaf, Tensor):
                return torch.empty_like(leaf, device="meta")
            return torch.device("meta") if isinstance(leaf, torch.device) else leaf

        def stored(leaf: Any) -> Any:
            if isinstance(leaf, DeviceTensor):
                return real_memory(leaf)
            if isinstance(leaf, Tensor):
                return leaf.clone()
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        meta_args, meta_kwargs = tree_unflatten([described(leaf) for leaf in flat], spec)
        meta_kwargs = {k: v for k, v in meta_kwargs.items() if k != "generator"}
        shapes = func(*meta_args, **meta_kwargs)
        results, made = self._results(func, shapes, args, kwargs, device)
        writes = any(a.alias_info is not None and a.alias_info.is_write
                     for a in func._schema.arguments)  # fmt: skip
        if made or writes:
            real_args, real_kwargs = tree_unflatten([stored(leaf) for leaf in flat], spec)
            into = [(number, real_memory(tensor)) for number, tensor in made]
            run = _with_draws(func, real_kwargs)

            def work() -> None:
                time.sleep(self.operation_s)
                found = run(*real_args, **real_kwargs)
                found = found if isinstance(found, tuple | list) else (found,)
                for number, memory in into:
                    if found[number] is not None:  # not asked for, but of a shape without data
                        memory.copy_(found[number])

            self.current_stream(device).queue(work)
        return results

    def _packed(
        self, device: torch.device, padded: Tensor, lengths: Tensor, batch_first: bool
    ) -> tuple[Tensor, Tensor]:
        """The packed values, and the sizes of batches in CPU memory, which lengths alone decide."""
        like = torch.zeros(padded.shape, dtype=padded.dtype)
        shape, sizes = _TAKES_LENGTHS(like, lengths, batch_first)
        packed = self._new(shape.to("meta"), device)
        read, to = real_memory(padded), real_memory(packed)
        work = lambda: to.copy_(_TAKES_LENGTHS(read, lengths, batch_first)[0])  # noqa: E731
        self.current_stream(device).queue(work)
        return packed, sizes

    def _results(
        self, func: Any, shapes: Any, args: Any, kwargs: Any, device: torch.device
    ) -> tuple[Any, list[tuple[int, DeviceTensor]]]:
        """The results for the host, and those that got new memory, with their numbers."""
        returns = func._schema.returns
        values = list(shapes) if isinstance(shapes, tuple | list) else [shapes]
        many = len(returns) == 1 and isinstance(shapes, tuple | list)  # a list of tensors
        results, made = [], []
        for number, meta in enumerate(values):
            alias = returns[0 if many else number].alias_info if returns else None
            if not isinstance(meta, Tensor):
                results.append(meta)
            elif alias is None:
                results.append(self._new(meta, device))
                made.append((number, results[-1]))
            else:
                source = _argument(func, alias, args, kwargs)
                results.append(
                    source if alias.is_write else DeviceTensor(meta, source.block, device)
                )
        if isinstance(shapes, tuple | list):
            return type(shapes)(results), made
        return results[0] if values and returns else None, made

    def _new(self, meta: Tensor, device: torch.device) -> Any:
        extent = meta.untyped_storage().nbytes()
        block = self.pools[device].take(extent, self.current_stream(device))
        return DeviceTensor(meta, block, device)

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        device, tensor = torch.device(kwargs.pop("device")), args[0]
        if self.has(device):
            if not isinstance(tensor, DeviceTensor) and not kwargs.get("non_blocking"):
                self.syncs += 1  # the copy is in the stream, behind all that is queued
            if kwargs.get("dtype") is not None and kwargs["dtype"] != tensor.dtype:
                tensor = tensor.to(kwargs["dtype"])
            return self.copy(tensor, device)
        self.syncs += 1
        self.synchronize(tensor.device)
        return func(real_memory(tensor), **kwargs)

    def _copied_into(self, target: Tensor, source: Tensor) -> Tensor:
        if not isinstance(target, DeviceTensor):
            self.syncs += 1
            self.synchronize(source.device)
            return target.copy_(real_memory(source))
        moved = self.copy(source.detach(), target.device)
        return self.run(aten.copy_.default, (target, moved), {})  # type: ignore[no-any-return]

    def _copied(self, target: Tensor, source: Tensor) -> None:
        time.sleep(self.copy_s)
        target.copy_(source)

    def close(self) -> None:
        for stream in self._streams:
            stream.queue(None)


class _Moves(TorchDispatchMode):
    """Sees what dispatches to no `DeviceTensor`: `.to(device)` of the host's tensors, factories."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device, gpus = kwargs.get("device"), StandInGPUs.present
        if device is None or not gpus.has(torch.device(device)):
            return func(*args, **kwargs)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # a fake tensor, which only claims the device
        if func is aten._to_copy.default:
            return gpus._moved(func, args, kwargs)
        if any(isinstance(leaf, DeviceTensor) for leaf in tree_flatten(args)[0]):
            return func(*args, **kwargs)
        return gpus.copy(func(*args, **kwargs | {"device": torch.device("cpu")}), device)


@contextmanager
def stand_in_gpus(count: int, **settings: float) -> Iterator[StandInGPUs]:
    """Adds the devices for the length of a block, in whose thread `.to(device)` works."""
    gpus = StandInGPUs(count, **settings)
    StandInGPUs.present = gpus
    door.ACCELERATORS.append(gpus)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    from hybridtrain.pipeline import transfer

    kept, transfer._side_streams = transfer._side_streams, {}
    try:
        with _Moves():
            yield gpus
        for device in gpus.devices:
            gpus.synchronize(device)
        if gpus.errors:
            raise gpus.errors[0]
    finally:
        transfer._side_streams = kept
        torch.__future__.set_swap_module_params_on_conversion(before)
        door.ACCELERATORS.remove(gpus)
        gpus.close()


def on_host(tree: Any) -> Any:
    """The tensors of a pytree in CPU memory, after all work that was queued."""
    return tree_map(lambda leaf: leaf.to("cpu") if isinstance(leaf, DeviceTensor) else leaf, tree)


def real_memory(tensor: Any) -> Tensor:
    """The numbers of a tensor, for the worker of a stream: memory alone, which keeps no block."""
    memory = tensor.block.memory
    count = memory.numel() // tensor.element_size() * tensor.element_size()
    typed = memory[:count].view(tensor.dtype)
    return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _argument(func: Any, alias: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that a result shares its memory with."""
    shared = []
    for number, argument in enumerate(func._schema.arguments):
        own = args[number] if number < len(args) else kwargs.get(argument.name)
        if argument.alias_info is None or not isinstance(own, DeviceTensor):
            continue
        if argument.alias_info.before_set & alias.before_set:
            return own
        shared.append(own)  # of a list of views
    return shared[0]


def _with_draws(func: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """`func`, drawing from the state that its generator has now, as a kernel does."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func
    given = kwargs.get("generator")
    if given is not None:
        kwargs["generator"] = torch.Generator().set_state(given.get_state())
        return func
    state = torch.default_generator.get_state()

    def run(*args: Any, **settings: Any) -> Any:
        with default_generator_lock:
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(state)
            try:
                return func(*args, **settings)
            finally:
                torch.default_generator.set_state(before)

    return run
