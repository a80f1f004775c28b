"""Keeps a constructor's tensors on `meta` and writes down, on the tape, what it does with them.

Two modes see to it. `Recorder` stands below autograd, where every operation passes with its
arguments as they are. `AsIfOnCPU` stands where Python calls PyTorch: to the constructor the tensors
look as if they were on the CPU, since there is code that leaves out the initialisation of what is
on `meta`. Where it asks for values (`item()`, `if x.any()`), they are computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtrain.deferred.tape import (
    CannotDefer,
    Contents,
    Operation,
    defer,
    find,
    replaced_in,
    replay,
    tensors_in,
    window_of,
)

_CPU, _META = torch.device("cpu"), torch.device("meta")

# In place, and what was there before does not count.
_OVERWRITING = {
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"),
    *("exponential_", "cauchy_", "log_normal_", "geometric_"),
}

# What a constructor is told of a deferred tensor, and what is done on a real copy of it.
_AS_IF = {
    torch.Tensor.device.__get__: _CPU,
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}
_OF_VALUES = {
    *(Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__repr__, Tensor.__format__),
}


class AsIfOnCPU(TorchFunctionMode):
    """Hides from a constructor that its tensors are on `meta`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None:
            return func(*args, **kwargs)
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            first.data = self._recorder.alike(first, args[1])
            return None
        if find(first) is None:
            return func(*args, **kwargs)
        if func in _AS_IF:
            return _AS_IF[func]
        if func in _OF_VALUES:
            return func(self._recorder.value(first), *args[1:], **kwargs)
        if func in (Tensor.cpu, Tensor.to):
            args = (*args, _CPU) if func == Tensor.cpu else args
            args, kwargs = replaced_in((args, kwargs), str | torch.device, _to_meta)
            return Tensor.to(*args, **kwargs)
        return func(*args, **kwargs)


def _to_meta(place: str | torch.device) -> str | torch.device:
    return _META if torch.device(place).type == "cpu" else place


