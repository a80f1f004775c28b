"""A stream whose order only its state can restore."""

from typing import Any

import torch


class ShuffledStream:
    """Shuffles with a generator that goes on from epoch to epoch, and can save all of that.

    A subclass is an IterableDataset and has `read(index)`.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.generator = torch.Generator().manual_seed(5)
        self.order, self.at = None, 0

    def __iter__(self) -> Any:
        if self.order is None:
            self.order = torch.randperm(self.samples, generator=self.generator)
        while self.at < self.samples:
            self.at += 1
            yield self.read(int(self.order[self.at - 1]))
        self.order, self.at = None, 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]
        self.generator.set_state(state["generator"])
