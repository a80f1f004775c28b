"""Which stages change which buffers, in a step that runs one action at a time.

Stages compute different micro-batches at the same time. If two of them add to one buffer, they add
in another order than the model, and perhaps at the same time: mostly the last bits differ, which
no comparison of values notices in every case. So the self-check looks at who writes.
"""

from __future__ import annotations

from operator import attrgetter

from torch import nn

from hybridtrain.errors import SplitError, argument


class BufferWriters:
    """Notes the stages that change the buffers of a model.

    Args:
        net: the model.
    """

    def __init__(self, net: nn.Module) -> None:
        buffers = dict(net.named_buffers())
        self._buffers = {name: b for name, b in buffers.items() if not b.is_inference()}
        self._stage_of: dict[str, int] = {}
        self._before: list[int] = []

    def enter(self) -> None:
        """Begins the forward of a micro-batch in a stage."""
        self._before = self._versions()

    def leave(self, stage: int) -> None:
        """Ends it.

        Raises:
            SplitError: another stage has changed the same buffer.
        """
        for name, before, now in zip(self._buffers, self._before, self._versions(), strict=True):
            if before != now:
                writer = self._stage_of.setdefault(name, stage)
                if writer != stage:
                    raise SplitError(
                        f"stage {writer} and stage {stage} both change the buffer {name!r}, but "
                        "they compute different micro-batches at the same time, so they would not "
                        "change it in the model's order: cut so that all code that changes it is "
                        f"in one stage ({argument('split')})"
                    )

    def _versions(self) -> list[int]:
        return list(map(attrgetter("_version"), self._buffers.values()))
