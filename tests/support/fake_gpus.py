"""Devices without numbers, on which an operation on tensors of two devices is an error.

They hold PyTorch's fake tensors: a shape, a dtype and a device. `support.stand_in_gpus` computes,
and is less strict: there an operation may make a tensor on the CPU that a GPU would not take.

Autograd cannot run on fake CUDA tensors where PyTorch has CUDA and the machine has no GPU: it asks
CUDA for the context of a device ("hasPrimaryContext expects a valid device index"). Backwards
therefore need devices `cpu:0`, `cpu:1`, ..., which to fake tensors are as different as GPUs are.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtrain import World
from hybridtrain._base import accelerator as door
from hybridtrain._base.accelerator import PeakMemory
from hybridtrain.pipeline import transfer

# A mode, and what fake tensors ask it, is for one thread; the stages have several.
_one_at_a_time = threading.RLock()


def _locked(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _one_at_a_time:
            return function(*args, **kwargs)

    return run


class _Mode(FakeTensorMode):
    from_tensor = _locked(FakeTensorMode.from_tensor)

    @_locked
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.equal.default:  # has a layer changed its state?
            assert args[0].device == args[1].device
            return True
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Sees `torch.empty(device=...)` and the like, which have no fake argument."""

    def __init__(self, gpus: FakeGPUs) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") not in self._gpus.devices:
            return func(*args, **kwargs)
        with _one_at_a_time, self._gpus.mode:
            return func(*args, **kwargs)


class _Stream:
    """A stream, and an event in it; there is no work to wait for."""

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeGPUs:
    """Some devices; see `hybridtrain._base.accelerator.Accelerator`.

    Args:
        kind: "cuda", or "cpu" for `cpu:0`, `cpu:1`, ...
        count: how many.
    """

    def __init__(self, kind: str, count: int) -> None:
        self.devices = tuple(torch.device(kind, index) for index in range(count))
        # tensors of the CPU are allowed: of one element with any device, as on a GPU
        self.mode = _Mode(allow_non_fake_inputs=True)
        self.factories = _Factories(self)
        self._stream = _Stream()

    @property
    def world(self) -> World:
        """One process with a stage on each device."""
        world = World.from_env(len(self.devices), "cpu")
        return dataclasses.replace(world, devices=self.devices)

    def without_numbers(self, net: nn.Module) -> nn.Module:
        """Puts fake parameters and buffers, of the CPU, into `net`."""
        made: dict[int, Any] = {}
        for module in net.modules():
            for table in (module._parameters, module._buffers):
                for name, own in table.items():
                    if own is not None:
                        table[name] = made.setdefault(id(own), self.mode.from_tensor(own))
        return net

    # What the engines ask for

    def has(self, device: torch.device) -> bool:
        return device in self.devices

    def new_stream(self, device: torch.device) -> _Stream:
        return self._stream

    current_stream = default_stream = new_stream

    def using(self, streams: Any) -> Any:
        return nullcontext()

    def record_event(self, stream: _Stream, timing: bool = False) -> _Stream:
        return stream

    def record_stream(self, tensor: Tensor, stream: _Stream) -> None:
        pass

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        fake = tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)
        return fake.to(device)

    def set_device(self, device: torch.device) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.factories.__enter__()  # for the life of this thread, a stage's

    def synchronize(self, device: torch.device) -> None:
        pass

    def peak_memory(self, device: torch.device) -> PeakMemory:
        return PeakMemory(0, 0)

    def total_memory(self, device: torch.device) -> int:
        return 2**36

    def reset_peak_memory(self, device: torch.device) -> None:
        pass


@contextmanager
def fake_gpus(kind: str, count: int) -> Iterator[FakeGPUs]:
    """Adds the devices for the length of a block."""
    gpus = FakeGPUs(kind, count)
    swap, device = torch.utils.swap_tensors, FakeTensor.device.fget
    address = Tensor.data_ptr

    def data_ptr(tensor: Tensor) -> int:
        fake = isinstance(tensor, FakeTensor)
        return tensor.untyped_storage()._cdata if fake else address(tensor)

    def swap_tensors(one: Tensor, other: Tensor) -> None:
        # a cache has weak references to both, with which a module's `.to()` cannot swap them
        gpus.mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    dispatch = classmethod(_locked(FakeTensor.__torch_dispatch__.__func__))
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.utils, "swap_tensors", swap_tensors),
            (FakeTensor, "__torch_dispatch__", dispatch),
            (FakeTensor, "device", property(_locked(device))),
            (Tensor, "data_ptr", data_ptr),
            (transfer, "_side_streams", {}),
            (door, "ACCELERATORS", [gpus, *door.ACCELERATORS]),
        ):
            stack.enter_context(patch.object(owner, name, value))
        if kind == "cuda":
            generator = SimpleNamespace(get_offset=lambda: 0)
            stack.enter_context(patch.object(torch.cuda, "default_generators", [generator] * count))
            stack.enter_context(patch.object(torch.cuda, "_lazy_init", lambda: None))
        stack.enter_context(gpus.factories)
        yield gpus
