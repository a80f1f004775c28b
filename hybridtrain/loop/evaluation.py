"""Evaluation: every sample is counted exactly once over all replicas."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybridtrain._base.microbatch import batch_size, merge
from hybridtrain.data import EvalLoader
from hybridtrain.errors import ConfigError, argument
from hybridtrain.launch import Phase, activity
from hybridtrain.loop.generation import answers, check_generates, prompts_of
from hybridtrain.loss import (
    LossFn,
    Metric,
    MicrobatchCounts,
    OfTexts,
    main_output,
    named_values,
)
from hybridtrain.model import HybridModel
from hybridtrain.verification import LogProbabilityCheck
from hybridtrain.world import World

_log = logging.getLogger(__name__)


@contextmanager
def _phase() -> Iterator[None]:
    """Reports to the watchdog that this process evaluates and is expected to make progress."""
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
        data: this replica's samples.
        loss_fn: as in `HybridModel.train_step`; returns the mean over everything it counts.
        metrics: by name; each is updated with the main output (see `main_output`) and the targets,
            or with the whole output where the targets are a mapping, and synchronises itself over
            all processes. An `OfTexts` gets generated texts and their references.
        stop: called after each batch; once it returns True, the result covers the samples so far.
            Replicas may stop at different batches; the others are waited for.
        on_batch: called after each batch with the number of samples this process has evaluated.
        one_batch: evaluate only the first batch. A metric that cannot be computed from one batch is
            a warning.

    Returns:
        `loss`, each metric, and `samples`, on every process. A metric with a value per class has
        `metric/class` for each, by the names in `data.classes` or else by number.

    Raises:
        ConfigError: the loss is an NLL loss but the model returns logits, a metric returns neither
            a number nor one per class, or texts cannot be generated for a metric.
    """
    model.sync_buffers()
    world, device = model.world, model.output_device

    for metric in metrics.values():
        metric.to(device)
        metric.reset()
    states = ReplicaMetrics(metrics, world)

    def measure(output: Any, targets: Any) -> Tensor:
        if loss.takes_log_probabilities and not done:
            LogProbabilityCheck(loss, targets, batch_size(targets)).observe(0, output)
        for name, metric in states.current.items():
            if isinstance(metric, OfTexts):
                continue
            with _errors_of(name):
                whole = isinstance(targets, Mapping)  # detection models have such targets
                metric.update(output if whole else main_output(output), targets)
        return loss(output, targets)

    # summed in the order of the logical replicas, so that the result does not depend on how
    # processes run them
    sums = torch.zeros(world.logical_replicas, 3, dtype=torch.float64)
    loss_sum = torch.zeros(world.logical_replicas, dtype=torch.float64, device=device)
    done = 0
    loss = model.resolve_loss(loss_fn)
    with model.evaluating():
        # all processes of a replica generate, each from the whole prompts
        has_texts = any(isinstance(metric, OfTexts) for metric in metrics.values())
        readers = None if has_texts else model.readers
        for replica, (inputs, targets) in data.by_replica(readers):
            states.choose(replica)
            losses = model.map_outputs(inputs, targets, measure)
            _score_texts(model, data, states.current, inputs, targets)
            size = batch_size(inputs, targets)
            done += size
            if losses:  # else the last stage is in another process
                counted = MicrobatchCounts(loss, (inputs, targets), model.options.chunks)
                sums[replica, 1:] += torch.tensor([counted.count, size], dtype=torch.float64)
                for value, factor in zip(losses, counted.weights, strict=True):
                    if factor:  # the mean over nothing is NaN
                        loss_sum[replica].add_(value, alpha=factor)
            on_batch(done)
            if one_batch or (stop is not None and model.pipeline.any_process(stop())):
                break
    sums[:, 0] = loss_sum.cpu()
    total, count, samples = map(sum, zip(*model.reduce_loss(sums).tolist(), strict=True))
    result = {"loss": total / count if count else float("nan"), "samples": int(samples)}
    with warnings.catch_warnings():
        # a replica without samples has not updated its metrics
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        for name, metric in metrics.items():
            try:
                synchronised = _synchronised_by(model, device, states, name, metric)
                with _errors_of(name), synchronised:
                    result |= named_values(name, metric.compute(), data.classes)
            except Exception as error:
                if not one_batch or isinstance(error, _CountsAloneError):
                    raise
                _log.warning("metric %r cannot be computed from one batch: %s", name, error)
    if samples and not count and world.is_main:
        _log.warning(
            "the evaluation loss is nan, because none of its targets counts for the loss: compare "
            "%s with the labels",
            argument("ignore_index"),
        )
    if count and not math.isfinite(result["loss"]) and world.is_main:
        _log.warning(
            "the evaluation loss is %s: the model has diverged, or the data contain non-finite "
            "values",
            result["loss"],
        )
    return result


