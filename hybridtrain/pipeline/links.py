"""The links between stages: the primary output to the next stage, skipping values to theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrain.errors import SplitError
from hybridtrain.graph.layer import Layer
from hybridtrain.skip import popped_by, stashed_by

PRIMARY_OUTPUT = ""
"""The name of the value that each layer passes to the next one."""


@dataclass(frozen=True)
class Link:
    """The values that stage `source` sends to stage `target` for every micro-batch, in order."""

    source: int
    target: int
    names: tuple[str, ...]


def links_between(stages: Sequence[Sequence[Layer]]) -> list[Link]:
    """Returns the links that `stages` need, ordered by source and target.

    A value that several stages pop goes from each of them to the next, so that it crosses every cut
    at most once, and its gradients are added in the order in which the unsplit model adds them.

    Raises:
        SplitError: a value is stashed twice, never popped, or popped before it is stashed.
    """
    names: dict[tuple[int, int], list[str]] = {
        (index, index + 1): [PRIMARY_OUTPUT] for index in range(len(stages) - 1)
    }
    origin: dict[str, tuple[int, str]] = {}
    popped: set[str] = set()
    for index, layers in enumerate(stages):
        for layer in layers:
            for name in stashed_by(layer.module):
                if name in origin:
                    raise SplitError(
                        f"{name!r} is stashed by layer {origin[name][1]!r} and by {layer.name!r}; "
                        f"give each value another name"
                    )
                origin[name] = index, layer.name
            for name in popped_by(layer.module):
                if name not in origin:
                    raise SplitError(f"layer {layer.name!r} pops {name!r}, stashed by none before")
                popped.add(name)
                source, layer_name = origin[name]
                if source != index:
                    names.setdefault((source, index), []).append(name)
                    origin[name] = index, layer_name
    unused = set(origin) - popped
    if unused:
        name = min(unused)
        raise SplitError(f"layer {origin[name][1]!r} stashes {name!r}, and no later layer pops it")
    return [Link(*ends, tuple(names[ends])) for ends in sorted(names) if ends[0] != ends[1]]
