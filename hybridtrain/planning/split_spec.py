"""A split given as a list: layer counts, cut points, layer names or name patterns."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Any

from hybridtrain.errors import SplitError, did_you_mean
from hybridtrain.graph.layer import Layer
from hybridtrain.options import SplitSpec


def split_layers(layers: Sequence[Layer], stages: int, split: SplitSpec) -> list[int]:
    """Returns how many layers each stage gets.

    The list `split` has for each stage the number of its layers, or a name pattern or a list of
    them (see `counts_by_patterns`); or for each stage but the first the layer that it begins with,
    by index or name, which may also be a group of layers (`blocks` for `blocks.0`).

    Raises:
        SplitError: it does not fit the layers; says why and what would.
    """
    n = len(layers)
    given: list[Any] = list(split)
    if stages == 1 and not given:
        return [n]
    if all(type(item) is int for item in given) and len(given) == stages:
        if sum(given) != n or min(given) < 1:
            raise SplitError(
                f"split={given}: layer counts must be positive and add up to the model's {n} "
                f"layers; these add up to {sum(given)}"
            )
        return given
    if all(type(item) in (int, str) for item in given) and len(given) == stages - 1:
        if len({type(item) for item in given}) == 1:
            cuts = [_index(layers, item) if isinstance(item, str) else item for item in given]
            counts = [end - start for start, end in pairwise([0, *cuts, n])]
            if min(counts) < 1:
                raise SplitError(
                    f"split={given}: cut points must rise and lie between 1 and {n - 1}, so that "
                    f"no stage is empty (layer 0 begins stage 0 anyway)"
                )
            return counts
    elif all(isinstance(item, str | list | tuple) for item in given) and len(given) == stages:
        return counts_by_patterns(layers, stages, given)
    raise SplitError(
        f"split={given} does not describe {stages} stages: give {stages} layer counts, "
        f"{stages - 1} cut point{'s' * (stages != 2)} (indices or names of the layers that begin "
        f"a stage), or {stages} name patterns"
    )


def counts_by_patterns(
    layers: Sequence[Layer], stages: int, patterns: Sequence[str | Sequence[str]]
) -> list[int]:
    """Returns how many layers each stage gets if they go where the patterns say.

    For each stage there is a name with wildcards (`blocks.[0-3]`), or a list of them; what matches
    a module matches all in it (`blocks.3` also `blocks.3.attention`). A layer that no pattern
    matches goes with the one before it, at the start with the one after.

    Raises:
        SplitError: the patterns do not describe `stages` runs of layers; says which, and why.
    """
    owner: dict[str, tuple[int, str]] = {}
    for stage, given in enumerate(patterns):
        for pattern in [given] if isinstance(given, str) else given:
            matched = [
                layer.name
                for layer in layers
                if any(fnmatchcase(name, pattern) for name in (layer.name, *_path(layer.name)))
            ]
            if not matched:
                known = dict.fromkeys(name for layer in layers for name in _path(layer.name))
                hint = did_you_mean(pattern, known, "layers and groups")
                raise SplitError(f"split=: no layer matches {pattern!r}; {hint}")
            for name in matched:
                other, earlier = owner.setdefault(name, (stage, pattern))
                if other != stage:
                    raise SplitError(
                        f"split=: layer {name!r} matches {earlier!r} of stage {other} and "
                        f"{pattern!r} of stage {stage}; it can be on one"
                    )
    assigned = [owner[layer.name][0] if layer.name in owner else None for layer in layers]
    return counts_of(layers, fill_in(assigned, [None] * len(assigned), stages), stages)


def fill_in(
    assigned: Sequence[int | None], preferred: Sequence[int | None], stages: int
) -> list[int]:
    """Assigns each layer whose stage is None to the one nearest to its preferred stage.

    The order of the stages is kept. None as preferred stage: that of the layer before.
    """
    filled: list[int] = []
    for index, (stage, preference) in enumerate(zip(assigned, preferred, strict=True)):
        before = filled[-1] if filled else 0
        after = next((later for later in assigned[index:] if later is not None), stages - 1)
        if preference is None:
            preference = before if filled else after
        filled.append(sorted((before, preference, after))[1] if stage is None else stage)
    return filled


def counts_of(
    layers: Sequence[Layer], assigned: Sequence[int], stages: int, hint: str = ""
) -> list[int]:
    """Returns how many layers each stage gets, by the stage that each layer is assigned to.

    Raises:
        SplitError: a stage does not exist or has no layer, or the stages are not in order (`hint`).
    """
    for layer, stage in zip(layers, assigned, strict=True):
        check_stage(f"layer {layer.name!r} is to be on stage {stage}", stage, stages)
    for (before, earlier), (layer, stage) in pairwise(zip(layers, assigned, strict=True)):
        if stage < earlier:
            raise SplitError(
                f"layer {layer.name!r} is to be on stage {stage} but runs after {before.name!r} "
                f"on stage {earlier}{hint}: stages run in order, so put {layer.name!r} on a later "
                f"one or {before.name!r} on an earlier one"
            )
    counts = [assigned.count(stage) for stage in range(stages)]
    if 0 in counts:
        empty = listed([stage for stage, count in enumerate(counts) if count == 0])
        raise SplitError(
            f"{stages} stages are asked for, but no layer is on stage {empty}: place one there, "
            f"or lower nb_part="
        )
    return counts


def check_stage(what: str, stage: int, stages: int) -> None:
    """Raises a SplitError that begins with `what` unless there is such a stage."""
    if not 0 <= stage < stages:
        known = "is only stage 0" if stages == 1 else f"are stages {listed(range(stages))}"
        raise SplitError(f"{what}, but there {known}")


def listed(stages: Sequence[int]) -> str:
    """Returns `0 to 3`, or `1 and 3`."""
    if len(stages) > 2 and stages[-1] - stages[0] == len(stages) - 1:
        return f"{stages[0]} to {stages[-1]}"
    *others, last = map(str, stages)
    return f"{', '.join(others)} and {last}" if others else last


def modules_around(names: Collection[str], split: Sequence[Any]) -> set[str]:
    """Returns which of the modules `names` must be expanded to find the layers in `split`."""
    given = [name for item in split for name in ([item] if isinstance(item, str) else item)]
    literal = [re.split(r"[*?\[]", name)[0].rpartition(".")[0] for name in given]
    return {path for name in literal for path in _path(name)} & set(names)


def strip_call_index(name: str) -> str:
    """Returns a layer's name without the number of its call: `decoder` for `decoder@2`."""
    return re.sub(r"@\d+$", "", name)


def _path(name: str) -> list[str]:
    """Returns `["a", "a.b"]` for `a.b@2`."""
    return list(accumulate(strip_call_index(name).split("."), "{}.{}".format))


def _index(layers: Sequence[Layer], name: str) -> int:
    for index, layer in enumerate(layers):
        if layer.name == name or layer.name.startswith(f"{name}."):
            return index
    hint = did_you_mean(name, [layer.name for layer in layers], "layers")
    raise SplitError(f"split=: there is no layer {name!r}; {hint}")