def _score_texts(
    model: HybridModel, data: EvalLoader, metrics: Mapping[str, Metric], inputs: Any, targets: Any
) -> None:
    """Generates a text for each sample, and updates the metrics of texts."""
    by_length = defaultdict(list)
    for metric in metrics.values():
        if isinstance(metric, OfTexts):
            by_length[metric.max_new_tokens].append(metric)
    if not by_length:
        return
    check_generates(model)
    if data.tokenizer is None:
        raise ConfigError(
            "metrics of generated texts need the tokenizer of a model of transformers: set "
            f"{argument('tokenizer')} of the evaluation data"
        )
    prompts = list(prompts_of(inputs, targets))
    decode = partial(data.tokenizer.decode, skip_special_tokens=True)
    references = [decode(prompt.reference).strip() for prompt in prompts]
    for max_new_tokens, of_texts in by_length.items():
        texts = [decode(ids).strip() for ids in answers(model, prompts, max_new_tokens)]
        for metric in of_texts:
            metric.update(texts, references)


@contextmanager
def _errors_of(metric: str) -> Iterator[None]:
    """Adds the name of the metric to an error raised in the block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the metric {metric!r}")
        raise


@_phase()
def predict(model: HybridModel, data: EvalLoader) -> Any:
    """Returns the model's outputs for all samples of `data`, on the CPU; a collective call.

    Every process receives all outputs, so they must fit in its memory.

    Args:
        model: its modules are left in the modes (train or eval) that they were in.
        data: the samples; each replica runs a contiguous part of them. Targets are not used.

    Returns:
        the model's output structure with the samples in dim 0: in the order of a map-style
        data set, and replica by replica for an iterable one. None if there are no samples.

    Raises:
        BatchError: a tensor that the model returns does not have the samples in dim 0.
    """
    model.sync_buffers()
    outputs: dict[int, list[Any]] = defaultdict(list)
    with model.evaluating():
        for replica, (inputs, _) in data.by_replica(model.readers):
            microbatches = model.map_outputs(inputs, None, lambda output, _: output)
            model.check_joinable(inputs, microbatches)
            outputs[replica] += [tree_map_only(Tensor, Tensor.cpu, one) for one in microbatches]
    merged = {replica: merge(parts) for replica, parts in outputs.items() if parts}
    by_replica: dict[int, Any] = {}
    for gathered in model.world.gather(merged):
        by_replica |= gathered
    return merge([by_replica[replica] for replica in sorted(by_replica)]) if by_replica else None


class ReplicaMetrics:
    """Metrics with one state per logical replica that this process runs.

    Floating-point sums depend on their order, so each replica has its own state, and the states are
    combined in replica order, as if each replica had a process.

    Attributes:
        current: the metrics of the replica being evaluated, by name.
    """

    def __init__(self, metrics: Mapping[str, Metric], world: World) -> None:
        first, *others = world.owned_replicas
        self._by_replica = {first: metrics}
        self._by_replica |= {replica: copy.deepcopy(metrics) for replica in others}
        self._others = others
        self.current = metrics

    @property
    def has_others(self) -> bool:
        """True if this process runs several replicas."""
        return bool(self._others)

    def choose(self, replica: int) -> None:
        """Makes `replica` the current one."""
        self.current = self._by_replica[replica]

    def states_of_others(self, name: str) -> list[list[Tensor]]:
        """Returns the tensors that a metric of each further replica would send, in order."""
        sent: list[list[Tensor]] = []
        for metric in (self._by_replica[replica][name] for replica in self._others):
            recorder = _Recorder()
            # the value is ignored: a replica without samples may have none
            with _gathering(metric, recorder), suppress(Exception):
                metric.compute()
            sent.append(recorder.states)
        return sent


class _Recorder:
    """Records the tensors that a metric would send to other processes, in order."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        self.states.append(state.cpu())
        return [state]


