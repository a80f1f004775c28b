"""Keeps the weights of the best evaluations in files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtrain.checkpoint import write_weights
from hybridtrain.errors import ConfigError, setting
from hybridtrain.loop.callbacks.base import Callback, Comparison
from hybridtrain.options import names_checked

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer


class BestWeights(Callback):
    """Keeps the weights of the `k` best evaluations as `step_<number>.safetensors`.

    The files hold the evaluated weights: with an `EMA`, the average. To resume from the best
    checkpoint, see `TrainerOptions.best`.

    Args:
        directory: the folder for the files; only rank 0 writes.
        value: `loss`, or the name of a metric.
        mode: `min` if smaller is better, `max` if larger is better; None to infer it from the
            value, as `TrainerOptions.best_mode` does.
        k: the number of files to keep.

    Raises:
        ConfigError: an argument is out of its range.
    """

    @names_checked
    def __init__(
        self, directory: str | Path, value: str = "loss", mode: str | None = None, k: int = 3
    ) -> None:
        if type(k) is not int or k < 1:
            raise ConfigError(f"{setting('k', k)} must be a whole number of at least 1")
        self.directory = Path(directory)
        self._comparison = Comparison(value, mode)
        self._k = k
        self._kept: list[tuple[float, int]] = []  # best first

    def on_init(self, trainer: Trainer) -> None:
        """Checks that the evaluation has the value."""
        self._comparison.check(trainer)
        self._kept = []

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Writes the weights if they are among the best, and removes the file they displace."""
        value, step = self._comparison.of(values), trainer.step
        if not math.isfinite(value):
            return
        before = [entry for entry in self._kept if entry[1] != step]
        # the earlier of two equal values is better
        self._kept = sorted([*before, (value, step)])[: self._k]
        if all(saved != step for _, saved in self._kept):
            return
        state = trainer.model.state_dict()
        trainer.world.on_main(lambda: write_weights(self._path(step), state))
        for _, dropped in set(before) - set(self._kept):
            if trainer.world.is_main:
                self._path(dropped).unlink(missing_ok=True)

    def paths(self) -> list[Path]:
        """Returns the files, best first."""
        return [self._path(step) for _, step in self._kept]

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps and values of the best evaluations."""
        return {"kept": [[value, step] for value, step in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`."""
        self._kept = [(value, step) for value, step in state["kept"]][: self._k]

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.safetensors"
