"""The links between stages; their values cross borders.

Only `engine="distributed"` needs this file.

Values travel from stage to stage, border by border, even if they skip stages:

    border 0|1            border 1|2            border 2|3
    output of 0      -->  output of 1      -->  output of 2
    "a", 0 to 3      -->  "a"              -->  "a"

One message per micro-batch crosses a border, with the values, or their gradients, of each link over
the border. A stage takes its own values and passes the rest on, according to its `Route`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hybridtrain._base.skip import popped_by, stashed_by
from hybridtrain.errors import SplitError
from hybridtrain.graph import Layer

PRIMARY_OUTPUT = ""
"""The name of the value that each layer passes to the next one."""

T = TypeVar("T")


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
                    raise SplitError(
                        f"layer {layer.name!r} pops {name!r}, but no earlier layer stashes it"
                    )
                popped.add(name)
                source, layer_name = origin[name]
                if source != index:
                    names.setdefault((source, index), []).append(name)
                    origin[name] = index, layer_name
    unused = set(origin) - popped
    if unused:
        name = min(unused)
        raise SplitError(f"layer {origin[name][1]!r} stashes {name!r}, but no later layer pops it")
    return [Link(*ends, tuple(names[ends])) for ends in sorted(names) if ends[0] != ends[1]]


def crossing(links: Sequence[Link], border: int) -> list[Link]:
    """Returns the links of a message, in the order that all stages and processes use.

    Args:
        links: all links of a pipeline.
        border: the index of the stage before the border.
    """
    links_over = [link for link in links if link.source <= border < link.target]
    return sorted(links_over, key=lambda link: (-link.source, link.target))


class Route(NamedTuple):
    """The part of the messages to a stage that it takes; it passes the rest on.

    Attributes:
        ends: for each link over the border before the stage, whether it ends there.
        starts: the number of links over the border behind the stage that start at the stage; they
            come first.
    """

    ends: tuple[bool, ...]
    starts: int

    def own_values(self, message: Sequence[T]) -> tuple[list[T], list[T]]:
        """Splits received values into those for the stage and those to pass on."""
        for_stage: list[T] = []
        passing: list[T] = []
        for value, ends in zip(message, self.ends, strict=True):
            (for_stage if ends else passing).append(value)
        return for_stage, passing

    def own_gradients(self, message: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """Splits received gradients into those for the stage and those to pass on."""
        return message[: self.starts], message[self.starts :]

    def gradients_before(self, for_stage: Sequence[T], passing: Sequence[T]) -> list[T]:
        """Returns the gradients to send over the border before the stage, in message order."""
        its, others = iter(for_stage), iter(passing)
        return [next(its if ends else others) for ends in self.ends]


def routes(links: Sequence[Link]) -> dict[int, Route]:
    """Returns the routes of stages that pass values on; other stages take whole messages."""
    route_of: dict[int, Route] = {}
    for stage in {link.source for link in links}:
        before = crossing(links, stage - 1)
        if any(link.target > stage for link in before):
            ends = tuple(link.target == stage for link in before)
            route_of[stage] = Route(ends, sum(link.source == stage for link in links))
    return route_of