@contextmanager
def _gathering(metric: Metric, gather: Callable[..., list[Tensor]]) -> Iterator[None]:
    """Makes a metric synchronize its state through `gather` while the block runs."""
    modules: list[Any] = list(metric.modules())
    parts = [module for module in modules if getattr(module, "dist_sync_fn", gather) is None]
    available = [getattr(part, "distributed_available_fn", None) for part in parts]
    for part in parts:
        part.dist_sync_fn = gather
        if hasattr(part, "distributed_available_fn"):  # also with one process for several replicas
            part.distributed_available_fn = lambda: True
    try:
        yield
    finally:  # otherwise the metrics could not be pickled, and would keep the world alive
        for part, function in zip(parts, available, strict=True):
            part.dist_sync_fn = None
            if hasattr(part, "distributed_available_fn"):
                part.distributed_available_fn = function


@contextmanager
def _synchronised_by(
    model: HybridModel, device: torch.device, metrics: ReplicaMetrics, name: str, metric: Metric
) -> Iterator[None]:
    """Makes a metric gather its states through the model's World while the block runs.

    torchmetrics' own gather aborts when a process without samples has an empty list state while
    other processes have multi-dimensional tensors in it.
    """
    if model.world.logical_replicas == 1 and model.world.size == 1:
        yield
        return
    if not callable(getattr(metric, "modules", None)):
        raise _counts_alone(name)
    modules: list[Any] = list(metric.modules())
    if metrics.has_others and any(getattr(module, "dist_sync_fn", None) for module in modules):
        raise ConfigError(_NOT_COMBINED)
    others = metrics.states_of_others(name)
    gathers = False

    def gather(state: Tensor, group: Any = None) -> list[Tensor]:
        nonlocal gathers
        gathers = True
        if not all(others):
            raise ConfigError(_NOT_COMBINED)
        states = [state.cpu(), *(states.pop(0) for states in others)]
        # one process per replica: the others have seen no output
        gathered = model.world.gather(states if model.owns_output else [])
        all_states = [part.to(device) for process in gathered for part in process]
        return [part for part in all_states if part.numel()] or all_states[:1]

    with _gathering(metric, gather):
        yield
    if not gathers and not any(getattr(module, "dist_sync_fn", None) for module in modules):
        raise _counts_alone(name)
    if any(others):
        raise ConfigError(_NOT_COMBINED)


class _CountsAloneError(ConfigError):
    """A metric does not gather what the processes and replicas have counted."""


def _counts_alone(name: str) -> ConfigError:
    return _CountsAloneError(
        f"the metric {name} counts only the samples of its own process or replica: use a metric of "
        "torchmetrics, or let it gather its state in compute() with self.dist_sync_fn(tensor), an "
        "attribute that is None in __init__ and returns the tensors of all replicas, as "
        "hybridtrain.loss.Accuracy does"
    )


_NOT_COMBINED = (
    "the metric has list states of different lengths, or gathers its own state, so the states of "
    "several replicas cannot be combined: start one process per replica, or use another metric"
)
