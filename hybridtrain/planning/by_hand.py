"""How many layers each stage gets if they are placed by hand: by marks, or by patterns of names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

from torch import nn

from hybridtrain.errors import SplitError
from hybridtrain.graph.layer import Layer
from hybridtrain.planning.marks import (
    has_marks,
    marked_stage,
    marks_in,
    own_state,
    strip_call_index,
)


def counts_by_marks(
    net: nn.Module, layers: Sequence[Layer], stages: int, default_partition: int | None
) -> list[int]:
    """How many layers each stage gets if they go where the marks say.

    A layer with neither a mark nor parameters nor buffers, or a stateless one that runs again, can
    run anywhere: it is as near to its mark or to `default_partition` as the order allows, and
    without either with the layer before it.

    Args:
        net: the model.
        layers: its layers in the order in which they run, by their names in `net`; a further
            use of a module may be told apart by a suffix (`decoder@2`).
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
        _check_range(f"pipeline.default_partition={default_partition}", default_partition, stages)
        hint = f" (without a mark: pipeline.default_partition={default_partition})"
    marks: dict[int, int | None] = {}
    for module, mark in marks_in(net):
        for held in (module, *own_state(module)):
            marks.setdefault(id(held), mark)
    placed: list[int | None] = []
    preferred: list[int | None] = []
    ran: set[int] = set()
    for layer in layers:
        stage = _stage_of(net, layer, marks, default_partition)
        preferred.append(default_partition if stage is None else stage)
        again = id(layer.module) in ran or layer.name != strip_call_index(layer.name)
        ran.add(id(layer.module))
        stateless = not any(own_state(part) for part in layer.module.modules())
        placed.append(None if again and stateless else stage)
    return _counts(layers, _fill_in(placed, preferred, stages), stages, hint)


def counts_by_patterns(
    layers: Sequence[Layer], stages: int, patterns: Sequence[str | Sequence[str]]
) -> list[int]:
    """How many layers each stage gets if they go where the patterns say.

    A layer that no pattern matches goes with the one before it, at the start with the one after.

    Args:
        layers: the layers in the order in which they run.
        stages: how many stages.
        patterns: for each stage a name with wildcards (`blocks.[0-3]`), or a list of them; what
            matches a module matches all in it (`blocks.3` also `blocks.3.attention`).

    Raises:
        SplitError: the patterns do not describe `stages` runs of layers; says which, and why.
    """
    if len(patterns) != stages:
        raise SplitError(
            f"pipeline.split has patterns for {len(patterns)} stages, but pipeline.nb_part={stages}"
        )
    owner: dict[str, tuple[int, str]] = {}
    for stage, given in enumerate(patterns):
        for pattern in [given] if isinstance(given, str) else given:
            matched = [layer.name for layer in layers if _matches(layer.name, pattern)]
            if not matched:
                raise _unmatched(pattern, layers)
            for name in matched:
                other, earlier = owner.setdefault(name, (stage, pattern))
                if other != stage:
                    raise SplitError(
                        f"pipeline.split: layer {name!r} matches {earlier!r} of stage {other} and "
                        f"{pattern!r} of stage {stage}; it can be on one"
                    )
    placed = [owner[layer.name][0] if layer.name in owner else None for layer in layers]
    return _counts(layers, _fill_in(placed, [None] * len(placed), stages), stages)


def _check_range(what: str, stage: int, stages: int) -> None:
    if not 0 <= stage < stages:
        there_are = "only stage 0" if stages == 1 else f"stages {_listed(range(stages))}"
        raise SplitError(f"{what}, but pipeline.nb_part={stages} has {there_are}")


def _listed(stages: Sequence[int]) -> str:
    if len(stages) > 2 and stages[-1] - stages[0] == len(stages) - 1:
        return f"{stages[0]} to {stages[-1]}"
    *others, last = map(str, stages)
    return f"{', '.join(others)} and {last}" if others else last


def _stage_of(
    net: nn.Module, layer: Layer, marks: Mapping[int, int | None], default: int | None
) -> int | None:
    """Where the marks want the layer; None if it can run anywhere.

    What holds state decides, since the rest can be computed next to it. The layer may be a stretch
    of the model's forward: no module of the model's, but with some of its modules and parameters.

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
            f"`with partition(i):`, call set_partition, or set pipeline.default_partition"
        )
    if len(known) > 1:
        raise SplitError(
            f"layer {layer.name!r} runs as one, but has parts for the stages {_listed(known)}: "
            f"place all of it on one, or make its parts layers of the model"
        )
    return known[0]


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(candidate, pattern) for candidate in (name, *_path(name)))


def _path(name: str) -> list[str]:
    """`["a", "a.b"]` for `a.b@2`."""
    parts = strip_call_index(name).split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _unmatched(pattern: str, layers: Sequence[Layer]) -> SplitError:
    known = dict.fromkeys(name for layer in layers for name in _path(layer.name))
    close = difflib.get_close_matches(pattern, known, n=1)
    names = ", ".join(layer.name for layer in layers)
    hint = f"did you mean {close[0]!r}?" if close else f"the layers are: {names}"
    return SplitError(f"pipeline.split: no layer matches {pattern!r}; {hint}")


def _fill_in(
    placed: Sequence[int | None], preferred: Sequence[int | None], stages: int
) -> list[int]:
    """Puts a layer without a place where it preferred, or as near to it as its neighbours allow."""
    filled: list[int] = []
    for index, (stage, preference) in enumerate(zip(placed, preferred, strict=True)):
        before = filled[-1] if filled else 0
        after = next((later for later in placed[index:] if later is not None), stages - 1)
        if preference is None:
            preference = before if filled else after
        filled.append(sorted((before, preference, after))[1] if stage is None else stage)
    return filled


def _counts(
    layers: Sequence[Layer], placed: Sequence[int], stages: int, hint: str = ""
) -> list[int]:
    for layer, stage in zip(layers, placed, strict=True):
        _check_range(f"layer {layer.name!r} is to be on stage {stage}", stage, stages)
    for (before, earlier), (layer, stage) in pairwise(zip(layers, placed, strict=True)):
        if stage < earlier:
            raise SplitError(
                f"layer {layer.name!r} is to be on stage {stage} but runs after {before.name!r} "
                f"on stage {earlier}{hint}: stages run in order, so put {layer.name!r} on a later "
                f"one or {before.name!r} on an earlier one"
            )
    counts = [placed.count(stage) for stage in range(stages)]
    empty = [stage for stage, count in enumerate(counts) if count == 0]
    if empty:
        raise SplitError(
            f"pipeline.nb_part={stages}, but no layer is on stage {_listed(empty)}: place one "
            f"there, or use fewer stages"
        )
    return counts
