"""Marks that assign modules to stages: `partition` and `set_partition`, for `split="manual"`.

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            with partition(0):
                self.encoder = Encoder()
            with partition(1):
                self.decoder = Decoder()

A mark is an attribute of the instance, so that copies and pickles keep it; `state_dict` does not
have it. A module without one goes with the nearest module around it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hybridtrain.errors import SplitError
from hybridtrain.graph.layer import Layer
from hybridtrain.planning.split_spec import (
    check_stage,
    counts_of,
    fill_in,
    listed,
    strip_call_index,
)

_MARK = "_pipeline_stage"


class _CurrentPartition(threading.local):
    """The partition that this thread is in; None outside of any."""

    stage: int | None = None


class _Marking:
    """Marks new modules while any thread is in a `partition`.

    PyTorch's registration hooks see where a module is put, not where it is made: they would mark
    a module from outside that is assigned inside, and miss one from inside that is assigned
    later. Every new module passes through `nn.Module.__init__`, and every copied or unpickled one
    through `__setstate__`; these two are wrapped until the last thread has left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                for name in ("__init__", "__setstate__"):
                    self._originals[name] = getattr(nn.Module, name)
                    setattr(nn.Module, name, _then_mark(self._originals[name]))

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                for name, original in self._originals.items():
                    setattr(nn.Module, name, original)


_current = _CurrentPartition()
_marking = _Marking()


def _then_mark(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        if _current.stage is not None:
            self.__dict__[_MARK] = _current.stage

    return wrapped


@contextmanager
def partition(stage: int) -> Iterator[None]:
    """Marks the modules that this thread makes inside, also by copying, for `stage`.

    Of nested partitions the innermost counts.

    Raises:
        SplitError: `stage` is not the index of a stage.
    """
    _check_index(stage)
    before = _current.stage
    with _marking:
        _current.stage = stage
        try:
            yield
        finally:
            _current.stage = before


def set_partition(module: nn.Module, stage: int) -> None:
    """Marks `module` for `stage`, with what is in it; parts that are marked otherwise stay.

    Raises:
        SplitError: `stage` is not the index of a stage.
    """
    _check_index(stage)
    before = _mark(module)
    if before is not None:
        # made in one partition, all parts have a mark of their own
        for part in module.modules():
            if _mark(part) == before:
                part.__dict__[_MARK] = stage
    module.__dict__[_MARK] = stage


def marked_stage(net: nn.Module, name: str, default: int | None) -> int | None:
    """Returns the mark of the module `name` of `net`, or else of the nearest one around it.

    A name that `net` does not have, such as that of an operation in a module's forward, counts as
    being in the nearest module that it does have.
    """
    module: object = net
    stage: int | None = _mark(net, default)
    for part in strip_call_index(name).split(".") if name else ():
        module = getattr(module, part, None)
        stage = _mark(module, stage)
    return stage


def has_marks(net: nn.Module) -> bool:
    """Returns whether any module in `net` has a mark."""
    return any(_mark(module) is not None for module in net.modules())


def spans_stages(module: nn.Module, default: int | None = None) -> bool:
    """Returns whether parts of `module` belong to different stages, so that it must be cut inside.

    A container without parameters belongs to none itself.

    Args:
        module: any module.
        default: the stage of parameters and buffers without a mark; None counts as a stage too.
    """
    wanted = {
        default if mark is None else mark
        for part, mark in marks_in(module)
        if own_state(part) or (mark is not None and not any(part.children()))
    }
    return len(wanted) > 1


def _mark(module: object, default: Any = None) -> Any:
    # not from the instance's dictionary: a compiled module looks it up in what it wraps
    return getattr(module, _MARK, default)


def _check_index(stage: object) -> None:
    if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
        raise SplitError(f"partition {stage!r}: give the index of a stage, 0 for the first")


def own_state(module: nn.Module) -> list[Tensor]:
    """Returns the parameters and buffers that `module` holds itself."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def marks_in(
    module: nn.Module, around: int | None = None
) -> Iterator[tuple[nn.Module, int | None]]:
    """Yields `module` and all modules in it, each with its mark or that of the nearest around."""
    mark = _mark(module, around)
    yield module, mark
    for child in module.children():
        yield from marks_in(child, mark)


def counts_by_marks(
    net: nn.Module, layers: Sequence[Layer], stages: int, default_partition: int | None
) -> list[int]:
    """Returns how many layers each stage gets if they go where the marks say.

    A layer with neither a mark nor parameters nor buffers, or a stateless one that runs again, can
    run anywhere: it goes as near to its mark or to `default_partition` as the order allows, and
    without either with the layer before it.

    Args:
        net: the model.
        layers: its layers in the order in which they run, by their names in `net`; a further
            call of a module has a suffix (`decoder@2`).
        stages: how many stages.
        default_partition: the stage of layers without a mark; None allows none.

    Raises:
        SplitError: the marks do not describe `stages` runs of layers; says which layer, and why.
    """
    if not has_marks(net):
        raise SplitError(
            "no module of the model has a partition: make modules inside `with partition(i):`, or "
            "call set_partition"
        )
    hint = ""
    if default_partition is not None:
        check_stage(f"default_partition={default_partition}", default_partition, stages)
        hint = f" (without a mark: default_partition={default_partition})"
    marks: dict[int, int | None] = {}
    for module, mark in marks_in(net):
        for held in (module, *own_state(module)):
            marks.setdefault(id(held), mark)
    assigned: list[int | None] = []
    preferred: list[int | None] = []
    ran: set[int] = set()
    for layer in layers:
        stage = _stage_of(net, layer, marks, default_partition)
        preferred.append(default_partition if stage is None else stage)
        again = id(layer.module) in ran or layer.name != strip_call_index(layer.name)
        ran.add(id(layer.module))
        stateless = not any(own_state(part) for part in layer.module.modules())
        assigned.append(None if again and stateless else stage)
    return counts_of(layers, fill_in(assigned, preferred, stages), stages, hint)


def _stage_of(
    net: nn.Module, layer: Layer, marks: Mapping[int, int | None], default: int | None
) -> int | None:
    """Returns the stage that the marks ask for; None if the layer can run anywhere.

    What holds state decides, since the rest can be computed next to it. The layer may be a segment
    of the model's forward: not a module of the model, but with some of its modules and parameters.

    Args:
        net: the model.
        layer: a layer of it.
        marks: by identity, of the model's modules, parameters and buffers.
        default: for state without a mark.
    """
    by_name = marked_stage(net, layer.name, None)
    parts = list(layer.module.modules())
    wanted = {
        marks.get(id(part), marks.get(id(tensor), by_name))
        for part in parts
        for tensor in own_state(part)
    }
    if not wanted:
        wanted = {marks.get(id(part)) for part in parts if not any(part.children())} - {None}
        wanted = wanted or {by_name}
        if wanted == {None}:
            return None
    found = {default if mark is None else mark for mark in wanted}
    known = sorted(stage for stage in found if stage is not None)
    if len(known) < len(found):
        raise SplitError(
            f"layer {layer.name!r} has no partition: put its construction into "
            f"`with partition(i):`, call set_partition, or set default_partition="
        )
    if len(known) > 1:
        raise SplitError(
            f"layer {layer.name!r} runs as one, but has parts for the stages {listed(known)}: "
            f"place all of it on one, or make its parts layers of the model"
        )
    return known[0]
