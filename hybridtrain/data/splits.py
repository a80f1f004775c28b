"""The data sets of a run: training and evaluation splits, how to batch them, and metadata."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, default_collate

from hybridtrain._base.microbatch import map_tensors
from hybridtrain._base.text_table import counted
from hybridtrain.errors import DataError

Path: TypeAlias = str | os.PathLike[str]

# The number of files of which a digest covers the size and the first bytes, and that many bytes.
_MOST_SIZES, _MOST_CONTENTS, _FIRST_BYTES = 4096, 64, 1 << 16


def already_batched(batch: Any) -> Any:
    """Returns `batch` unchanged; the `collate_fn` for a data set with whole-batch `__getitems__`.

    Inside a wrapper that only has `__getitem__`, such a data set returns a list of items instead,
    which `default_collate` stacks.
    """
    return default_collate(batch) if isinstance(batch, list) else batch


@dataclass(frozen=True)
class WithoutTargets:
    """A `collate_fn` for inputs without targets: it returns pairs with None as targets."""

    collate: Callable[[Any], Any]

    def __call__(self, batch: Any) -> tuple[Any, None]:
        """Returns the batch of inputs, and None."""
        return self.collate(batch), None


@dataclass(frozen=True)
class DataSplits:
    """The data sets of a run.

    Both splits are map-style (`__getitem__` and `__len__`) or iterable, can be pickled for loader
    workers, and yield `(inputs, target)`, where each is a tensor or a pytree of tensors. The method
    `labels()` of a training split, if it has one, returns the class of each sample, or 0 and 1 for
    each sample and label, without reading the samples.
    """

    train: Dataset[Any] | Iterable[Any]
    """The training split."""

    eval: Dataset[Any] | Iterable[Any] | None
    """The evaluation split, or None."""

    collate: Callable[[Any], Any] | None = already_batched
    """The loader's `collate_fn`."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that a model may need: `num_classes`, `vocab_size`, `seq_len`, `image_size`, ...
    They fill the keys of the same name that are null in the model's config."""

    predict: Dataset[Any] | Iterable[Any] | None = None
    """Inputs without targets, which the command `predict` uses instead of the evaluation split."""

    predict_collate: Callable[[Any], Any] | None = None
    """The loader's `collate_fn` for `predict`; None: `collate`."""

    tokenizer: Any = None
    """The transformers tokenizer that created the token ids; `export` saves it with the model."""

    vocabulary: str | None = None
    """The digest of the tokenizer's vocabulary, which must be the same on all ranks."""

    held_out: bool = False
    """True if the evaluation split was split off from the training data."""

    notes: Sequence[str] = ()
    """Further parts of the data line that a run prints, such as formats and paths."""

    digest: str | None = None
    """The digest of the samples' files, by `digest_of_files`."""

    without_samples: Sequence[str] = ()
    """The names of classes without a training sample."""

    def __str__(self) -> str:
        train, evaluation = length_of(self.train), length_of(self.eval)
        if train == 0 and self.predict is not None:
            count = f"{length_of(self.predict):,} samples to predict"
            return "data: " + "; ".join([count, *self.notes])
        if train == 0 and evaluation is not None:
            return "data: " + "; ".join([f"{evaluation:,} samples to evaluate", *self.notes])
        what = "windows" if "seq_len" in self.metadata else "samples"
        parts = [f"{train:,} {what}" if train is not None else f"an unknown number of {what}"]
        if evaluation is not None:
            how = "held out" if self.held_out else "to evaluate"
            parts[0] += f" to train on, {evaluation:,} {how}"
        names = self.metadata.get("classes")
        if isinstance(names, list | tuple) and names:
            counts = self._samples_by_class(len(names))
            parts.append(f"{counted(len(names), 'class', 'es')}: {_classes(names, counts)}")
            if alike := _alike(names):
                parts.append(f"classes that differ only in case or spaces: {alike}")
        elif isinstance(number := self.metadata.get("num_classes"), int):
            noun = ("number", "s") if self.metadata.get("task") == "regression" else ("class", "es")
            text = counted(number, *noun) + " per sample" * (noun[0] == "number")
            if (counts := self._samples_by_class(number)) and noun[0] == "class":
                text += f": {_classes(range(number), counts)}"
            parts.append(text)
        return "data: " + "; ".join([*parts, *self.notes])

    def _samples_by_class(self, classes: int) -> list[int] | None:
        """Returns the number of training samples of each class, or None if it is unknown."""
        labels = getattr(self.train, "labels", None)
        if not callable(labels):
            return None
        try:
            of_samples = torch.as_tensor(labels())
            if of_samples.dim() == 2:  # 0 and 1 for each label
                return [int(count) for count in of_samples.sum(0).tolist()]
            counts: list[int] = of_samples.flatten().long().bincount(minlength=classes).tolist()
        except Exception:  # a method of the user's with another meaning
            return None
        return counts


