"""Models that are built now and get their values later, module by module, each on its device.

A constructor runs as it is, but its tensors are on `meta`, without memory. What would have been
computed goes on a tape (see `recorder`, `tape`). To materialise a module means to do over the
operations that led to what is in its tensors, and no others.

The values are those of plain construction, bit for bit. For that, a random operation also runs
when it is recorded, into memory that is soon dropped: so the generator moves on as it would, and
whatever is drawn later is what it would be. The tape has the state that the operation drew from.
All ranks do this, also those that receive their values: a constructor may decide by what it draws.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hybridtrain.deferred.recorder import AsIfOnCPU, Recorder
from hybridtrain.deferred.tape import CannotDefer, Deferred, alive, find, tensors_in, window_of
from hybridtrain.errors import UserError

__all__ = ["CannotDefer", "construct", "deferred_init", "is_deferred", "materialize"]

T = TypeVar("T")

log = logging.getLogger("hybridtrain")


def construct(build: Callable[[], T]) -> T:
    """What `build` returns, deferred if it is a module and all of it can be deferred.

    If not, it is called a second time, without any of this.
    """
    before = torch.get_rng_state()
    earlier = alive()
    try:
        with deferred_init():
            made = build()
        _check_within_reach(made, earlier)
    except CannotDefer as reason:
        log.debug("the model is built at once, not module by module: %s", reason)
    else:
        return made
    torch.set_rng_state(before)
    return build()


@contextmanager
def deferred_init() -> Iterator[None]:
    """A context in which new tensors are on `meta`, to get their values in `materialize`.

    PyTorch's default generator ends as after plain construction. Between the end of the context
    and `materialize` no tensor may be changed. Contexts are not to be nested.

    Raises:
        CannotDefer: something cannot be deferred, or failed: plain construction works, or shows
            the constructor's own error.
    """
    recorder = Recorder()
    try:
        with recorder, AsIfOnCPU(recorder):
            yield
    except UserError as error:
        raise recorder.failure or error from None
    except CannotDefer:
        raise
    except Exception as error:
        raise CannotDefer(f"{type(error).__name__}: {error}") from error
    if recorder.failure is not None:  # the constructor has caught it
        raise recorder.failure


def is_deferred(module: nn.Module) -> bool:
    """Whether some tensor of `module` still waits for `materialize`."""
    return any(find(tensor) is not None for tensor in _tensors_of(module))


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, values: bool = True) -> None:
    """Gives `module` its values, on `device`, in place.

    Tensors stay the objects that they are. Those that share memory go on sharing it, also with
    modules that are materialised later on the same device. What was never deferred is moved by
    `module.to(device)`; as there, tensors that are neither parameters nor buffers are on the CPU.

    Args:
        module: built under `deferred_init`, or a part of such a module.
        device: where its parameters and buffers are to be.
        values: whether these get their values. Without, their memory is uninitialised: for
            replicas that receive them.
    """
    moved = {
        id(tensor) for m in module.modules() for tensor in tensors_in([m._parameters, m._buffers])
    }
    # first the other tensors, which always get their values, and may share a parameter's memory
    for tensor in sorted(_tensors_of(module), key=lambda tensor: id(tensor) in moved):
        deferred = find(tensor)
        if deferred is None:
            continue
        window = window_of(tensor)
        if id(tensor) in moved:
            storage = deferred.on(device, values)
        else:
            storage = deferred.on(torch.device("cpu"), values=True)
        _become(tensor, window.on(storage))
    module.to(device)


@torch.no_grad()
def materialize_rest(module: nn.Module, device: torch.device) -> None:
    """Gives what is still deferred in `module` its values on `device`; the rest stays."""
    for tensor in _tensors_of(module):
        deferred = find(tensor)
        if deferred is not None:
            _become(tensor, window_of(tensor).on(deferred.on(device, values=True)))


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Every tensor in the attributes of `module` and its modules, once."""
    return list({id(t): t for m in module.modules() for t in tensors_in(vars(m))}.values())


def _become(tensor: Tensor, real: Tensor) -> None:
    """Turns `tensor` into `real` and leaves the object, its attributes and its hooks in place."""
    if tensor.is_leaf:
        real.requires_grad_(tensor.requires_grad)
        real._backward_hooks = tensor._backward_hooks
        real._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    # what `torch.utils.swap_tensors` does, but that refuses tensors with weak references, of which
    # `nn.LSTM` has some to its weights; they may point to the object, which stays
    torch._C._swap_tensor_impl(tensor, real)


def _check_within_reach(made: object, earlier: WeakSet[Deferred]) -> None:
    """Makes sure that `materialize` finds every tensor that is deferred since `earlier`.

    Raises:
        CannotDefer: one is in a closure, an autograd graph or TorchScript, say.
    """
    found = {find(t) for t in _tensors_of(made)} if isinstance(made, nn.Module) else set()
    if any(deferred not in found for deferred in alive() - earlier):
        gc.collect()  # or it is nothing but in a cycle
        if any(deferred not in found for deferred in alive() - earlier):
            raise CannotDefer("a tensor is kept where it cannot be found")
