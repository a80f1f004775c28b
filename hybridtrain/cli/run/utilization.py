"""The model FLOPs utilization (MFU) in a run's log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hybridtrain._base.microbatch import batch_size, chunk_sizes
from hybridtrain._base.microbatch import split as split_batch
from hybridtrain.cli.run.context import RunContext
from hybridtrain.cli.run.hardware import hardware_of
from hybridtrain.cli.run.prediction import without_errors_of_fake_tensors
from hybridtrain.data import Batch
from hybridtrain.loop import Callback, Mfu
from hybridtrain.partitioning import count_layers, model_flops

if TYPE_CHECKING:
    from hybridtrain.loop import Trainer

_log = logging.getLogger(__name__)


class _MfuByTokens(Mfu):
    """Logs the MFU from FLOPs per token, since batches may differ in length."""

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Adds the utilization."""
        tokens = {"train/samples_per_second": values.get("train/tokens_per_second", 0.0)}
        super().on_log(trainer, tokens)
        values["train/mfu"] = tokens["train/mfu"]


def utilization(context: RunContext) -> list[Callback]:
    """Returns the callbacks that log the MFU of a run with `hardware=`, on rank 0 only.

    FLOPs are counted on fake tensors for the first micro-batch; a backward pass counts twice the
    forward, or less if weights are frozen. If samples have a length, FLOPs are counted per token,
    because batches padded to their longest sample differ in length. An error here does not end the
    run.
    """
    hardware, options = context.config.hardware, context.model.options
    if hardware is None or not context.world.is_main:
        return []
    device, tf32 = context.world.devices[0].type, context.config.trainer.tf32
    precision = "tf32" if tf32 and options.precision == "fp32" else options.precision
    peak = hardware_of(hardware).flops_per_s.get(precision)
    reason = None
    if hardware.device != device:
        reason = f"hardware.device={hardware.device}, but the run uses {device}"
    elif peak is None:
        reason = f"set hardware.flops_per_s.{precision}="
    else:
        sizes = chunk_sizes(batch_size(context.example_inputs), options.chunks)
        microbatch = split_batch(context.example_inputs, sizes)[0]
        layers = context.model.planned.layers
        try:
            with without_errors_of_fake_tensors():
                costs = count_layers(layers, microbatch, options.precision)
            flops = model_flops(costs, layers)
            if tokens := Batch(microbatch, None, sizes[0], sizes[0]).tokens:
                return [_MfuByTokens(flops / tokens, peak)]
            return [Mfu(flops / sizes[0], peak)]
        except Exception as error:  # also from the user's layers, which run on fake tensors
            _log.debug("no FLOPs", exc_info=True)
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    _log.info("train/mfu is not logged: %s", reason)
    return []
