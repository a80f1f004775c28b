"""A table of numbers: columns as the features of a sample, and a column to predict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridtrain.data import (
    DataSplits,
    InMemoryDataset,
    for_trained_models,
    metadata_of_training,
)
from hybridtrain.datasets.held_out import check_share, note_without_held_out
from hybridtrain.datasets.hf_datasets import number_classes
from hybridtrain.datasets.sample_files import SampleFiles, Samples, check_columns, check_named
from hybridtrain.datasets.tables import check_complete, check_finite, read_table
from hybridtrain.errors import DataError, argument, check_choice, setting

TASKS = ("classification", "regression")

# The metadata by which features are scaled.
_SCALE = ("feature_mean", "feature_std")


def _for_trained_models(
    metadata: Mapping[str, Any],
    separator: str | None = None,
    predict_path: str | None = None,
    **of_training: Any,
) -> DataSplits:
    """Returns only the rows of `predict_path`; see `for_trained_models`."""
    rows = None
    if predict_path is not None:
        table = read_table("predict_path", predict_path, separator=separator)
        (samples,) = list(table.splits.values())[:1]
        features = metadata["features"]
        check_columns({"predict": samples}, "features", features)
        check_complete(table, features, "features", blank=False)
        check_finite(table, features, "features")
        values = _scaled(_values(samples, features), metadata)
        rows = [*values]
    return DataSplits(
        train=(), eval=None, predict=rows, predict_collate=torch.stack, metadata=metadata
    )


@for_trained_models(_for_trained_models, skips_training=True, path="eval_path")
def table(
    path: str,
    target: str | list[str] = "label",
    features: list[str] | None = None,
    task: str = "classification",
    eval_path: str | None = None,
    eval_share: float = 0.1,
    split_seed: int = 0,
    stratify: bool | str = False,
    separator: str | None = None,
    drop_missing: bool = False,
    classes: list[str] | None = None,
    normalize: bool = True,
    predict_path: str | None = None,
) -> DataSplits:
    """Returns the rows of a table: numbers as inputs, and a class or numbers to predict.

    Items are `(x, y)`: float32 of shape (features,), and the class, int64, or float32 of shape
    (targets,). Everything is in memory.

    Metadata: `task`, `features` (their columns), `num_features`, `num_classes` (the number of
    targets in a regression), `classes` (their names), and the `feature_mean` and `feature_std` that
    are subtracted and divided by.

    Args:
        path: a .csv, .tsv, .jsonl or .parquet file with one line per sample; a pattern, or a folder
            of such files named after their splits.
        target: the column of the class, or of the number (several: a list).
        features: the columns of the features; None: all columns of numbers but the target.
        task: classification or regression.
        eval_path: the path of the evaluation split, like `path`; None: a split of `path`, or a
            held-out share of it.
        eval_share: the share to hold out if there is no evaluation split, 0 to 1.
        split_seed: the seed for choosing held-out samples.
        stratify: whether to hold out the share of each class; `auto`: if each class has
            enough samples.
        separator: see `hf_datasets`.
        drop_missing: whether to leave out samples without a value; False: an error.
        classes: the class names in index order; None: sorted.
        normalize: whether to give each feature mean 0 and standard deviation 1 over the training
            samples.
        predict_path: a table like `path` without targets, for the command `predict`.

    Raises:
        DataError: the table or a column is missing, or a value is not a number.
    """
    check_named(path=path)
    check_choice("task", task, TASKS)
    check_share(eval_share)
    targets = [target] if isinstance(target, str) else list(target)
    is_regression = task == "regression"
    if stratify is True and is_regression:
        raise DataError(f"{setting('stratify', True)} needs classes: remove it")
    files = SampleFiles(
        *(path, None, eval_path, "train", None, eval_share, split_seed),
        stratify=stratify,
        classes=None if is_regression else targets[0],
        separator=separator,
        drop_missing=drop_missing,
    )
    of_targets = dict.fromkeys(targets, "target")
    unused: list[str] = []
    trained_on = metadata_of_training()
    if trained_on is not None:
        features = _features_of(trained_on, features)
    if features is None:
        first = files.read(of_targets, blank_targets=False)
        columns = [name for name in first.samples["train"].features if name not in targets]
        features = [name for name in columns if _is_numeric(first, name)]
        unused = [name for name in columns if name not in features]
    if not features:
        raise DataError(f"{setting('path', path)} has no column of numbers except the target")
    source = files.read({**dict.fromkeys(features, "features"), **of_targets}, blank_targets=False)
    check_columns(source.samples, "features", features)
    for of_file in source.tables:
        check_finite(of_file, features, "features")
    x = {split: _values(samples, features) for split, samples in source.samples.items()}
    metadata: dict[str, Any] = {"task": task, "features": features, "num_features": len(features)}
    notes: list[str] = []
    without_samples: Sequence[str] = ()
    if is_regression:
        check_columns(source.samples, "target", targets)
        for of_file in source.tables:
            check_finite(of_file, targets, "target")
        y = {split: _values(samples, targets) for split, samples in source.samples.items()}
        metadata |= {"num_classes": len(targets)}
    else:
        numbering = number_classes(source, targets, classes, path)
        y = {
            split: torch.tensor([numbering.numbers[split][v] for v in samples[targets[0]]])
            for split, samples in source.samples.items()
        }
        metadata |= {"num_classes": numbering.count}
        if numbering.names is not None:
            metadata["classes"] = numbering.names
        without_samples = numbering.without_samples
        if source.held_out:
            notes += note_without_held_out(numbering.without_held_out(), stratify)
    if trained_on is not None:
        metadata |= {name: trained_on[name] for name in _SCALE if name in trained_on}
    elif normalize:
        deviation = x["train"].std(0, correction=0)
        metadata["feature_mean"] = x["train"].mean(0).tolist()
        metadata["feature_std"] = torch.where(deviation > 0, deviation, 1.0).tolist()
    notes.append(
        f"{len(features)} features: {', '.join(features[:8])}{', ...' * (len(features) > 8)}"
    )
    if unused:
        notes.append(f"columns without numbers not used: {', '.join(unused[:8])}")
    alone = _for_trained_models(metadata, separator, predict_path)
    return DataSplits(
        train=InMemoryDataset(_scaled(x["train"], metadata), y["train"]),
        eval=InMemoryDataset(_scaled(x["eval"], metadata), y["eval"]),
        predict=alone.predict,
        predict_collate=alone.predict_collate,
        metadata=metadata,
        held_out=source.held_out,
        notes=[*notes, *source.notes],
        digest=source.digest,
        without_samples=without_samples,
    )


def _features_of(metadata: Mapping[str, Any], features: list[str] | None) -> list[str]:
    """Returns the features that a model was trained on.

    Raises:
        DataError: `features` are others.
    """
    of_model: list[str] = metadata["features"]
    if features is not None and list(features) != of_model:
        raise DataError(
            f"{setting('features', features)}: the model was trained on {', '.join(of_model)}: "
            f"remove {argument('features')}"
        )
    return of_model


def _is_numeric(source: Samples, column: str) -> bool:
    """Returns whether all values of a column that has some are numbers, as text in CSV."""
    samples = source.samples["train"]
    dtype = str(getattr(samples.features[column], "dtype", ""))
    if not source.numbers_are_texts:
        return dtype.startswith(("int", "uint", "float", "bool"))
    values = [value for value in samples[column] if value is not None and value.strip()]
    return bool(values) and all(map(_is_number, values))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _values(samples: Any, columns: Sequence[str]) -> Tensor:
    """Returns columns as float32 of shape (samples, columns)."""
    by_column = [[float(value) for value in samples[column]] for column in columns]
    return torch.tensor(by_column, dtype=torch.float64).T.float()


def _scaled(values: Tensor, metadata: Mapping[str, Any]) -> Tensor:
    if "feature_mean" not in metadata:
        return values
    return (values - torch.tensor(metadata["feature_mean"])) / torch.tensor(metadata["feature_std"])