def _alike(names: Sequence[Any]) -> str:
    """Returns the first class names that are the same but for case or spaces."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(" ".join(str(name).casefold().split()), []).append(repr(str(name)))
    return ", ".join(" and ".join(group) for group in groups.values() if len(group) > 1)[:200]


def _classes(names: Sequence[Any], counts: Sequence[int] | None) -> str:
    """Returns the first classes, each with its number of training samples."""
    # a name may contain the separator of this list
    shown = [repr(name) if "," in str(name) else str(name) for name in names[:8]]
    if counts is not None and len(counts) == len(names):
        shown = [f"{name} ({count:,})" for name, count in zip(shown, counts, strict=False)]
        if len(names) > 8:
            return ", ".join(shown) + f", ... ({min(counts):,} to {max(counts):,} each)"
    return ", ".join(shown) + (", ..." if len(names) > 8 else "")


DataFunction = TypeVar("DataFunction", bound=Callable[..., DataSplits])


_TRAINED_ON: ContextVar[Mapping[str, Any] | None] = ContextVar("trained_on", default=None)


class HeldOutError(Exception):
    """The samples to evaluate on are a part of the training data, so that all must be read."""


def metadata_of_training() -> Mapping[str, Any] | None:
    """Returns the metadata of a trained model's data; None: a data function reads all splits.

    If it is not None, only the evaluation split is needed. A data function decorated by
    `for_trained_models(skips_training=True)` then reads no training samples and returns the others
    as both splits. It raises `HeldOutError` if they are a held-out share.
    """
    return _TRAINED_ON.get()


def for_trained_models(
    load: Callable[..., DataSplits] | None = None, *, skips_training: bool = False, **evaluated: str
) -> Callable[[DataFunction], DataFunction]:
    """Decorates a data function with variants for trained models, which read no training data.

    `predict data.predict_path=` and `export` call `function.for_trained_models(metadata,
    **arguments)`, where `metadata` belongs to the data that the model was trained on. `evaluate`
    and `predict` call `function.evaluated_alone` with the same arguments; it returns None if the
    samples to evaluate on are a part of the training data.

    Args:
        load: returns splits with an empty `train`; None: no such variant.
        skips_training: the function looks at `metadata_of_training`, because one place, such as a
            folder, may have all splits.
        evaluated: the argument with the place of the training samples, and the argument with the
            place of the samples to evaluate on, as in `path="eval_path"`.
    """

    def decorate(function: DataFunction) -> DataFunction:
        if load is not None:
            function.for_trained_models = load  # type: ignore[attr-defined]
        if evaluated or skips_training:
            alone = partial(_evaluated_alone, function, evaluated, skips_training)
            function.evaluated_alone = alone  # type: ignore[attr-defined]
        return function

    return decorate


_OF_CLASSES = ("num_classes", "num_labels", "classes")


def _evaluated_alone(
    function: Callable[..., DataSplits],
    evaluated: Mapping[str, str],
    skips_training: bool,
    metadata: Mapping[str, Any],
    /,
    **arguments: Any,
) -> DataSplits | None:
    """Returns the samples to evaluate on, with the classes of `metadata`.

    If they have a place of their own, the data function gets that place as the training samples'.
    """
    settings = dict(arguments)
    for train, evaluation in evaluated.items():
        place = {**_defaults(function), **arguments}.get(evaluation)
        if place is None and not skips_training:
            return None
        if place is not None:
            settings |= {train: place, evaluation: place}
    if "classes" in signature(function).parameters and not settings.get("classes"):
        numbers = range(metadata.get("num_classes") or 0)
        settings["classes"] = metadata.get("classes") or [*map(str, numbers)] or None
    # A context variable, because data functions of the user's own do not have this argument.
    token = _TRAINED_ON.set(metadata)
    try:
        splits = function(**settings)
    except HeldOutError:
        return None
    finally:
        _TRAINED_ON.reset(token)
    # The trained model's classes number its outputs, so other data keeps them.
    of_data = {name: value for name, value in splits.metadata.items() if name not in _OF_CLASSES}
    if "longest" in metadata and "longest" in of_data:  # of all samples of the run
        of_data["longest"] = max(metadata["longest"], of_data["longest"])
    if arguments.get("classes"):
        of_data["classes"] = arguments["classes"]
    return replace(
        splits,
        train=(),
        predict=None,
        metadata={**metadata, **of_data},
        held_out=False,
        digest=None,
        without_samples=(),
    )


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: each.default for name, each in signature(function).parameters.items()}


def length_of(dataset: Any) -> int | None:
    """Returns `len(dataset)`, or None if it has no length or `__len__` raises."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def digest_of_texts(texts: Iterable[str]) -> str:
    """Returns a short digest of strings, in order."""
    hasher = hashlib.blake2b(digest_size=8)
    for text in texts:
        # A terminator, or ["ab", "c"] and ["a", "bc"] would be equal.
        hasher.update(text.encode("utf-8", "surrogateescape") + b"\0")
    return hasher.hexdigest()


