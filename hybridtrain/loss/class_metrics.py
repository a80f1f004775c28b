"""Classification metrics by name, from torchmetrics: F1, AUC and others, overall or per class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtrain.errors import ConfigError
from hybridtrain.loss.metrics import IGNORED, classes_in_dim_1, main_output


class _Kind(NamedTuple):
    """A metric of torchmetrics.

    Attributes:
        name: the suffix of its class name, after Multiclass or Multilabel.
        average: the average over the classes; "none": one value per class.
        takes_scores: True if it takes probabilities instead of classes.
    """

    name: str
    average: str | None = None
    takes_scores: bool = False


KINDS: Mapping[str, _Kind] = {
    "f1": _Kind("F1Score", "macro"),
    "precision": _Kind("Precision", "macro"),
    "recall": _Kind("Recall", "macro"),
    "auc": _Kind("AUROC", "macro", takes_scores=True),
    "mcc": _Kind("MatthewsCorrCoef"),
    "accuracy_per_class": _Kind("Accuracy", "none"),
    "f1_per_class": _Kind("F1Score", "none"),
    "precision_per_class": _Kind("Precision", "none"),
    "recall_per_class": _Kind("Recall", "none"),
    "auc_per_class": _Kind("AUROC", "none", takes_scores=True),
    "confusion": _Kind("ConfusionMatrix"),
}
"""The metrics by name. `macro` is the mean over the classes with equal weights."""


class ByClass(nn.Module):
    """A metric over classes, or over labels if a sample may have several.

    A `Metric` for the logits and targets of the losses by name: class indices, with -100 ignored,
    or for several labels 0 and 1 in the shape of the outputs.

    Args:
        name: a key of `KINDS`.
        num_classes: the number of classes or labels; None: the metric cannot be updated.
        several: whether a sample may have several labels.
    """

    def __init__(self, name: str, num_classes: int | None = None, several: bool = False) -> None:
        super().__init__()
        self._name, self._classes, self._several = name, num_classes, several
        self.metric: Any = None  # created on first use: torchmetrics takes long to import

    @property
    def higher_is_better(self) -> bool | None:
        """True if larger values are better; None for a confusion matrix."""
        return None if self._name == "confusion" else True

    def to(self, device: Any) -> ByClass:  # type: ignore[override]
        """Moves the state to a device."""
        self._made().to(device)
        return self

    def reset(self) -> None:
        """Resets the metric."""
        self._made().reset()

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Adds the predictions of a batch."""
        kind = KINDS[self._name]
        if self._several:
            scores = torch.sigmoid(main_output(outputs).float())
            self._made().update(scores, targets.to(scores.device).long())
            return
        logits, targets = classes_in_dim_1(main_output(outputs).float(), targets)
        if targets.is_floating_point():  # probabilities, from mixup
            targets = targets.argmax(1)
        if logits.dim() > 2:
            logits, targets = logits.movedim(1, -1).flatten(0, -2), targets.flatten()
        counts = targets != IGNORED
        logits, targets = logits[counts], targets[counts]
        values = logits.softmax(1) if kind.takes_scores else logits.argmax(1)
        self._made().update(values, targets)

    def compute(self) -> Tensor:
        """Returns the value, a value per class, or the matrix (true class, predicted class)."""
        value: Tensor = self._made().compute()
        return value

    def _made(self) -> Any:
        if self.metric is None:
            if self._classes is None:
                raise ConfigError(
                    f"the metric {self._name} needs the number of classes, which the data set does "
                    f"not provide"
                )
            from torchmetrics import classification

            kind = KINDS[self._name]
            prefix, count = (
                ("Multilabel", "num_labels")
                if self._several
                else (
                    "Multiclass",
                    "num_classes",
                )
            )
            settings: dict[str, Any] = {count: self._classes, "validate_args": False}
            if kind.average is not None:
                settings["average"] = kind.average
            make: Callable[..., Any] = getattr(classification, prefix + kind.name)
            self.metric = make(**settings)
        return self.metric
