"""A pipelined model is the model: the same object, whose class is a subclass of the same name.

The subclass sends calls to a `Runner`, in two places. `forward` is a data descriptor, so whoever
patches `model.forward` later changes what runs inside the pipeline, and nobody who calls
`model.forward(...)` directly goes around it. `__call__` leaves out the model's own hooks inside
the pipeline, because they have seen the batch before it.

    model(x) -> hooks -> [forward] -> Runner -> stages -> __call__ -> forward as assigned
                         a wrapper of [forward], such as Accelerate's autocast, stays around it

Copies and pickles are plain models: the class is the only thing that is different.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from hybridtrain._base.torch_private import is_wrapped_by_compiler
from hybridtrain.errors import ConfigError, setting
from hybridtrain.head import install as install_head
from hybridtrain.piped.runner import Runner
from hybridtrain.pipeline import net_of_trip, uninstall

_CLASS: Any = object.__dict__["__class__"]


class _Forward:
    """`forward` of a pipelined model.

    Args:
        plain: the class of the model.
        runner: runs its calls.
    """

    def __init__(self, plain: type[nn.Module], runner: Runner) -> None:
        self._plain, self._runner = plain, runner
        self._outer: Any = None  # a wrapper of an entry, which stays around the pipeline
        self._made: tuple[Any, Any] = None, None  # the latest forward, and the entry to it

    def __get__(self, net: Any, owner: type) -> Any:
        if net is None:
            return self._plain.forward
        if is_wrapped_by_compiler(2):
            refuse("torch.compile", _COMPILES)
        return self._outer or self._entry(net)

    def __set__(self, net: Any, value: Any) -> None:
        function = _entry_in(value)
        self._outer = None
        if function is None:
            net.__dict__["forward"] = value
        elif function is not _function_of(value):
            self._outer = value

    def __delete__(self, net: Any) -> None:
        self._outer = None
        net.__dict__.pop("forward", None)

    def assigned(self, net: Any) -> Any:
        """Returns the forward that runs inside the pipeline."""
        return net.__dict__.get("forward") or self._plain.forward.__get__(net)

    def _entry(self, net: Any) -> Any:
        """Returns what leads into the pipeline: a method, as the forward is."""
        inner = self.assigned(net)
        if self._made[0] != inner:
            self._made = inner, self._new_entry(inner)
        entry = self._made[1]
        return MethodType(entry, net) if isinstance(inner, MethodType) else entry

    def _new_entry(self, inner: Any) -> Any:
        runner, plain = self._runner, self._plain

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is not runner.net:  # a copy, which has what a trainer keeps of the original
                return plain.forward(self, *args, **kwargs)
            return runner(inner, args, kwargs)

        def function(*args: Any, **kwargs: Any) -> Any:
            return runner(inner, args, kwargs)

        is_method = isinstance(inner, MethodType)
        entry: Any = functools.wraps(_function_of(inner))(method if is_method else function)
        entry._entry = entry
        return entry


def _function_of(value: Any) -> Any:
    return value.__func__ if isinstance(value, MethodType) else value


def _entry_in(value: Any) -> Any:
    """Returns the entry into a pipeline that a function is or wraps; None if there is none.

    Follows `__wrapped__`. The marks of an entry are not enough, because `functools.wraps` copies
    them to its wrapper.
    """
    function = _function_of(value)
    while function is not None and getattr(function, "_entry", None) is not function:
        function = _function_of(getattr(function, "__wrapped__", None))
    return function


def refuse(wrapper: str, way_out: str) -> NoReturn:
    """Raises a ConfigError for something that cannot wrap a pipelined model."""
    raise ConfigError(f"{wrapper} cannot wrap a pipelined model: remove it, and {way_out}")


_COMPILES = f"pass {setting('compile', True)} to pipelined, which compiles its layers"
_AVERAGES = (
    "gradients are averaged over the processes all the same: pipelined does it (import a trainer "
    "that adds the wrapper, such as accelerate or lightning, before pipelined is called)"
)


def swap(net: nn.Module, runner: Runner) -> None:
    """Gives a model its subclass, whose calls go to `runner`."""
    plain = type(net)
    forward = _Forward(plain, runner)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if net_of_trip() is self:
            return forward.assigned(self)(*args, **kwargs)
        return plain.__call__(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        reduced: Any = plain.__reduce_ex__(self, protocol)
        function, args, *rest = reduced
        return function, tuple(plain if value is type(self) else value for value in args), *rest

    @contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        """Backwards in the block leave gradients of this process, as in DDP."""
        before, runner.replicas.averages = runner.replicas.averages, False
        try:
            yield
        finally:
            runner.replicas.averages = before

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Converts the dtype; the device is that of each stage."""
        _, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            plain.to(self, dtype)
        if memory_format is not None:
            plain.to(self, memory_format=memory_format)
        return self

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Does nothing: the devices are those of the stages."""
        return self

    def compile(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse("torch.compile", _COMPILES)

    def replicate(self: Any) -> NoReturn:
        refuse("DataParallel", "the pipeline uses the GPUs of this process")

    def wrapped_by_ddp(self: Any) -> NoReturn:
        refuse("DistributedDataParallel", _AVERAGES)

    def left_out_of_ddp(self: Any, names: Any) -> None:
        """Accepts what scripts set before a trainer adds DDP, which a pipelined model has not."""

    def sharded(self: Any, value: Any) -> NoReturn:
        refuse("FSDP", "use more stages, or HybridModel with " + setting("shard", "optimizer"))

    def not_sharded(self: Any) -> NoReturn:
        raise AttributeError("_is_fsdp_managed_module")

    body: dict[str, Any] = {
        "forward": forward,
        "__call__": call,
        "__class__": property(lambda self: plain, sharded),
        "__reduce_ex__": reduce,
        "no_sync": no_sync,
        "to": to,
        "cuda": stay,
        "cpu": stay,
        "compile": compile,
        "_replicate_for_data_parallel": replicate,
        "_ddp_params_and_buffers_to_ignore": property(wrapped_by_ddp, left_out_of_ddp),
        "_is_fsdp_managed_module": property(not_sharded, sharded),
        "_hybridtrain_runner": runner,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    if len(set(runner.world.devices)) > 1 and not runner.is_one_of_several:
        # How a model tells Accelerate and transformers that it is on several devices, so that they
        # neither move it nor wrap it in DataParallel. In several processes they refuse such models.
        body["hf_device_map"] = {
            f"stage {stage}": device for stage, device in enumerate(runner.world.devices)
        }
    make: Any = type(plain)  # a model's class may have a metaclass
    _CLASS.__set__(net, make(plain.__name__, (plain,), body))


def runner_of(net: nn.Module) -> Runner | None:
    """Returns the runner of a pipelined model; None for a plain one."""
    runner: Runner | None = type(net).__dict__.get("_hybridtrain_runner")
    return runner


def restore(net: nn.Module) -> None:
    """Gives a pipelined model its own class back."""
    install_head(net, ())
    uninstall(net.modules())
    _CLASS.__set__(net, type(net).__mro__[1])