class Recorder(TorchDispatchMode):
    """Keeps new tensors on `meta` and writes the tape.

    Data that come from elsewhere (numpy, a file) are real and stay it, and so does what is
    computed from nothing but them. In an operation with deferred tensors they are copied, since
    they may change afterwards.

    TraceGuards:
        failure: why the constructor cannot be deferred, if that has turned out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure: CannotDefer | None = None
        self._number = 0
        self._paused = False
        # What has been computed to answer the last question for a value, and for the last draw:
        # an initialisation by rejection draws, looks, and draws again.
        self._answer: Contents = {}
        self._drawn: Contents = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        try:
            with torch._C.DisableTorchFunction():
                return self._do(func, args, kwargs)
        except CannotDefer as failure:
            self.failure = failure
            raise

    def value(self, tensor: Tensor) -> Tensor:
        """A real copy of `tensor`."""
        deferred = find(tensor)
        if deferred is None:
            return tensor
        window = window_of(tensor)
        paused, self._paused = self._paused, True
        try:
            with torch.no_grad():
                self._answer = deferred.contents({**self._answer, **self._drawn})
                self._drawn = {}
                return window.on(self._answer[window.memory][1]).clone()
        finally:
            self._paused = paused

    def alike(self, tensor: Tensor, value: Tensor) -> Tensor:
        """`value`, deferred if `tensor` is, else real."""
        if find(tensor) is None:
            return self.value(value)
        return value if find(value) is not None else self._given(value.detach().clone())

    def _do(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        device = kwargs.get("device")
        if device is not None and device.type not in ("cpu", "meta"):
            raise CannotDefer(f"{func} on {device}")
        if func is torch.ops.aten.lift_fresh.default:
            return self._lift(args[0])
        if tensors and device != _META and all(find(tensor) is None for tensor in tensors):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        tells = not written and not any("Tensor" in str(r.type) for r in func._schema.returns)
        if tells or any(find(tensor) is None for tensor in written):
            return self._now(func, args, kwargs, written)
        return self._later(func, args, kwargs, written)

    def _later(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        """Runs `func` on `meta` and puts it on the tape."""
        tensors = tensors_in((args, kwargs))
        given = {id(t): self._given(t.detach().clone()) for t in tensors if find(t) is None}
        all_args, here = replaced_in((args, kwargs), Tensor, lambda t: given.get(id(t), t))
        there = dict(here)
        names = {argument.name for argument in func._schema.arguments}
        if "device" in names and (not tensors or kwargs.get("device") is not None):
            here["device"], there["device"] = _CPU, _META
        if "generator" in kwargs:
            here["generator"] = there["generator"] = None
        try:
            result = func(*all_args, **there)
        except NotImplementedError:  # no kernel for `meta`, as where the sizes depend on values
            return self._now(func, args, kwargs, written)
        except Exception as error:
            raise CannotDefer(f"{func}: {error}") from error
        if torch.Tag.inplace_view in func.tags:
            defer(all_args[0])  # `set_` may have given it other memory
            return result
        made = tensors_in(result)
        nothing = not any(tensor.numel() for tensor in made)
        if not tensors and nothing and kwargs.get("device") != _META:
            return func(*args, **here)  # lazy parameters and `torch.load` begin with nothing
        if not tensors and "dtype" in names:
            here["dtype"] = made[0].dtype  # the default one may be another when it is done over
        if written or any(find(tensor) is None for tensor in made):
            self._record(func, all_args, here, written, made, kwargs.get("generator"))
        return result

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
        made: list[Tensor],
        generator: torch.Generator | None,
    ) -> None:
        replaced = _replaced(func, args)
        reads = [find(t) for t in tensors_in((args, kwargs)) if t is not replaced]
        new = [find(tensor) is None for tensor in made]
        touched = [defer(tensor) for tensor in (*written, *made)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        generator = generator or torch.default_generator
        operation = Operation(
            self._next_number(),
            func,
            replaced_in(args, Tensor, window_of),
            replaced_in(kwargs, Tensor, window_of),
            after=tuple({d.last: None for d in reads if d is not None and d.last is not None}),
            writes=tuple({deferred.memory: None for deferred in touched}),
            makes=tuple(window_of(t) if n else None for t, n in zip(made, new, strict=True)),
            draws_from=generator.get_state() if draws else None,
        )
        if draws:
            contents = replay(operation.after, {**self._answer, **self._drawn})
            for memory in contents:
                self._answer.pop(memory, None)  # it may change now
            self._drawn = {}  # before there is more
            moved_on = operation.run(contents)
            assert moved_on is not None
            generator.set_state(moved_on)
            self._drawn = {memory: contents[memory] for memory in operation.writes}
        for deferred in touched:
            deferred.last = operation

    def _now(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        """Runs `func` on real copies of what is deferred."""
        if any(find(tensor) is not None for tensor in written):
            raise CannotDefer(f"{func} changes a tensor and needs its values")
        args, kwargs = replaced_in((args, kwargs), Tensor, self.value)
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        return func(*args, **kwargs)

    def _lift(self, data: Tensor) -> Tensor:
        """A tensor that was made from Python's numbers, or that shares the memory of an array."""
        if data.is_meta or data.numel() == 0 or not data.untyped_storage().resizable():
            return data
        return self._given(data)

    def _given(self, data: Tensor) -> Tensor:
        """A deferred tensor of `data`, which must not change any more."""
        if data.is_meta:
            raise CannotDefer("a tensor on meta that was made elsewhere")
        tensor = torch.empty_like(data, device=_META)
        deferred, window = defer(tensor), window_of(tensor)
        deferred.last = Operation(
            self._next_number(), data.clone, (), {}, (), (deferred.memory,), (window,)
        )
        return tensor

    def _next_number(self) -> int:
        self._number += 1
        return self._number


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that `func` changes."""
    values = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_in(values)


def _replaced(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The argument whose memory `func` fills as a whole, without a look at what was there."""
    name = func._schema.name.removeprefix("aten::")
    if name not in _OVERWRITING or not args[0].is_contiguous():
        return None
    whole: bool = args[0].nbytes == args[0].untyped_storage().nbytes()
    return args[0] if whole else None
