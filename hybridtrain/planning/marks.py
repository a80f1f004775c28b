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
from hybridtrain.planning import split_spec
from hybridtrain.planning.split_spec import strip_call_index

_MARK = "_pipeline_stage"


class _Current(threading.local):
    stage: int | None = None  # the partition that this thread is in


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


def _then_mark(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        if _current.stage is not None:
            self.__dict__[_MARK] = _current.stage

    return wrapped


_current = _Current()
_marking = _Marking()


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
    for part in module.modules():
        if before is not None and _mark(part) == before:  # made in one partition with it
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

    State without a mark belongs to `default`, where None counts as a stage too. A container without
    parameters belongs to none.
    """
    wanted = {
        default if mark is None else mark
        for part, mark in _marks_in(module)
        if _own_state(part) or (mark is not None and not any(part.children()))
    }
    return len(wanted) > 1


def counts_by_marks(
    net: nn.Module, layers: Sequence[Layer], stages: int, default_partition: int | None
) -> list[int]:
    """Returns how many layers each stage gets if they go where the marks say.

    A layer with neither a mark nor parameters nor buffers, or a stateless one that runs again, can
    run anywhere: it goes as near to its mark or to `default_partition` as the order allows, and
    without either with the layer before it.

    `layers` are those of `net` in the order in which they run, by their names there; a further call
    of a module has a suffix (`decoder@2`). `default_partition` None allows no layer without a mark.

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
        split_spec.check_stage(f"default_partition={default_partition}", default_partition, stages)
        hint = f" (without a mark: default_partition={default_partition})"
    marks: dict[int, int | None] = {}
    for module, mark in _marks_in(net):
        for held in (module, *_own_state(module)):
            marks.setdefault(id(held), mark)
    assigned: list[int | None] = []
    preferred: list[int | None] = []
    ran: set[int] = set()
    for layer in layers:
        stage = _stage_of(net, layer, marks, default_partition)
        preferred.append(default_partition if stage is None else stage)
        again = id(layer.module) in ran or layer.name != strip_call_index(layer.name)
        ran.add(id(layer.module))
        stateless = not any(_own_state(part) for part in layer.module.modules())
        assigned.append(None if again and stateless else stage)
    filled = split_spec.fill_in(assigned, preferred, stages)
    return split_spec.counts_of(layers, filled, stages, hint)


def _stage_of(
    net: nn.Module, layer: Layer, marks: Mapping[int, int | None], default: int | None
) -> int | None:
    """Returns the stage that the marks ask for; None if the layer can run anywhere.

    What holds state decides, since the rest can be computed next to it. The layer may be a segment
    of the model's forward: not a module of the model, but with some of its modules and parameters,
    whose `marks` are given by identity.
    """
    by_name = marked_stage(net, layer.name, None)
    parts = list(layer.module.modules())
    wanted = {
        marks.get(id(part), marks.get(id(tensor), by_name))
        for part in parts
        for tensor in _own_state(part)
    }
    if not wanted:
        wanted = {marks.get(id(part)) for part in parts if not any(part.children())} - {None}
        wanted = wanted or {by_name} - {None}
    found = {default if mark is None else mark for mark in wanted}
    if None in found:
        raise SplitError(
            f"layer {layer.name!r} has no partition: put its construction into "
            f"`with partition(i):`, call set_partition, or set default_partition="
        )
    if len(found) > 1:
        stages = split_spec.listed(sorted(stage for stage in found if stage is not None))
        raise SplitError(
            f"layer {layer.name!r} runs as one, but has parts for the stages {stages}: place all "
            f"of it on one, or make its parts layers of the model"
        )
    return next(iter(found), None)


def _mark(module: object, default: Any = None) -> Any:
    # not from the instance's dictionary: a compiled module looks it up in what it wraps
    return getattr(module, _MARK, default)


def _check_index(stage: object) -> None:
    if type(stage) is not int or stage < 0:
        raise SplitError(f"partition {stage!r}: give the index of a stage, 0 for the first")


def _own_state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _marks_in(
    module: nn.Module, around: int | None = None
) -> Iterator[tuple[nn.Module, int | None]]:
    """Yields `module` and all modules in it, each with its mark or that of the nearest around."""
    mark = _mark(module, around)
    yield module, mark
    for child in module.children():
        yield from _marks_in(child, mark)
