"""Logs the model FLOPs utilization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridtrain.errors import ConfigError, setting
from hybridtrain.loop.callbacks.base import Callback

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer


class Mfu(Callback):
    """Logs the model FLOPs utilization as `train/mfu`, a share of the devices' peak rate.

    MFU is the FLOPs of the forward and backward passes per second, divided by the peak rate of all
    devices (Chowdhery et al., *PaLM*, arXiv:2204.02311, appendix B). Recomputation does not count:
    these are the model's FLOPs, not the hardware's.

    The command line adds this callback, with counted FLOPs, when `hardware` is set.

    Args:
        flops_per_sample: the FLOPs of a forward and backward pass of the whole model; a backward
            pass is assumed to cost twice the forward pass.
        peak_flops_per_s: the peak rate of one device in the run's precision.
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
