"""Which stage hands what to which: the main value to the next one, skipping values straight on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrain.errors import SplitError
from hybridtrain.graph.layer import Layer
from hybridtrain.skip import popped_by, stashed_by

PRIMARY_OUTPUT = ""
"""The name of the value that each layer gets from the one before it."""


@dataclass(frozen=True)
class Link:
    """What stage `source` sends to stage `target` for every micro-batch, in this order."""

    source: int
    target: int
    names: tuple[str, ...]


def links_between(stages: Sequence[Sequence[Layer]]) -> list[Link]:
    """The links that `stages` need, ordered by source and target.

    A value that several stages pop travels from each to the next, so that it crosses every cut at
    most once, and its gradients are added in the order in which the unsplit model adds them.

    Raises:
        SplitError: a value is stashed twice, never popped, or popped before it is stashed.
    """
    names: dict[tuple[int, int], list[str]] = {
        (index, index + 1): [PRIMARY_OUTPUT] for index in range(len(stages) - 1)
    }
    home: dict[str, tuple[int, str]] = {}
    popped: set[str] = set()
    for index, layers in enumerate(stages):
        for layer in layers:
            for name in stashed_by(layer.module):
                if name in home:
                    raise SplitError(
                        f"{name!r} is stashed by layer {home[name][1]!r} and by {layer.name!r}; "
                        f"give each value a name of its own"
                    )
                home[name] = index, layer.name
            for name in popped_by(layer.module):
                if name not in home:
                    raise SplitError(f"layer {layer.name!r} pops {name!r}, stashed by none before")
                popped.add(name)
                source, layer_name = home[name]
                if source != index:
                    names.setdefault((source, index), []).append(name)
                    home[name] = index, layer_name
    unused = set(home) - popped
    if unused:
        name = min(unused)
        raise SplitError(f"layer {home[name][1]!r} stashes {name!r}, and no later layer pops it")
    return [Link(*ends, tuple(names[ends])) for ends in sorted(names) if ends[0] != ends[1]]
