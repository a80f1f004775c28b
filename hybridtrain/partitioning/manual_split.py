"""Manual splits: by a list, or by marks on the modules.

A list has layer counts, cut points, layer names or name patterns (`split_layers`). Marks, for
`split="manual"`, are set by `partition` and `set_partition`:

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            with partition(0):
                self.encoder = Encoder()
            with partition(1):
                self.decoder = Decoder()

A mark is an attribute of the instance, so copies and pickles keep it, and `state_dict` does not
contain it. A module without a mark belongs to the stage of the nearest enclosing module.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from hybridtrain.errors import SplitError, argument, did_you_mean, setting
from hybridtrain.graph import Layer
from hybridtrain.options import SplitSpec

log = logging.getLogger("hybridtrain")

_MARK = "_pipeline_stage"


class _Current(threading.local):
    stage: int | None = None  # the innermost `partition` of this thread


class _Marking:
    """Marks new modules while any thread is in a `partition`.

    PyTorch's registration hooks run where a module is assigned, not where it is made: they would
    mark a module from outside that is assigned inside, and miss a module from inside that is
    assigned later. So this wraps `nn.Module.__init__`, which every new module calls, and
    `__setstate__`, which every copied or unpickled module calls, until the last thread has left.
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
def partition(index: int) -> Iterator[None]:
    """Marks modules that this thread makes or copies in the block for the stage `index`.

    In nested partitions the innermost counts.

    Raises:
        SplitError: `index` is not the index of a stage.
    """
    _check_index(index)
    outer_stage = _current.stage
    with _marking:
        _current.stage = index
        try:
            yield
        finally:
            _current.stage = outer_stage


def set_partition(module: nn.Module, index: int) -> None:
    """Marks `module` and its submodules for the stage `index`; other marks inside it remain.

    Raises:
        SplitError: `index` is not the index of a stage.
    """
    _check_index(index)
    former_mark = _mark(module)
    for part in module.modules():
        if former_mark is not None and _mark(part) == former_mark:  # made in the same partition
            part.__dict__[_MARK] = index
    module.__dict__[_MARK] = index


def marked_stage(net: nn.Module, name: str, default: int | None) -> int | None:
    """Returns the mark of the module `name` of `net`, or of the nearest enclosing module.

    A name that is not a module, such as an operation in a module's forward, counts as part of the
    nearest enclosing module.
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
    """Returns whether parts of `module` belong to different stages, so that it must be expanded.

    State without a mark belongs to `default`, where None counts as a stage. A container without
    parameters belongs to no stage.
    """
    stages = {
        default if mark is None else mark
        for part, mark in _marks_in(module)
        if _own_state(part) or (mark is not None and not any(part.children()))
    }
    return len(stages) > 1


def counts_by_marks(
    net: nn.Module, layers: Sequence[Layer], stages: int, default_partition: int | None
) -> list[int]:
    """Returns the number of layers of each stage according to the marks.

    A layer without a mark goes to the stage nearest to `default_partition` that the order of layers
    allows; if that is a different stage, it is logged. A layer without mark, parameters and
    buffers, or a repeated call of a stateless module, can run anywhere: it goes to the stage
    nearest to its mark or to `default_partition`, and without either to the previous layer's stage.

    Args:
        net: the model with marks.
        layers: its layers in execution order, with their names in `net`; a repeated call of a
            module has a suffix (`decoder@2`).
        stages: the number of stages.
        default_partition: the stage for layers without a mark; None: a layer with state must have
            a mark.

    Raises:
        SplitError: the marks do not describe `stages` consecutive groups of layers; the message
            names the layer and the reason.
    """
    if not has_marks(net):
        raise SplitError(
            "no module of the model has a partition: make modules inside `with partition(i):`, or "
            "call set_partition"
        )
    if default_partition is not None:
        _check_stage(
            f"{setting('default_partition', default_partition)}", default_partition, stages
        )
    marks: dict[int, int | None] = {}
    for module, mark in _marks_in(net):
        for held in (module, *_own_state(module)):
            marks.setdefault(id(held), mark)
    assigned: list[int | None] = []
    preferred: list[int | None] = []
    moves: list[bool] = []  # layers with state and without a mark
    ran: set[int] = set()
    for layer in layers:
        marked_stages = _marked_stages(net, layer, marks)
        stage = _stage_of(layer, marked_stages, default_partition)
        preferred.append(default_partition if stage is None else stage)
        is_repeated = id(layer.module) in ran or layer.name != strip_call_index(layer.name)
        ran.add(id(layer.module))
        stateless = not any(_own_state(part) for part in layer.module.modules())
        moves.append(marked_stages == {None})
        assigned.append(None if moves[-1] or (is_repeated and stateless) else stage)
    filled = _fill_in(assigned, preferred, stages)
    for layer, is_moved, stage in zip(layers, moves, filled, strict=True):
        if is_moved and stage != default_partition:
            log.info(
                "%s has no partition and goes to stage %d: layers run in stage order, so %s is not "
                "possible",
                layer.name, stage, setting("default_partition", default_partition),
            )  # fmt: skip
    return _counts_of(layers, filled, stages)


def _marked_stages(
    net: nn.Module, layer: Layer, marks: Mapping[int, int | None]
) -> set[int | None]:
    """Returns the marks of the parts of a layer; empty if the layer can run anywhere.

    Parts with state decide, since other parts can run next to them; None stands for such a part
    without a mark. The layer may be a segment of the model's forward, which is not a module of the
    model but contains some of its modules and parameters.

    Args:
        net: the model.
        layer: the layer.
        marks: the marks of modules, parameters and buffers, by id.
    """
    by_name = marked_stage(net, layer.name, None)
    parts = list(layer.module.modules())
    stages = {
        marks.get(id(part), marks.get(id(tensor), by_name))
        for part in parts
        for tensor in _own_state(part)
    }
    if not stages:
        stages = {marks.get(id(part)) for part in parts if not any(part.children())} - {None}
        stages = stages or {by_name} - {None}
    return stages


def _stage_of(
    layer: Layer, marked_stages: Collection[int | None], default: int | None
) -> int | None:
    """Returns the stage of a layer; None if it can run anywhere."""
    stages = {default if mark is None else mark for mark in marked_stages}
    if None in stages:
        raise SplitError(
            f"layer {layer.name!r} has no partition: put its construction into "
            f"`with partition(i):`, call set_partition, or set {argument('default_partition')}"
        )
    if len(stages) > 1:
        listed = _listed(sorted(stage for stage in stages if stage is not None))
        raise SplitError(
            f"layer {layer.name!r} runs as one, but has parts for stages {listed}: put all "
            f"of it on one stage, or make its parts layers of the model"
        )
    return next(iter(stages), None)


def _mark(module: object, default: Any = None) -> Any:
    # not from the instance's dictionary: a compiled module looks it up in the wrapped module
    return getattr(module, _MARK, default)


def _check_index(stage: object) -> None:
    if type(stage) is not int or stage < 0:
        raise SplitError(f"partition {stage!r}: give the index of a stage, 0 for the first")


def _own_state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _marks_in(
    module: nn.Module, around: int | None = None
) -> Iterator[tuple[nn.Module, int | None]]:
    """Yields `module` and all modules in it, each with its own mark or else its parent's."""
    mark = _mark(module, around)
    yield module, mark
    for child in module.children():
        yield from _marks_in(child, mark)


