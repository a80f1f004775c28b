"""The face that every monitor shows to the training loop."""

from collections.abc import Mapping
from typing import Protocol

from hybridtrain.monitor.timeline import Lanes


class Monitor(Protocol):
    """Something that rank 0's training loop tells how the run goes.

    The loop calls `start` once, `step` after every optimizer step, `scalars` on the steps that
    are logged or evaluated, and `close` at the end, also after an exception.

    The tags of `scalars` are `<group>/<name>`: `train/loss`, `train/lr`, `train/grad_norm`,
    `train/samples_per_second`, `train/step_ms`, `stage0/forward_ms`, `stage0/memory_bytes`,
    `eval/loss`, `eval/accuracy`. The values are numbers on the host: to get one from a device
    is a wait that only the loop may decide on.
    """

    def start(self, *, total_steps: int | None, first_step: int, texts: Mapping[str, str]) -> None:
        """Begin, or go on after a resume.

        `first_step` is the number of steps done already: 0, or that of the checkpoint resumed
        from. What an interrupted attempt reported of later steps is dropped, so that the run
        reads as one. `total_steps` is None when the end is not known. `texts` are for reading
        beside the curves, by title, for example the resolved config and the layout.
        """

    def step(self, step: int, samples: int) -> None:
        """Tell that optimizer step `step` (the first is 1) is done, on `samples` samples.

        Called in the hot loop: it costs microseconds and waits for nothing.
        """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Report values measured at `step`, by tag."""

    def timeline(self, step: int, predicted: Lanes, measured: Lanes) -> None:
        """Report what each device did when in `step`, and what its schedule predicts of it."""

    def close(self) -> None:
        """Write out what is pending. Calling it twice, or without `start`, does no harm."""
