"""Construction of a model in a process that will own only a part of it.

`build` runs twice. The first run, on the meta device, only tells which of the parameters that the
constructor registers or clones end up under names that the process owns. The second run is plain
construction, but of the parameters that are not owned only the last one written keeps its memory;
the others get it back while an operation works on them. So every random operation draws into
memory of the full size, and the generator moves on as always.

Nobody knows what was in a dropped parameter. So what is computed from its content is dropped too.
If anything dropped is alive at the end, or the constructor asked for its value, the model is built
plainly instead. A wrong guess of the first run costs time and memory, never a value.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

log = logging.getLogger("hybridtrain")

# Smaller storages are not worth the trouble, in bytes.
_SMALL = 1 << 16
# So much is freed before the allocator is asked to give it back to the system, in bytes.
_TRIM = 1 << 24

# Results of these operations, or how much they draw, may depend on content in ways that cannot be
# followed; but some only overwrite their first argument.
_UNPREDICTABLE = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
_RANDOM_FILLS = ("normal", "uniform", "random", "exponential", "geometric", "cauchy", "log_normal")
_FILLS = {f"aten::{name}_" for name in (*_RANDOM_FILLS, "zero", "fill", "copy")}
# Ways to a tensor's memory that are not operations.
_READS = {
    getattr(Tensor, name)
    for name in ("numpy", "data_ptr", "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__")
}


def construct_part(build: Callable[[], nn.Module], owns: Callable[[str], bool]) -> nn.Module:
    """Returns `build()` with memory and values only for what this process owns.

    Owned parameters and buffers have bit for bit the initial values of plain construction, and
    PyTorch's default generator ends where plain construction ends. The others become meta tensors
    with the same shapes, dtypes, `requires_grad` and ties, which cannot be read. A parameter with
    several names is owned if one of its names is.

    Beside what is owned, construction needs memory for one operation on the largest parameter and
    for the buffers of the whole model. A constructor that looks at the values of a parameter, or
    computes others from it, is run plainly, with the memory of the whole model; the log says why
    at the debug level.

    Args:
        build: makes the model on the CPU. It may run three times, and must draw from the default
            generators of PyTorch, NumPy or Python, or from generators that it makes itself.
        owns: whether this process owns the parameter or buffer of this qualified name.
    """
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def rewind() -> None:
        torch.set_rng_state(draws[0])
        random.setstate(draws[1])
        np.random.set_state(draws[2])

    try:
        unowned = iter(_unowned(build, owns))
        rewind()
        dropping = _Construction(lambda storage: next(unowned, False))
        net = _without_rest(dropping.run(build), owns)
        dropping.check_gone()
    except Exception as error:  # plain construction works, or shows the constructor's own error
        log.debug("the model is built whole, as a part of it cannot be: %r", error)
    else:
        return net
    rewind()
    return _without_rest(build(), owns)


def _unowned(build: Callable[[], nn.Module], owns: Callable[[str], bool]) -> list[bool]:
    """Returns, for each parameter that is registered or cloned, whether it ends up as not owned.

    What ends up without a name, as a template that a constructor copies, does not.
    """
    seen: list[UntypedStorage] = []

    def drops(storage: UntypedStorage) -> bool:
        seen.append(storage)
        return False

    with torch.device("meta"):
        net = _Construction(drops).run(build)
    named = [(name, _storage(tensor)) for name, tensor in _named_tensors(net)]
    owned = {storage for name, storage in named if owns(name)}
    unowned = {storage for _, storage in named} - owned
    return [storage in unowned for storage in seen]


def _without_rest(net: nn.Module, owns: Callable[[str], bool]) -> nn.Module:
    """Puts meta tensors where `net` has parameters and buffers that are not owned."""
    owned = {id(tensor) for name, tensor in _named_tensors(net) if owns(name)}
    replaced: dict[int, Tensor] = {}
    for module in net.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or id(tensor) in owned or _storage(tensor) is None:
                continue
            if id(tensor) not in replaced:
                meta = torch.empty_like(tensor, device="meta")
                if isinstance(tensor, nn.Parameter):
                    meta = nn.Parameter(meta, tensor.requires_grad)
                meta.__dict__.update(tensor.__dict__)
                replaced[id(tensor)] = meta
            setattr(module, name, replaced[id(tensor)])
    return net


class _Construction(TorchDispatchMode):
    """Runs a constructor in which some storages have memory only while operations use them."""

    def __init__(self, drops: Callable[[UntypedStorage], bool]) -> None:
        """`drops` is told of every parameter that is registered or cloned, and says which drop."""
        super().__init__()
        self._drops = drops
        self._sizes: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()
        self._last: UntypedStorage | None = None
        self._freed = 0
        self._failure: RuntimeError | None = None

    def run(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Returns `build()`."""
        hook = register_module_parameter_registration_hook(lambda _, name, p: self._made(p))
        try:
            with self, _Reads(self):
                return build()
        finally:
            hook.remove()

    def check_gone(self) -> None:
        """Makes sure that nothing without values is left, where somebody could read it."""
        if self._failure is not None:
            raise self._failure  # the constructor has caught it
        if self._sizes:
            gc.collect()
        if self._sizes:
            raise RuntimeError(f"{len(self._sizes)} tensors depend on parameters not owned")

    def check_not_read(self, what: object, values: object) -> None:
        """Raises an error if there is a storage without memory in `values`."""
        if self._dropped(values):
            self._failure = RuntimeError(f"{what} needs the values of a parameter not owned")
            raise self._failure

    def _made(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        if storage is None or not self._drops(storage) or storage in self._sizes:
            return
        if storage.resizable() and storage.nbytes() > _SMALL:
            self._keep_last(storage)

    def _keep_last(self, storage: UntypedStorage) -> None:
        if self._last is not None and self._last is not storage:
            self._drop(self._last)
        self._last = storage
        self._sizes.pop(storage, None)

    def _drop(self, storage: UntypedStorage) -> None:
        if storage.nbytes():
            self._sizes[storage] = storage.nbytes()
            storage.resize_(0)
            self._freed += self._sizes[storage]
        if self._freed > _TRIM:
            self._freed = 0
            _trim()

    def _dropped(self, values: object) -> set[UntypedStorage]:
        return {storage for storage in _storages(values) if storage in self._sizes}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch loads its compiler, which takes seconds and 200 MiB

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _FILLS and args[0].is_meta:
            return args[0]  # on meta PyTorch would load its compiler for it
        dropped = self._dropped((args, kwargs))
        if not dropped or name.endswith("_like") or name.startswith("aten::new_"):
            result = func(*args, **kwargs)  # the content of what is dropped does not matter
        else:
            if not _UNPREDICTABLE.isdisjoint(func.tags) and name not in _FILLS:
                self.check_not_read(name, (args, kwargs))
            sources = self._dropped((args[1:], kwargs))
            for storage in dropped:
                storage.resize_(self._sizes[storage])
            result = func(*args, **kwargs)
            if name in _FILLS and not sources and _is_whole(result):
                self._keep_last(result.untyped_storage())
            else:
                for storage in {*dropped, *_storages((result, _written(func, args, kwargs)))}:
                    self._drop(storage)
        if name == "aten::clone":  # as `copy.deepcopy` does, which registers nothing
            self._made(result)
        return result


class _Reads(TorchFunctionMode):
    """Notices reads of a storage without memory that are not operations."""

    def __init__(self, construction: _Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            self._construction.check_not_read(func, args)
        return func(*args, **(kwargs or {}))


def _trim() -> None:
    """Gives freed memory back to the system, as glibc does not where small pieces lie between."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that the operation writes to."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return [given[a.name] for a in func._schema.arguments if a.is_write and a.name in given]


def _is_whole(tensor: Tensor) -> bool:
    """Whether nothing else is in the memory of `tensor`."""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _named_tensors(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(
        net.named_parameters(remove_duplicate=False), net.named_buffers(remove_duplicate=False)
    )


def _storage(tensor: Tensor) -> UntypedStorage | None:
    """Returns the memory of `tensor`; None where it is not one block, or not known yet."""
    if tensor.layout != torch.strided or nn.parameter.is_lazy(tensor):
        return None
    return tensor.untyped_storage()


def _storages(tree: Any) -> Iterator[UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, UntypedStorage):
            yield leaf
        elif isinstance(leaf, Tensor) and (storage := _storage(leaf)) is not None:
            yield storage
