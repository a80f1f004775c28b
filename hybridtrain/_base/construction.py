"""Constructs a model in a process that owns only a part of it.

`construct_part` runs `build` twice. The first run, on the meta device, determines which registered
or cloned parameters end up under names that the process owns. The second run is normal
construction, except that unowned parameters have memory only while an operation uses them; only the
most recently written one keeps its memory. Every random operation therefore fills memory of the
full size, and the generator advances as usual.

The content of a dropped parameter is lost, so results computed from it are dropped too. If a
dropped tensor is part of the owned model at the end, or the constructor reads a dropped value, the
model is built normally instead. A wrong guess in the first run costs time and memory, but never
changes a value.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tag, Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hybridtrain._base.torch_private import TorchDispatchMode
from hybridtrain.errors import SplitError

log = logging.getLogger("hybridtrain")

_BLOCK = 1 << 16  # distinct random numbers in the stand-in for a parameter
_TRIM = 1 << 24  # freed bytes after which memory is returned to the system
# The results of these operations, or the number of their random draws, may depend on tensor
# contents in ways that cannot be tracked; some only overwrite their first argument.
_UNPREDICTABLE = {Tag.nondeterministic_seeded, Tag.data_dependent_output, Tag.dynamic_output_shape}
_RANDOM_FILLS = ("normal", "uniform", "random", "exponential", "geometric", "cauchy", "log_normal")
_FILLS = {f"aten::{name}_" for name in (*_RANDOM_FILLS, "zero", "fill")}
# The attribute of a parameter with the parameters that it was computed from.
_SOURCE = "_hybridtrain_source"
# Functions that access a tensor's memory without an operator.
_READS = ("numpy", "data_ptr", "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__")


def construct_part(build: Callable[[], nn.Module], owns: Callable[[str], bool]) -> nn.Module:
    """Returns `build()` with memory and values only for the part that this process owns.

    Owned parameters and buffers have bitwise the initial values of normal construction, and
    PyTorch's default generator ends in the same state. The others become meta tensors with the same
    shapes, dtypes, `requires_grad` and ties. A parameter with several names is owned if one of the
    names is owned.

    In addition to the owned part, construction needs memory for one operation on the largest
    parameter and for the buffers of the whole model. If the constructor reads the values of a
    parameter, or computes others from it, the whole model is built in memory; a debug message says
    why.

    Args:
        build: creates the model on the CPU. It may run three times, and must draw from the default
            generators of PyTorch, NumPy or Python, or from generators that it creates itself.
        owns: `owns(name)` returns whether this process owns the parameter or buffer `name`.
    """
    draws = default_generators()
    try:
        # In the order of creation, which both runs share: the constructor is the same code.
        unowned = iter(_unowned(build, owns))
        rewind(draws)
        dropping = _Dropping(lambda storage: next(unowned, False))
        net = _without_rest(dropping.run(build), owns)
        # `sizes` has weak keys: tensors in reference cycles would look like parts of the model.
        gc.collect()
        if dropping.read or dropping.sizes:  # the constructor may have caught the error of a read
            raise RuntimeError(
                dropping.read or "a value is computed from a parameter that is not owned"
            )
    except Exception as error:  # normal construction works, or raises the constructor's own error
        log.debug("building the whole model, because a part cannot be built separately: %r", error)
    else:
        return net
    # Each build must draw from the same state, whatever the one before has drawn.
    rewind(draws)
    return _without_rest(build(), owns)


def construct_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Returns `build()` on the meta device: its structure and shapes, without values.

    The default generators of PyTorch, NumPy and Python are left unchanged.

    Raises:
        SplitError: a parameter is on another device, for example because `build` returns an
            existing module.
        Exception: raised by a constructor that needs values.
    """
    draws = default_generators()
    try:
        with torch.device("meta"):
            # Drops nothing; the mode only keeps fills on the meta device from loading the compiler.
            net = _Dropping(lambda storage: None).run(build)
    finally:
        rewind(draws)
    for name, parameter in net.named_parameters():
        if not parameter.is_meta:
            raise SplitError(f"parameter {name} is created on the device {parameter.device}")
    return net


