"""The links between stages, whose values cross borders, and the steps that an engine runs.

A value goes from a stage to the next border by border, also one that skips stages:

    border 0|1            border 1|2            border 2|3
    output of 0      -->  output of 1      -->  output of 2
    "a", 0 to 3      -->  "a"              -->  "a"

All that crosses a border for a micro-batch is one message: for each link over it the link's values,
or their gradients. A stage takes what is for it, and passes the rest on, as its `Route` says.

An `Engine` runs a `Step`: a schedule, a source of the first stage's inputs, and a head that ends
the forward at the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from hybridtrain.errors import SplitError
from hybridtrain.graph import Layer
from hybridtrain.pipeline.timeline import Timeline
from hybridtrain.precision import ThreadState
from hybridtrain.schedule import Schedule
from hybridtrain.skip import popped_by, stashed_by

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


def crossing(links: Sequence[Link], border: int) -> list[Link]:
    """Returns the links of a message, in its order, which all stages and processes have.

    Args:
        links: all of a pipeline.
        border: the number of the stage before it.
    """
    found = [link for link in links if link.source <= border < link.target]
    return sorted(found, key=lambda link: (-link.source, link.target))


class Route(NamedTuple):
    """The part of the messages to a stage that it takes; it passes the rest on.

    Attributes:
        ends: for each link over the border before the stage, whether it ends there.
        starts: the number of links over the border behind the stage that start there, which are
            the first ones.
    """

    ends: tuple[bool, ...]
    starts: int

    def own_values(self, message: Sequence[T]) -> tuple[list[T], list[T]]:
        """Returns what is for the stage of the values that came, and what goes on."""
        own: list[T] = []
        passing: list[T] = []
        for value, ends in zip(message, self.ends, strict=True):
            (own if ends else passing).append(value)
        return own, passing

    def own_gradients(self, message: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """Returns what is for the stage of the gradients that came, and what goes on."""
        return message[: self.starts], message[self.starts :]

    def gradients_before(self, own: Sequence[T], passing: Sequence[T]) -> list[T]:
        """Returns the gradients that go over the border before the stage, in its order."""
        its, others = iter(own), iter(passing)
        return [next(its if ends else others) for ends in self.ends]


def routes(links: Sequence[Link]) -> dict[int, Route]:
    """Returns the routes of the stages that pass something on: others take all that comes."""
    found: dict[int, Route] = {}
    for stage in {link.source for link in links}:
        before = crossing(links, stage - 1)
        if any(link.target > stage for link in before):
            ends = tuple(link.target == stage for link in before)
            found[stage] = Route(ends, sum(link.source == stage for link in links))
    return found


class HeadOutput(NamedTuple):
    """Outcome of the head for one micro-batch.

    Attributes:
        value: returned to the caller of `Engine.run`.
        root: where the backward starts; None in a forward-only step.
        gradient: the gradient of `root`, of the same shape.
    """

    value: Any
    root: Tensor | None = None
    gradient: Tensor | None = None


# `source(microbatch)` returns the input of the first stage. Called where that stage runs.
Source = Callable[[int], Any]

# `head(microbatch, output)` ends a forward: it computes the loss, say. Called where the last stage
# runs, in that stage's thread, with gradients and autocast as in a forward.
Head = Callable[[int, Any], HeadOutput]


class Step(NamedTuple):
    """One run of the pipeline over the micro-batches of a batch.

    Attributes:
        schedule: the order in which each device runs its forwards and backwards.
        source: gives the first stage its inputs.
        head: takes the last stage's outputs.
        thread_state: grad mode and autocast, as the caller has them.
        checkpointed: the micro-batches whose stages are recomputed in the backward.
        reduce: average the gradients over the replicas in the last micro-batch's backward.
        timeline: records the start and end of every action; None records nothing.
        training: whether the model is in training mode.
    """

    schedule: Schedule
    source: Source
    head: Head
    thread_state: ThreadState
    checkpointed: frozenset[int] = frozenset()
    reduce: bool = False
    timeline: Timeline | None = None
    training: bool = True


class Engine(Protocol):
    """Executes steps on the stages that this process owns."""

    def run(self, step: Step) -> list[Any]:
        """Executes `step`.

        Returns:
            the head's values by micro-batch; an empty list where another process has the last
            stage.

        Raises:
            Exception: the first exception of a layer, the source, the head or a collective, with
                notes that name the layer, the stage and the micro-batch. The engine can run the
                next step.
        """
        ...
