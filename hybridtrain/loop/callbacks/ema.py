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

    After each step, average = decay * average + (1 - decay) * parameters, in fp32 for parameters in
    half precision, in which so small a part would be rounded away. The frozen weights of a model
    with an adapter are left out. Buffers, such as running
    statistics, are the model's. `trainer.evaluate`, `predict` and `test` use the average as well;
    a checkpoint has both, and the commands `evaluate`, `predict` and `export` take the average.

    Args:
        decay: between 0 and 1.
        evaluates: False to evaluate with the parameters themselves.
        warmup: after n steps the decay is at most (1 + n) / (10 + n), so that the average of a
            short run is not mostly its first weights.

    Raises:
        ConfigError: `decay` is out of its range.

    Source: B. Polyak and A. Juditsky, 1992; with the exponential weights of A. Tarvainen and
    H. Valpola, *Mean teachers are better role models*, 2017. The warm-up is that of TensorFlow's
    ExponentialMovingAverage and of timm.
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
        """Begins with the weights."""
        self._model = trainer.model
        self._average, self._updates = {}, 0
        self._pairs()

    def on_start(self, trainer: Trainer) -> None:
        """Begins with the weights of a new run, which may have been loaded by now."""
        if trainer.step == 0:
            self.on_init(trainer)

    def on_step(self, trainer: Trainer, samples: int) -> None:
        """Moves the average."""
        average, parameters = self._pairs()
        decay = self._decay_of(trainer.step)
        self._updates += 1
        with torch.no_grad():
            # of several devices or dtypes, PyTorch goes through them one by one
            now = [p.to(a.dtype) for p, a in zip(parameters, average, strict=True)]
            torch._foreach_lerp_(average, now, 1 - decay)

    def _decay_of(self, step: int) -> float:
        """Returns the weight that the average so far has beside the parameters of a step."""
        n = self._updates
        return min(self._decay, (1 + n) / (10 + n)) if self._warmup else self._decay

    @contextmanager
    def evaluation_context(self, trainer: Trainer) -> Iterator[None]:
        """Puts the average in the place of the parameters while the block runs."""
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
        """Returns the average by the names of the parameters; of this process's stages."""
        return dict(self._average)

    def state_dict(self) -> dict[str, Any]:
        """Returns the average of all stages; with stages in several processes it is gathered."""
        assert self._model is not None
        average = self.average()
        if self._model.world.pipeline_group is not None:  # the CPU's tensors travel
            tensors = [(name, value.cpu()) for name, value in average.items()]
            average = dict(self._model.pipeline.gather(tensors))
        return {"average": average, "updates": self._updates, "evaluates": self._evaluates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the average of this process's stages.

        Raises:
            CheckpointError: it lacks a parameter, or has one of another shape; nothing is loaded.
        """
        self._pairs()
        self._updates, saved = state["updates"], state["average"]
        for name, value in self._average.items():
            if name not in saved or saved[name].shape != value.shape:
                shape = f"with shape {list(saved[name].shape)}" if name in saved else "not there"
                raise CheckpointError(
                    f"the checkpoint's average of EMA does not fit the model: {name}, of shape "
                    f"{list(value.shape)}, is {shape}. Train the model it was made with, or leave "
                    f"EMA out"
                )
        for name, value in self._average.items():
            value.copy_(saved[name])

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the averages and their parameters; a new parameter begins its average."""
        assert self._model is not None
        # the frozen base of an adapter stays, and a checkpoint leaves it out
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
