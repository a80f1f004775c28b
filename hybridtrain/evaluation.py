"""Evaluation: every sample counted exactly once over all replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridtrain.data.loader import EvalLoader
from hybridtrain.losses import LossFn, MetricFn, main_output
from hybridtrain.microbatch import batch_size
from hybridtrain.model import HybridModel


def evaluate(
    model: HybridModel,
    data: EvalLoader,
    loss_fn: LossFn,
    metrics: Mapping[str, Any],
) -> dict[str, float]:
    """The mean loss and the metrics over all rows of `data`; all replicas call it together.

    Args:
        model: its modules are left in the modes (train or eval) that they were in.
        data: the rows of this replica.
        loss_fn: the mean loss of a batch.
        metrics: by name, functions that give a sum and a count (`hybridtrain.losses`), or
            torchmetrics' `Metric`s, which add themselves up over the replicas.

    Returns:
        `loss`, each metric, and `samples`, on every replica.
    """
    modes = [(module, module.training) for module in model.net.modules()]
    model.eval()
    model.sync_buffers()
    device = model.stages[-1].device
    plain: dict[str, MetricFn] = {}
    stateful: dict[str, Any] = {}
    for name, metric in metrics.items():
        if hasattr(metric, "compute"):
            stateful[name] = metric.to(device)
            metric.reset()
        else:
            plain[name] = metric
    # samples, loss sum, then the sum and count of each plain metric
    sums = torch.zeros(2 + 2 * len(plain), dtype=torch.float64, device=device)
    for inputs, targets in data:
        rows = batch_size(inputs, targets)
        outputs = model(inputs)
        targets = model.to_last(targets)
        with torch.no_grad(), model.precision():
            sums[0] += rows
            sums[1] += loss_fn(outputs, targets).double() * rows
            for index, metric in enumerate(plain.values()):
                total, count = metric(outputs, targets)
                sums[2 + 2 * index] += total
                sums[3 + 2 * index] += count
            for metric in stateful.values():
                metric.update(main_output(outputs), targets)
    samples, loss, *pairs = model.world.sum(sums.cpu()).tolist()
    result = {"loss": loss / samples if samples else float("nan"), "samples": int(samples)}
    for index, name in enumerate(plain):
        total, count = pairs[2 * index : 2 * index + 2]
        result[name] = total / count if count else float("nan")
    for name, metric in stateful.items():
        result[name] = float(metric.compute())
    for module, training in modes:
        module.training = training
    model.rng.redetect()
    return result