def construct_without(
    build: Callable[[], nn.Module], left_out: Callable[[nn.Module], Iterable[str]]
) -> nn.Module:
    """Returns `build()` with some parameters on the meta device, which take no memory.

    They are left out as soon as the constructor registers them, so the values of other parameters
    may differ from those of normal construction.

    Args:
        build: creates the model on the default device. It runs twice, first on the meta device.
        left_out: returns the names of the parameters to leave out, from the model of the first run.
    """
    made: list[nn.Parameter] = []

    def record(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        made.append(parameter)

    draws = default_generators()
    with torch.device("meta"), register_module_parameter_registration_hook(record):
        net = _Dropping(lambda storage: None).run(build)
    rewind(draws)
    named = dict(net.named_parameters(remove_duplicate=False))
    # By identity: a tied parameter is left out under all its names.
    ids = {id(named[name]) for name in left_out(net)}
    drops = iter([id(parameter) in ids for parameter in made])

    def replace(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        # A registration that the first run did not have keeps its memory.
        if not next(drops, False) or parameter.is_meta:
            return None
        return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)

    with register_module_parameter_registration_hook(replace):  # type: ignore[arg-type]
        return _Dropping(lambda storage: None).run(build)


def computed_from(parameter: nn.Parameter, source: Tensor) -> None:
    """Records that a parameter was computed from another, which it replaces in the model.

    `construct_part` then gives memory to the other only where this one is owned.
    """
    if source.is_meta:
        vars(parameter)[_SOURCE] = (source,)


def has_values(tensor: Tensor) -> bool:
    """Returns whether a tensor is neither on the meta device nor dropped by `construct_part`."""
    return not tensor.is_meta and (not tensor.numel() or tensor.untyped_storage().nbytes() > 0)


def default_generators() -> tuple[Tensor, Any, Any]:
    """Returns the states of the default generators of PyTorch, Python and NumPy."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def rewind(states: tuple[Tensor, Any, Any]) -> None:
    """Restores the default generators to states from `default_generators`."""
    torch_state, python_state, numpy_state = states
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)


def give_back_memory() -> None:
    """Returns freed memory to the system, which glibc does not always do automatically."""
    with suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on `device` with random values, for a tensor on the meta device.

    The values have the usual scale of weights. A block of numbers is repeated, because drawing all
    numbers would take longer than a forward.
    """
    value = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    if not value.is_floating_point():
        return value
    if value.dim() < 2:
        return value.fill_(1)
    # A generator of its own, so that measuring changes no draws.
    block = torch.rand(_BLOCK, generator=torch.Generator().manual_seed(0)).to(device)
    bound = (3 * len(value) / value.numel()) ** 0.5  # preserves the variance of its input
    flat = value.view(-1)
    whole = len(flat) // _BLOCK * _BLOCK
    numbers = (2 * block - 1) * bound
    flat[:whole].view(-1, _BLOCK).copy_(numbers)
    flat[whole:].copy_(numbers[: len(flat) - whole])
    return value


def _unowned(build: Callable[[], nn.Module], owns: Callable[[str], bool]) -> list[bool]:
    """Returns, for each registered or cloned parameter, whether it ends up as not owned.

    A parameter without a final name, such as a template that a constructor copies, counts as owned.
    """
    storages: list[UntypedStorage] = []
    with torch.device("meta"):
        net = _Dropping(lambda storage: storages.append(storage)).run(build)
    named = [
        (name, storage)
        for name, tensor in _named_tensors(net)
        for storage in _storages([tensor, *vars(tensor).get(_SOURCE, ())])
    ]
    # By storage: a parameter with an owned and another name is owned.
    owned = {storage for name, storage in named if owns(name)}
    unowned = {storage for _, storage in named} - owned
    return [storage in unowned for storage in storages]


def _without_rest(net: nn.Module, owns: Callable[[str], bool]) -> nn.Module:
    """Replaces the parameters and buffers of `net` that are not owned with meta tensors."""
    drop_values([net], [tensor for name, tensor in _named_tensors(net) if owns(name)])
    return net


def drop_values(modules: Iterable[nn.Module], keep: Iterable[Tensor]) -> None:
    """Replaces the parameters and buffers of `modules` that are not in `keep` with meta tensors.

    The meta tensors have the same shapes, dtypes and ties, and parameters the same `requires_grad`.
    """
    replacements = {id(tensor): tensor for tensor in keep}
    for module in {part: None for root in modules for part in root.modules()}:
        if isinstance(module, torch.jit.ScriptModule):
            continue  # a module with tensors that cannot be replaced
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or not _storages(tensor):
                    continue
                if id(tensor) not in replacements:
                    meta = torch.empty_like(tensor, device="meta")
                    if isinstance(tensor, nn.Parameter):
                        meta = nn.Parameter(meta, tensor.requires_grad)
                    # Such as marks that a library puts on its parameters.
                    meta.__dict__.update(tensor.__dict__)
                    replacements[id(tensor)] = meta
                    # A module that is reached twice finds the replacement in its table.
                    replacements[id(meta)] = meta
                if isinstance(module, nn.RNNBase):  # it keeps a second list of its weights
                    setattr(module, name, replacements[id(tensor)])
                else:
                    table[name] = replacements[id(tensor)]  # type: ignore[assignment]


class _Dropping(TorchDispatchMode):
    """Runs a constructor with some storages that have memory only while operations use them.

    Attributes:
        sizes: the sizes in bytes of the storages without memory.
        read: the error message of a read of such a storage, or "".
    """

    def __init__(self, drops: Callable[[UntypedStorage], bool | None]) -> None:
        """`drops(storage)` is called for every registered or cloned parameter; True drops it."""
        super().__init__()
        self.sizes: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()
        self.read = ""
        self._drops = drops
        self._last: UntypedStorage | None = None
        self._freed = 0

    def run(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Returns `build()`."""
        hook = register_module_parameter_registration_hook(lambda _, name, p: self._made(p))
        with self, _Reads(self), hook:
            return build()

    def check_not_read(self, what: str, values: object) -> None:
        """Raises an error if a tensor in `values` has a storage without memory."""
        if self._dropped(values):
            self.read = f"{what} needs the values of a parameter that is not owned"
            raise RuntimeError(self.read)

    def _dropped(self, values: object) -> set[UntypedStorage]:
        return {storage for storage in _storages(values) if storage in self.sizes}

    def _made(self, tensor: Tensor) -> None:
        for storage in _storages(tensor):
            if self._drops(storage):
                self._keep_last(storage)

    def _keep_last(self, storage: UntypedStorage) -> None:
        # The one before is dropped only now, because a constructor usually fills what it has just
        # registered.
        last, self._last = self._last, storage
        if last is not None and last is not storage:
            self._drop(last)
        self.sizes.pop(storage, None)

    def _drop(self, storage: UntypedStorage) -> None:
        if storage.nbytes():
            self.sizes[storage] = storage.nbytes()
            # Frees the memory and leaves the tensors that share the storage as they are.
            storage.resize_(0)
            self._freed += self.sizes[storage]
        if self._freed > _TRIM:
            self._freed = 0
            give_back_memory()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch loads its compiler, which takes 1.5 seconds and 150 MiB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if name in _FILLS and args[0].is_meta:
            return args[0]  # on the meta device, PyTorch would load its compiler for it
        dropped = self._dropped((args, kwargs))
        # These read shapes only.
        if not dropped or name.endswith("_like") or name.startswith("aten::new_"):
            result = func(*args, **kwargs)  # the content of dropped tensors is irrelevant
        else:
            if not _UNPREDICTABLE.isdisjoint(func.tags) and name not in _FILLS:
                self.check_not_read(name, (args, kwargs))
            for storage in dropped:
                # Of full size again, so that the operation draws as many numbers as in normal
                # construction.
                storage.resize_(self.sizes[storage])
            result = func(*args, **kwargs)
            if name in _FILLS and result.nbytes == _storages(result)[0].nbytes():
                self._keep_last(*_storages(result))  # all of its content is valid again
            else:
                arguments = zip(args, func._schema.arguments, strict=False)
                written_arguments = [
                    argument for argument, a in arguments if a.is_write
                ]  # `out` is the result
                # The results too: they were computed from memory without content.
                for storage in {*dropped, *_storages((result, written_arguments))}:
                    self._drop(storage)
        if name == "aten::clone":  # `copy.deepcopy` clones without registering parameters
            self._made(result)
        return result


class _Reads(TorchFunctionMode):
    """Detects reads of a storage without memory outside operators."""

    def __init__(self, dropping: _Dropping) -> None:
        super().__init__()
        self._dropping = dropping

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _READS:
            self._dropping.check_not_read(func.__name__, args)
        return func(*args, **(kwargs or {}))


def _named_tensors(net: nn.Module) -> list[tuple[str, Tensor]]:
    named = net.named_parameters(remove_duplicate=False), net.named_buffers(remove_duplicate=False)
    return [*named[0], *named[1]]


def _storages(tree: Any) -> list[UntypedStorage]:
    """Returns the storages of the strided tensors in `tree`."""
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor)
        and leaf.layout == torch.strided
        and not nn.parameter.is_lazy(leaf)
    ]