def split_layers(layers: Sequence[Layer], stages: int, split: SplitSpec) -> list[int]:
    """Returns the number of layers of each stage.

    The list `split` has for each stage its number of layers, a name pattern or a list of patterns
    (see `counts_by_patterns`). Or it has for each stage except the first its first layer, by index
    or name; a name may be a group of layers (`blocks` for `blocks.0`).

    Raises:
        SplitError: `split` does not fit the layers; the message says why and lists valid forms.
    """
    n = len(layers)
    entries: list[Any] = list(split)
    if stages == 1 and not entries:
        return [n]
    if all(type(item) is int for item in entries) and len(entries) == stages:
        if sum(entries) != n or min(entries) < 1:
            raise SplitError(
                f"{setting('split', entries)}: layer counts must be positive and add up to the "
                f"model's {n} layers; these add up to {sum(entries)}"
            )
        return entries
    if all(type(item) in (int, str) for item in entries) and len(entries) == stages - 1:
        if len({type(item) for item in entries}) == 1:
            cuts = [_index(layers, item) if isinstance(item, str) else item for item in entries]
            counts = [end - start for start, end in pairwise([0, *cuts, n])]
            if min(counts) < 1:
                raise SplitError(
                    f"{setting('split', entries)}: cut points must increase and lie between 1 and "
                    f"{n - 1}, so that no stage is empty (layer 0 always begins stage 0)"
                )
            return counts
    elif all(isinstance(item, str | list | tuple) for item in entries) and len(entries) == stages:
        return counts_by_patterns(layers, stages, entries)
    raise SplitError(
        f"{setting('split', entries)} does not describe {stages} stages: give {stages} layer "
        f"counts, {stages - 1} cut point{'s' * (stages != 2)} (indices or names of the layers "
        f"that begin a stage), or {stages} name patterns"
    )


