"""An exponential moving average of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridtrain._base.adapter import adapter_of
from hybridtrain.errors import CheckpointError, ConfigError, setting
from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.options import names_checked

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer
    from hybridtrain.model import HybridModel


class EMA(Callback):
    """Keeps an exponential moving average of the parameters, and evaluates with it.

    After each step, average = decay * average + (1 - decay) * parameters, in fp32 for
    half-precision parameters, where such small updates would round to zero. Frozen weights of a
    model with an adapter are not averaged. Buffers, such as running statistics, are the model's.
    `trainer.evaluate`, `predict` and `test` use the average as well. A checkpoint has both, and the
    commands `evaluate`, `predict` and `export` use the average.

    Args:
        decay: the weight of the previous average, between 0 and 1.
        evaluates: False to evaluate with the parameters themselves.
        warmup: after n steps the decay is at most (1 + n) / (10 + n), so that the initial weights
            do not dominate the average of a short run.

    Raises:
        ConfigError: `decay` is out of its range.

    Source: B. Polyak and A. Juditsky, 1992; with the exponential weights of A. Tarvainen and H.
    Valpola, *Mean teachers are better role models*, 2017. The warm-up follows TensorFlow's
    ExponentialMovingAverage and timm.
    """

    @names_checked
    def __init__(self, decay: float = 0.999, evaluates: bool = True, warmup: bool = True) -> None:
        if not 0 < decay < 1:
            raise ConfigError(f"{setting('decay', decay)} must be between 0 and 1")
        self._decay = decay
        self._evaluates = evaluates
        self._warmup = warmup
        self._updates = 0
        self._model: HybridModel | None = None
        self._average: dict[str, Tensor] = {}

    def on_init(self, trainer: Trainer) -> None:
        """Initializes the average with the weights."""
        self._model = trainer.model
        self._average, self._updates = {}, 0
        self._pairs()

    def on_start(self, trainer: Trainer) -> None:
        """Reinitializes the average of a new run, because weights may have been loaded since."""
        if trainer.step == 0:
            self.on_init(trainer)

    def on_step(self, trainer: Trainer, samples: int) -> None:
        """Updates the average."""
        average, parameters = self._pairs()
        decay = self._decay_of(trainer.step)
        self._updates += 1
        with torch.no_grad():
            # PyTorch falls back to a loop over tensors of several devices or dtypes
            now = [p.to(a.dtype) for p, a in zip(parameters, average, strict=True)]
            torch._foreach_lerp_(average, now, 1 - decay)

    def _decay_of(self, step: int) -> float:
        """Returns the weight of the previous average at `step`."""
        n = self._updates
        return min(self._decay, (1 + n) / (10 + n)) if self._warmup else self._decay

    @contextmanager
    def evaluation_context(self, trainer: Trainer) -> Iterator[None]:
        """Replaces the parameters by the average while the block runs."""
        if not self._evaluates:
            yield
            return
        average, parameters = self._pairs()
        with torch.no_grad():
            weights = [parameter.clone() for parameter in parameters]
            torch._foreach_copy_(parameters, average)
            try:
                yield
            finally:
                torch._foreach_copy_(parameters, weights)

    def average(self) -> dict[str, Tensor]:
        """Returns the average of this process's stages by parameter name."""
        return dict(self._average)

    def state_dict(self) -> dict[str, Any]:
        """Returns the average of all stages, gathered if the stages are in several processes."""
        assert self._model is not None
        average = self.average()
        if self._model.world.pipeline_group is not None:  # tensors are sent from the CPU
            tensors = [(name, value.cpu()) for name, value in average.items()]
            average = dict(self._model.pipeline.gather(tensors))
        return {"average": average, "updates": self._updates, "evaluates": self._evaluates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the average of this process's stages.

        Raises:
            CheckpointError: a parameter is missing or has a different shape; nothing is loaded.
        """
        self._pairs()
        self._updates, saved = state["updates"], state["average"]
        for name, value in self._average.items():
            if name not in saved or saved[name].shape != value.shape:
                shape = f"has shape {list(saved[name].shape)}" if name in saved else "is missing"
                raise CheckpointError(
                    f"the checkpoint's EMA does not match the model: {name}, of shape "
                    f"{list(value.shape)} in the model, {shape} in the checkpoint. Use the model "
                    "that the checkpoint was made with, or remove EMA"
                )
        for name, value in self._average.items():
            value.copy_(saved[name])

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the averages and their parameters, adding an average for a new parameter."""
        assert self._model is not None
        # the frozen base of an adapter does not change, and a checkpoint omits it
        all_change = adapter_of(self._model.net) is None
        parameters = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if all_change or parameter.requires_grad
        }
        for name, parameter in parameters.items():
            before = self._average.get(name)
            if before is None or before.shape != parameter.shape:
                half = parameter.dtype in (torch.float16, torch.bfloat16)
                self._average[name] = parameter.detach().to(
                    torch.float32 if half else parameter.dtype, copy=True
                )
        self._average = {name: self._average[name] for name in parameters}
        return list(self._average.values()), [p.detach() for p in parameters.values()]
