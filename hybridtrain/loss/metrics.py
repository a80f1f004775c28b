"""The metrics of an evaluation, without torchmetrics, which takes as long to import as PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrain.errors import ConfigError, argument, check_choice, setting

IGNORED = -100
"""The target that PyTorch's losses and `Accuracy` ignore."""


class Metric(Protocol):
    """The metric interface that an evaluation uses; metrics of torchmetrics have it.

    While `compute` runs, each module in the metric whose attribute `dist_sync_fn` is None gets a
    function there that gathers a tensor from all replicas.
    """

    def to(self, device: torch.device) -> Any:
        """Moves the state to a device."""

    def reset(self) -> None:
        """Resets the metric."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Adds a batch."""

    def compute(self) -> Any:
        """Returns the value over all batches of all replicas."""

    def modules(self) -> Iterator[nn.Module]:
        """Returns the metric and the modules in it."""


def direction(key: str, value: str, metric: Any, mode: str | None) -> str:
    """Returns `min` or `max`: whether the smallest or the largest value of an evaluation is best.

    A `mode` takes precedence. Without one, the smallest loss is best, and for a metric, its
    `higher_is_better` decides, as in torchmetrics.

    Args:
        key: the name of the argument `mode` in error messages, such as `best_mode`.
        value: `loss`, or the name of a metric.
        metric: the metric with that name, or its class; None for the loss or an unknown metric.
        mode: `min`, `max` or None.

    Raises:
        ConfigError: `mode` is invalid, or is missing and the metric has no `higher_is_better`.
    """
    if mode is not None:
        check_choice(key, mode, ("min", "max"))
        return mode
    if value == "loss":
        return "min"
    higher = getattr(metric, "higher_is_better", None)
    if not isinstance(higher, bool):
        raise ConfigError(
            f"{value} does not say whether a larger value is better: set {setting(key, 'min')} "
            f"or {setting(key, 'max')}"
        )
    return "max" if higher else "min"


def named_values(name: str, value: Any, classes: Sequence[str] | None = None) -> dict[str, float]:
    """Returns the values of a metric by name, as an evaluation reports them.

    A number gets the metric's name. A tensor with one value per class, as returned by torchmetrics
    with `average=None`, gets a name for each: `f1/cat`, or `f1/0` if the classes have no names. A
    square matrix, such as a confusion matrix, gets `name/true/predicted`. A mapping, as returned by
    a `MetricCollection`, gets `name/key`.

    Args:
        name: the name of the metric.
        value: the result of its `compute`.
        classes: the class names in index order.

    Raises:
        ConfigError: the value is a tensor of several dimensions, or several tensors.
    """
    if isinstance(value, Mapping):
        parts = [named_values(f"{name}/{key}", part, classes) for key, part in value.items()]
        return {key: number for part in parts for key, number in part.items()}
    if isinstance(value, Tensor) and value.dim() == 1 and len(value) > 1:
        has_names = classes is not None and len(classes) == len(value)
        labels: Sequence[Any] = classes if has_names and classes else range(len(value))
        return {f"{name}/{x}": number for x, number in zip(labels, value.tolist(), strict=True)}
    if isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == value.shape[1] > 1:
        has_names = classes is not None and len(classes) == len(value)
        labels = classes if has_names and classes else range(len(value))
        by_class = zip(labels, value, strict=True)
        parts = [named_values(f"{name}/{label}", line, classes) for label, line in by_class]
        return {key: number for part in parts for key, number in part.items()}
    returned = None
    if isinstance(value, Tensor) and value.numel() != 1:
        returned = f"tensor of shape {tuple(value.shape)}"
    elif isinstance(value, list | tuple):
        returned = type(value).__name__
    if returned is not None:
        raise ConfigError(
            f"the metric {name!r} returns a {returned}, but an evaluation metric must return a "
            f"number, one number per class, or a square matrix over the classes"
        )
    return {name: float(value)}


def metric_of(value: str, metrics: Iterable[str]) -> str | None:
    """Returns the name of the metric that reports `value`, such as f1 for f1/cat, or None.

    Args:
        value: a value of an evaluation, as named by `named_values`.
        metrics: the names of the metrics.
    """
    names = [name for name in metrics if value == name or value.startswith(f"{name}/")]
    return max(names, key=len, default=None)


def check_reported(value: str, metrics: Iterable[str], result: Mapping[str, float]) -> None:
    """Checks that an evaluation reports `value`, a metric or one of a metric's values.

    Args:
        value: the value to compare runs by.
        metrics: the names of all metrics.
        result: the result of an evaluation, without metrics that could not be computed.

    Raises:
        ConfigError: the metric reports other values; the message lists some of them.
    """
    metric = metric_of(value, metrics)
    reported = [name for name in result if metric_of(name, metrics) == metric]
    if metric is not None and reported and value not in reported:
        few = ", ".join(reported[:8]) + (", ..." if len(reported) > 8 else "")
        raise ConfigError(f"{value} is not a value of the evaluation: {metric} has {few}")


