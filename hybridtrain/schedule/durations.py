"""The time that each stage of a model takes, for which schedules are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrain.schedule.simulation import simulate
from hybridtrain.schedule.table import Schedule, Span


@dataclass(frozen=True)
class Durations:
    """The time that each stage takes for one micro-batch, in any unit.

    Attributes:
        forward: of each stage.
        backward: both parts of it.
        weight: of the backward's second part, to the weights.
        transfer: from each stage to the next, and back.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]

    @classmethod
    def of(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        transfer: Sequence[float] | None = None,
    ) -> Durations:
        """Returns durations in which a backward has two equal parts.

        But for the first stage, whose input needs no gradient: all of it is to the weights.
        """
        weight = [b if stage == 0 else b / 2 for stage, b in enumerate(backward)]
        ways = transfer or [0.0] * (len(forward) - 1)
        return cls(tuple(forward), tuple(backward), tuple(weight), tuple(ways))

    @classmethod
    def equal(cls, stages: int) -> Durations:
        """Returns those of stages that take 1 for a forward and 2 for a backward."""
        return cls.of([1.0] * stages, [2.0] * stages)

    def spans(self, schedule: Schedule) -> tuple[tuple[Span, ...], ...]:
        """Returns when each action of `schedule` runs."""
        return simulate(schedule, self.forward, self.backward, self.transfer, self.weight)

    def length(self, schedule: Schedule) -> float:
        """Returns when the last action of `schedule` ends."""
        return max(lane[-1].end for lane in self.spans(schedule))
