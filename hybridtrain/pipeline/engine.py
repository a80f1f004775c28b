"""The interface of the `engines`, and the step that they run.

A `Step` is a schedule, a source of the first stage's inputs, and a `head`, the
callback that ends the forward at the last stage, such as the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hybridtrain._base.precision import ThreadState
from hybridtrain._base.shares import MicrobatchPlace
from hybridtrain.pipeline.agreement import BatchCheck
from hybridtrain.pipeline.timeline import Timeline
from hybridtrain.schedule import Schedule


class HeadOutput(NamedTuple):
    """Result of the `head` callback for one micro-batch.

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

# `head(microbatch, output)` ends a forward, for example with the loss. Called where the last stage
# runs, in that stage's thread, with gradients and autocast as in a forward.
Head = Callable[[int, Any], HeadOutput]


class Step(NamedTuple):
    """One run of the pipeline over the micro-batches of a batch.

    Attributes:
        schedule: the order in which each device runs its forwards and backwards.
        source: gives the first stage its inputs.
        head: takes the last stage's outputs.
        thread_state: the caller's grad mode and autocast.
        number: how many steps of its kind have begun, this one among them.
        recomputed: the micro-batches whose stages are recomputed in the backward.
        reduce: average the gradients over the replicas in the last micro-batch's backward.
        timeline: records the start and end of every action; None records nothing.
        training: whether the model is in training mode.
        places: the logical replica of each micro-batch; None: the same for all.
        batch_check: compares the batches of several processes; None: nothing to compare.
        furthest_ahead: run one action at a time, in the order `Schedule.furthest_ahead`.
        keeps_graphs: whether a later step runs the backwards of these forwards.
    """

    schedule: Schedule
    source: Source
    head: Head
    thread_state: ThreadState
    number: int = 1
    recomputed: frozenset[int] = frozenset()
    reduce: bool = False
    timeline: Timeline | None = None
    training: bool = True
    places: Sequence[MicrobatchPlace] | None = None
    batch_check: BatchCheck | None = None
    furthest_ahead: bool = False
    keeps_graphs: bool = False

    @property
    def makes_graphs(self) -> bool:
        """Whether the stages hold graphs of its forwards, for backwards now or later."""
        return self.schedule.trains or self.keeps_graphs


class Engine(Protocol):
    """Executes steps on the stages that this process owns."""

    def run(self, step: Step) -> list[Any]:
        """Executes `step`.

        Returns:
            the values of `head` by micro-batch; an empty list if another process has the last
            stage.

        Raises:
            Exception: the first exception of a layer, the source, the head or a collective, with
                notes that name the layer, the stage and the micro-batch. The engine can run the
                next step.
        """
        ...