class Accuracy(nn.Module):
    """The share of correct predictions, 0 to 1; NaN without predictions. Ignores targets of -100.

    If a sample may have several labels, its targets are 0 and 1 in the shape of the outputs, and
    a prediction is correct if all of them are (exact match), where an output above 0 means 1. So it
    is with one output per sample, of shape (N, 1) or (N).

    A `Metric`, but not a torchmetrics metric, so it cannot be in a `MetricCollection`. It does not
    need the number of classes, and accepts classes in dim 1 or in the last dimension: (N, C) with
    (N), (N, T, C) with (N, T), (N, C, ...) with (N, ...).

    Attributes:
        dist_sync_fn: gathers a tensor of counts from all replicas; None with a single replica.
    """

    higher_is_better = True
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.dist_sync_fn: Callable[[Tensor], list[Tensor]] | None = None
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64), persistent=False)

    def reset(self) -> None:
        """Resets the metric."""
        self.counts.zero_()

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Adds the predictions of a batch."""
        logits = main_output(outputs)
        if logits.numel() == targets.numel():  # as from bce; outputs may have a last dimension of 1
            logits = logits.reshape(targets.shape)
            right, number = _exact_matches(logits, targets)
        else:
            logits, targets = classes_in_dim_1(logits, targets)
            right = (logits.argmax(1) == targets).sum()  # never true for -100
            number = (targets != IGNORED).sum()
        self.counts += torch.stack([right, number]).to(self.counts.device)

    def compute(self) -> Tensor:
        """Returns the accuracy, 0-dim, float64."""
        gather = self.dist_sync_fn or (lambda counts: [counts])
        counts = torch.stack(gather(self.counts)).sum(0).double()
        return counts[0] / counts[1]


def _exact_matches(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of samples with all labels correct, and the number of samples.

    Raises:
        ConfigError: a target is neither 0 nor 1.
    """
    labels = targets.flatten(1) if targets.dim() > 1 else targets[:, None]
    counts = labels != IGNORED
    if bool(((labels != 0) & (labels != 1) & counts).any()):
        raise ConfigError(
            "the metric accuracy compares classes, or labels of 0 and 1, but the targets are other "
            f"numbers of the shape of the outputs, {tuple(targets.shape)}: remove it"
        )
    right = ((logits.reshape(labels.shape) > 0) == (labels > 0.5)) | ~counts
    samples = counts.any(1)
    return (right.all(1) & samples).sum(), samples.sum()


class Perplexity(nn.Module):
    """The perplexity: exp of the mean cross-entropy over all targets other than -100.

    A `Metric` like `Accuracy`, for logits or log-probabilities. NaN without targets.

    Attributes:
        dist_sync_fn: gathers a tensor of sums from all replicas; None with a single replica.
    """

    higher_is_better = False
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.dist_sync_fn: Callable[[Tensor], list[Tensor]] | None = None
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64), persistent=False)

    def reset(self) -> None:
        """Resets the metric."""
        self.sums.zero_()

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Adds the predictions of a batch."""
        logits, targets = classes_in_dim_1(main_output(outputs), targets)
        loss = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
        number = (targets != IGNORED).sum()
        self.sums += torch.stack([loss.double(), number.double()]).to(self.sums.device)

    def compute(self) -> Tensor:
        """Returns the perplexity, 0-dim, float64."""
        gather = self.dist_sync_fn or (lambda sums: [sums])
        sums = torch.stack(gather(self.sums)).sum(0)
        return (sums[0] / sums[1]).exp()


def main_output(outputs: Any) -> Tensor:
    """Returns the tensor of predictions: the output itself, or its field `logits`.

    Raises:
        ConfigError: the output is not a tensor and has no field `logits`.
    """
    main = field_of(outputs, "logits", outputs)
    if not isinstance(main, Tensor):
        raise ConfigError(
            f"losses and metrics chosen by name take a tensor, or an output with `logits`, but the "
            f"model returns a {type(outputs).__name__}: return the logits, or train from Python "
            f"with a custom {argument('loss_fn')}"
        )
    return main


def field_of(output: Any, name: str, default: Any = None) -> Any:
    """Returns a field of a mapping, a dataclass, a named tuple or another object."""
    fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    return fields[name] if name in fields else getattr(output, name, default)


def classes_in_dim_1(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Flattens (N, T, C) with (N, T) to (N * T, C) with (N * T); keeps other shapes unchanged."""
    if outputs.dim() > 2 and outputs.shape[:-1] == targets.shape:
        return outputs.flatten(0, -2), torch.flatten(targets)
    return outputs, targets