def counts_by_patterns(
    layers: Sequence[Layer], stages: int, patterns: Sequence[str | Sequence[str]]
) -> list[int]:
    """Returns the number of layers of each stage according to the patterns.

    Each stage has a name with wildcards (`blocks.[0-3]`), or a list of them. A pattern that matches
    a module matches everything in it (`blocks.3` also `blocks.3.attention`). A layer that no
    pattern matches joins the stage of the previous layer, or of the next layer at the start.

    Raises:
        SplitError: the patterns do not describe `stages` consecutive groups of layers; the message
            names the pattern or layer.
    """
    owner: dict[str, tuple[int, str]] = {}
    for stage, patterns_of_stage in enumerate(patterns):
        for pattern in (
            [patterns_of_stage] if isinstance(patterns_of_stage, str) else patterns_of_stage
        ):
            matched = [
                layer.name
                for layer in layers
                if any(fnmatchcase(name, pattern) for name in (layer.name, *_path(layer.name)))
            ]
            if not matched:
                module_names = dict.fromkeys(name for layer in layers for name in _path(layer.name))
                hint = did_you_mean(pattern, module_names, "layers and groups")
                raise SplitError(f"{argument('split')}: no layer matches {pattern!r}; {hint}")
            for name in matched:
                other_stage, earlier = owner.setdefault(name, (stage, pattern))
                if other_stage != stage:
                    raise SplitError(
                        f"{argument('split')}: layer {name!r} matches {earlier!r} of stage "
                        f"{other_stage} and {pattern!r} of stage {stage}; it can be on only one"
                    )
    assigned = [owner[layer.name][0] if layer.name in owner else None for layer in layers]
    return _counts_of(layers, _fill_in(assigned, [None] * len(assigned), stages), stages)


def _fill_in(
    assigned: Sequence[int | None], preferred: Sequence[int | None], stages: int
) -> list[int]:
    """Assigns each layer without a stage to the stage nearest to its preferred stage.

    The order of stages is kept. A preferred stage of None means the previous layer's stage.
    """
    filled: list[int] = []
    for index, (stage, preference) in enumerate(zip(assigned, preferred, strict=True)):
        previous = filled[-1] if filled else 0
        following = next(
            (later_stage for later_stage in assigned[index:] if later_stage is not None), stages - 1
        )
        if preference is None:
            preference = previous if filled else following
        filled.append(sorted((previous, preference, following))[1] if stage is None else stage)
    return filled


def _counts_of(layers: Sequence[Layer], assigned: Sequence[int], stages: int) -> list[int]:
    """Returns the number of layers of each stage, given the stage of each layer.

    Raises:
        SplitError: a stage does not exist or has no layer, or the stages are not in order.
    """
    for layer, stage in zip(layers, assigned, strict=True):
        _check_stage(f"layer {layer.name!r} is assigned to stage {stage}", stage, stages)
    for (previous_layer, earlier), (layer, stage) in pairwise(zip(layers, assigned, strict=True)):
        if stage < earlier:
            first = next(candidate.name for candidate in layers if candidate.module is layer.module)
            remedy = f"stages run in order, so put {layer.name!r} on a later one or "
            remedy += f"{previous_layer.name!r} on an earlier one"
            if first != layer.name:
                remedy = f"it calls the module of {first!r} again, so put all layers between the "
                remedy += "two calls on one stage"
            raise SplitError(
                f"layer {layer.name!r} is assigned to stage {stage} but runs after "
                f"{previous_layer.name!r} on stage {earlier}: {remedy}"
            )
    counts = [assigned.count(stage) for stage in range(stages)]
    if 0 in counts:
        empty = _listed([stage for stage, count in enumerate(counts) if count == 0])
        raise SplitError(
            f"{stages} stages are requested, but no layer is on stage {empty}: assign one to it, "
            f"or lower {argument('nb_part')}"
        )
    return counts


def _check_stage(subject: str, stage: int, stages: int) -> None:
    """Raises a SplitError that begins with `subject` if the stage does not exist."""
    if not 0 <= stage < stages:
        existing = "is only stage 0" if stages == 1 else f"are stages {_listed(range(stages))}"
        raise SplitError(f"{subject}, but there {existing}")


def _listed(stages: Sequence[int]) -> str:
    """Returns `0 to 3`, or `1 and 3`."""
    if len(stages) > 2 and stages[-1] - stages[0] == len(stages) - 1:
        return f"{stages[0]} to {stages[-1]}"
    *all_but_last, last = map(str, stages)
    return f"{', '.join(all_but_last)} and {last}" if all_but_last else last


def modules_around(names: Collection[str], split: Sequence[Any]) -> set[str]:
    """Returns the modules among `names` that must be expanded to get the layers in `split`."""
    patterns = [name for item in split for name in ([item] if isinstance(item, str) else item)]
    literal = [re.split(r"[*?\[]", name)[0].rpartition(".")[0] for name in patterns]
    return {path for name in literal for path in _path(name)} & set(names)


def strip_call_index(name: str) -> str:
    """Returns a layer's name without its call index: `decoder` for `decoder@2`."""
    return re.sub(r"@\d+$", "", name)


def _path(name: str) -> list[str]:
    """Returns `["a", "a.b"]` for `a.b@2`."""
    return list(accumulate(strip_call_index(name).split("."), "{}.{}".format))


def _index(layers: Sequence[Layer], name: str) -> int:
    for index, layer in enumerate(layers):
        if layer.name == name or layer.name.startswith(f"{name}."):
            return index
    hint = did_you_mean(name, [layer.name for layer in layers], "layers")
    raise SplitError(f"{argument('split')}: there is no layer {name!r}; {hint}")
