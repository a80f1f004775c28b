"""The time that each stage of a model takes, for which schedules are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrain.schedule.simulation import action_times, spans_for
from hybridtrain.schedule.table import ActionKind, Schedule, Span

ROUNDING = 1e-9
"""Two times that differ by less are the same."""


@dataclass(frozen=True)
class Durations:
    """The time that each stage takes for one micro-batch, in any unit.

    Attributes:
        forward: of each stage.
        backward: a whole one.
        weight: of a backward's second part, to the weights.
        transfer: from each stage to the next, and back.
        in_parts: both parts of a backward together, no shorter than a whole one; None: as long.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    in_parts: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        transfer: Sequence[float] | None = None,
        split: float = 1.0,
    ) -> Durations:
        """Returns durations in which a backward has two equal parts.

        But for the first stage, whose input needs no gradient: all of it is to the weights.

        Args:
            forward: of each stage.
            backward: a whole one of each stage.
            transfer: of each border; None: no time.
            split: how long both parts of a backward take, over a whole one.
        """
        in_parts = [b if stage == 0 else split * b for stage, b in enumerate(backward)]
        weight = [b if stage == 0 else b / 2 for stage, b in enumerate(in_parts)]
        ways = transfer or [0.0] * (len(forward) - 1)
        times = map(tuple, (forward, backward, weight, ways, in_parts))
        return cls(*times)

    @classmethod
    def equal(cls, stages: int) -> Durations:
        """Returns those of stages that take 1 for a forward and 2 for a backward."""
        return cls.of([1.0] * stages, [2.0] * stages)

    @property
    def of_actions(self) -> dict[ActionKind, Sequence[float]]:
        """The durations of each stage, by the kind of action."""
        return action_times(self.forward, self.backward, self.weight, self.in_parts)

    def spans(self, schedule: Schedule) -> tuple[tuple[Span, ...], ...]:
        """Returns when each action of `schedule` runs."""
        return spans_for(schedule, self.of_actions, self.transfer)

    def length(self, schedule: Schedule) -> float:
        """Returns when the last action of `schedule` ends."""
        return max(lane[-1].end for lane in self.spans(schedule))
