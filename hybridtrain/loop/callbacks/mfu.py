"""Logs the model FLOPs utilization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridtrain.errors import ConfigError, setting
from hybridtrain.loop.callbacks.base import Callback

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer


class Mfu(Callback):
    """Logs the model FLOPs utilization, as `train/mfu`: a share of the devices' peak rate.

    It is the FLOPs of the forwards and backwards of a second's samples, divided by what all devices
    can do in it (Chowdhery et al., *PaLM*, arXiv:2204.02311, appendix B). What is computed again in
    the backward does not count: these are the model's FLOPs, not the hardware's.

    With a `hardware` a run on the command line has it, with the FLOPs counted.

    Args:
        flops_per_sample: of a forward and backward of the whole model; a backward is taken to have
            twice the FLOPs of the forward.
        peak_flops_per_s: of one device, in the precision of the run.
    """

    main_only = True

    def __init__(self, flops_per_sample: float, peak_flops_per_s: float) -> None:
        if not (flops_per_sample > 0 and peak_flops_per_s > 0):
            raise ConfigError(
                f"{setting('flops_per_sample', flops_per_sample)} and "
                f"{setting('peak_flops_per_s', peak_flops_per_s)} must be positive"
            )
        self._flops_per_sample = flops_per_sample
        self._peak = peak_flops_per_s

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Adds the utilization."""
        devices = trainer.world.data_parallel_size * trainer.world.nb_part
        rate = values["train/samples_per_second"] * self._flops_per_sample
        values["train/mfu"] = rate / (devices * self._peak)