def digest_of_files(paths: Sequence[Path], every_size: bool = True) -> str:
    """Returns a short digest of the files that hold the samples, in order.

    It covers all names relative to their common folder, all sizes, and the first 64 KiB of up to 64
    files, evenly spaced in the list. It covers no timestamps, because copies of the same files have
    different ones.

    Args:
        paths: the files.
        every_size: False to cover the sizes of up to 4096 files only, evenly spaced: the stat of a
            million files would take minutes on a network file system.
    """
    sized = paths if every_size else _evenly_spaced(paths, _MOST_SIZES)
    return digest_of_texts(
        [
            *below_common_folder(paths),
            *map(_size, sized),
            *map(_first_bytes, _evenly_spaced(paths, _MOST_CONTENTS)),
        ]
    )


def _evenly_spaced(paths: Sequence[Path], most: int) -> Sequence[Path]:
    return paths[:: max(1, -(-len(paths) // most))]


def _size(path: Path) -> str:
    try:
        return str(os.stat(path).st_size)
    except OSError:  # reading the sample will raise an error
        return ""


def _first_bytes(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.blake2b(file.read(_FIRST_BYTES), digest_size=8).hexdigest()
    except OSError:
        return ""


def below_common_folder(paths: Sequence[Path]) -> list[str]:
    """Returns paths relative to their common folder."""
    if not paths:
        return []
    names = [os.fspath(path) for path in paths]
    # `dirname` keeps whole folders of the prefix; `commonpath` of one file would be that file
    common = os.path.dirname(os.path.commonprefix([min(names), max(names)]))  # noqa: RUF071
    return [name[len(common) :] for name in names]


class InMemoryDataset(Dataset[Any]):
    """Samples held in memory as tensors, gathered a whole batch at a time.

    A `DataLoader` calls `__getitems__` with all indices of a batch: one `index_select` per tensor
    replaces a Python call and a copy per sample, and a stack. Pass `already_batched` as the
    `collate_fn` of a `DataLoader`; the loaders of hybridtrain do so automatically.

    Args:
        inputs: a tensor, or a pytree of tensors, with the samples in dim 0.
        targets: a tensor, or a pytree of tensors, with the same number of samples in dim 0.
        prepare: `prepare(inputs, targets)` converts the inputs and targets of a batch, for example
            bytes to normalized floats. It must keep dim 0 and be picklable: a module-level
            function, or a `functools.partial` of one.

    Raises:
        DataError: the tensors differ in length, or there are no tensors.
    """

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        prepare: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    ) -> None:
        lengths = {len(leaf) for leaf in tree_leaves((inputs, targets))}
        if len(lengths) != 1:
            raise DataError(
                f"inputs and targets must have the same number of samples, found {sorted(lengths)}"
            )
        self.inputs = inputs
        self.targets = targets
        self.prepare = prepare
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def labels(self) -> Tensor:
        """Returns the targets of all samples, if they are a single tensor.

        Raises:
            DataError: there are several tensors.
        """
        if not isinstance(self.targets, Tensor):
            raise DataError("the targets are several tensors, not classification labels")
        return self.targets

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if not -len(self) <= index < len(self):
            # Python's IndexError ends `for item in dataset`; torch's does not.
            raise IndexError(f"sample {index} of {len(self)}")
        # A batch of one sample, so that `prepare` always sees batches.
        item: tuple[Any, Any] = tree_map(
            lambda leaf: leaf[0], self.__getitems__([index % len(self)])
        )
        return item

    def __getitems__(self, indices: Tensor | Sequence[int]) -> tuple[Any, Any]:
        """Returns the batch `(inputs, targets)` of these samples, stacked in a new dim 0."""
        index = torch.as_tensor(indices, dtype=torch.int64)

        def pick(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, index)

        inputs, targets = map_tensors(pick, self.inputs), map_tensors(pick, self.targets)
        return (inputs, targets) if self.prepare is None else self.prepare(inputs, targets)
