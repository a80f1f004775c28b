"""Evaluation: every sample is counted exactly once over all replicas."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybridtrain._base.microbatch import batch_size, merge
from hybridtrain.data import EvalLoader
from hybridtrain.launch import Phase, activity
from hybridtrain.loss import (
    BatchWeight,
    LogProbabilityCheck,
    LossFn,
    Metric,
    main_output,
    named_values,
)
from hybridtrain.model import HybridModel

_log = logging.getLogger(__name__)


@contextmanager
def _phase() -> Iterator[None]:
    """Says that this process evaluates, so that it is expected to move on."""
    before = activity.work
    if not activity.is_in(Phase.EVALUATE):
        activity.now(Phase.EVALUATE)
    try:
        yield
    finally:
        activity.set(before)


@_phase()
def evaluate(
    model: HybridModel,
    data: EvalLoader,
    loss_fn: LossFn,
    metrics: Mapping[str, Metric],
    stop: Callable[[], bool] | None = None,
    on_batch: Callable[[int], object] = lambda samples: None,
    one_batch: bool = False,
) -> dict[str, float]:
    """Returns the mean loss and the metrics over all samples of `data`; a collective call.

    Loss and metrics are computed per micro-batch where the last stage is, so outputs are never
    gathered.

    Args:
        model: its modules are left in the modes (train or eval) that they were in.
        data: the samples of this replica.
        loss_fn: as in `HybridModel.train_step`; the loss is the mean over all that it counts.
        metrics: by name; each is updated with the main output (see `main_output`) and the targets,
            or with the whole output where the targets are a mapping, and synchronises itself over
            all processes.
        stop: asked after each batch; once it is true, the result is of the samples so far. Each
            replica is free in that, and those that go on are waited for.
        on_batch: called after each batch with the samples of this process so far.
        one_batch: evaluate the first batch alone. A metric that cannot be computed from it, as one
            that needs more samples, is a warning.

    Returns:
        `loss`, each metric, and `samples`, on every process. A metric with a value per class has
        `metric/class` for each, by the names in `data.classes` or else by number.

    Raises:
        ConfigError: the loss is an nll, and the model returns logits; or a metric returns neither
            a number nor one per class.
    """
    model.sync_buffers()
    world, device = model.world, model.pipeline.output_device

    for metric in metrics.values():
        metric.to(device)
        metric.reset()

    def measure(output: Any, targets: Any) -> Tensor:
        if loss.takes_log_probabilities and not done:
            LogProbabilityCheck(loss, targets, batch_size(targets)).observe(0, output)
        for name, metric in metrics.items():
            with _errors_of(name):
                whole = isinstance(targets, Mapping)  # as a detector has them
                metric.update(output if whole else main_output(output), targets)
        return loss(output, targets)

    loss_sum, count, samples = torch.zeros((), dtype=torch.float64, device=device), 0.0, 0
    done = 0
    loss = model.resolve_loss(loss_fn)
    with model.evaluating():
        for inputs, targets in data:
            losses = model.map_outputs(inputs, targets, measure)
            size = batch_size(inputs, targets)
            done += size
            if losses:  # else the last stage is in another process
                weight = BatchWeight(loss, (inputs, targets), model.options.chunks)
                count += weight.count
                samples += size
                for value, factor in zip(losses, weight.weights, strict=True):
                    if factor:  # the mean of nothing is not a number
                        loss_sum.add_(value, alpha=factor)
            on_batch(done)
            if one_batch or (stop is not None and model.pipeline.any_process(stop())):
                break
    sums = torch.tensor([float(loss_sum), count, samples], dtype=torch.float64)
    total, count, samples = model.reduce_loss(sums).tolist()
    result = {"loss": total / count if count else float("nan"), "samples": int(samples)}
    with warnings.catch_warnings(), _synchronised_by(model, device, metrics):
        # a replica without samples has not updated its metrics
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        for name, metric in metrics.items():
            try:
                with _errors_of(name):
                    result |= named_values(name, metric.compute(), data.classes)
            except Exception as error:
                if not one_batch:
                    raise
                _log.warning("the metric %r cannot be computed from one batch: %s", name, error)
    if samples and not count and world.is_main:
        _log.warning("the evaluation's loss is nan: none of its targets counts")
    if count and not math.isfinite(result["loss"]) and world.is_main:
        _log.warning(
            "the evaluation's loss is %s: the model has diverged, or the data are not finite",
            result["loss"],
        )
    return result


@contextmanager
def _errors_of(metric: str) -> Iterator[None]:
    """Adds the name of the metric to an error of the block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the metric {metric!r}")
        raise


@_phase()
def predict(model: HybridModel, data: EvalLoader) -> Any:
    """Returns the model's outputs for all samples of `data`, on the CPU; a collective call.

    Every process gets all of them, so they must fit into its memory.

    Args:
        model: its modules are left in the modes (train or eval) that they were in.
        data: of which each replica takes a stretch; the targets are not used.

    Returns:
        a pytree as the model returns it, with the samples in dim 0: in the order of a map-style
        data set, and replica after replica for an iterable one. None if there are no samples.

    Raises:
        BatchError: a tensor that the model returns does not have the samples in dim 0.
    """
    model.sync_buffers()
    outputs = []
    with model.evaluating():
        for inputs, _ in data:
            found = model.map_outputs(inputs, None, lambda output, _: output)
            model.check_joinable(inputs, found)
            outputs += [tree_map_only(Tensor, Tensor.cpu, output) for output in found]
    own = merge(outputs) if outputs else None
    gathered = model.world.gather((model.world.replica, own) if outputs else None)
    parts = sorted((each for each in gathered if each is not None), key=lambda each: each[0])
    return merge([part for _, part in parts]) if parts else None


@contextmanager
def _synchronised_by(
    model: HybridModel, device: torch.device, metrics: Mapping[str, Metric]
) -> Iterator[None]:
    """Has metrics gather their states through the model's World while the block runs.

    torchmetrics' own function aborts if a process without samples has an empty list state of
    tensors that have several dimensions elsewhere.
    """

    def gather(state: Tensor, group: Any = None) -> list[Tensor]:
        # one of each replica: its other processes have seen no output
        found = model.world.gather(state.cpu() if model.owns_output else None)
        states = [each.to(device) for each in found if each is not None]
        return [each for each in states if each.numel()] or states[:1]

    modules: list[Any] = [module for metric in metrics.values() for module in metric.modules()]
    parts = [module for module in modules if getattr(module, "dist_sync_fn", gather) is None]
    for part in parts:
        part.dist_sync_fn = gather
    try:
        yield
    finally:  # or the metrics could not be pickled, and would keep the world
        for part in parts:
            part.dist_sync_fn = None
