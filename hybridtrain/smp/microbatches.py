"""Splits a script's data: a step's arguments into micro-batches, a data set over replicas.

`SplitDataset` replaces the class of the same name in `torchnet`, which AWS's scripts use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Dataset

from hybridtrain._base.microbatch import chunk_sizes, cut
from hybridtrain._base.values import leaves_of
from hybridtrain.errors import BatchError, ConfigError


@dataclass(frozen=True)
class CutArguments:
    """The arguments of each micro-batch.

    Attributes:
        calls: args and kwargs, by micro-batch.
        samples: the number of samples of each micro-batch.
        tensors: all tensors of the whole batch.
    """

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    samples: list[int]
    tensors: list[Tensor]


class ArgumentCutter:
    """Splits the arguments of a step's function into micro-batches.

    Args:
        function: the function.
        non_split: the names of the arguments passed whole to every micro-batch.
        axes: the batch axis of an argument, by name; 0 for all others.

    Raises:
        ConfigError: a name is not an argument of the function, or an axis is negative.
    """

    def __init__(
        self, function: Callable[..., Any], non_split: Collection[str], axes: Mapping[str, int]
    ) -> None:
        self._signature = inspect.signature(function)
        self._name = getattr(function, "__name__", "the step")
        parameters = self._signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for name in (*non_split, *axes):
            if name not in parameters and not takes_any:
                raise ConfigError(
                    f"{self._name} has no argument {name!r}: non_split_inputs= and "
                    f"input_split_axes= take the names of its arguments"
                )
        for name, axis in axes.items():
            if type(axis) is not int or axis < 0:
                raise ConfigError(
                    f"input_split_axes= of {self._name} has {axis!r} for {name!r}: use an axis of "
                    f"0 or more, or list {name!r} in non_split_inputs= to pass it whole"
                )
        self._non_split, self._axes = frozenset(non_split), dict(axes)

    @property
    def first_parameter(self) -> str | None:
        """The name of the function's first parameter; None if it has no parameter."""
        return next(iter(self._signature.parameters), None)

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: int) -> CutArguments:
        """Splits the arguments of a call.

        Raises:
            BatchError: the batch sizes differ, there is no tensor to split, or an argument is a
                DataLoader.
        """
        bound = self._signature.bind(*args, **kwargs)
        # leaves with the argument's name and axis; None: not split
        whole: list[tuple[str, Any, int | None]] = []
        trees: list[tuple[Any, int]] = []
        names = self._names_of_positional(bound)
        arguments = [*zip(names, bound.args, strict=True), *bound.kwargs.items()]
        for name, value in arguments:
            if isinstance(value, DataLoader):
                raise BatchError(
                    f"{self._name} got a DataLoader as {name}: pass the batches that the loader "
                    f"yields, `for data, target in loader: {self._name}(data, target)`"
                )
            axis = self._axes.get(name, 0)
            # a module is a leaf, whatever it contains
            leaves, spec = ([value], None) if self._is_whole(name, value) else _flat(value)
            trees.append((spec, len(leaves)))
            whole += [(name, leaf, axis if spec is not None else None) for leaf in leaves]
        sizes = {
            (name, leaf.shape[axis])
            for name, leaf, axis in whole
            if axis is not None and isinstance(leaf, Tensor) and leaf.dim() > axis
        }
        if not sizes and not any(
            hasattr(leaf, "smp_slice") for _, leaf, axis in whole if axis is not None
        ):
            raise BatchError(
                f"{self._name} got no tensor to split into micro-batches: pass it the batch"
            )
        samples = self._samples(sizes, microbatches)
        columns = [
            [leaf] * len(samples) if axis is None else _parts(leaf, axis, samples)
            for _, leaf, axis in whole
        ]
        calls = []
        for index in range(len(samples)):
            leaves = [column[index] for column in columns]
            values = []
            for spec, count in trees:
                leaves_of_tree, leaves = leaves[:count], leaves[count:]
                values.append(leaves_of_tree[0] if spec is None else _joined(leaves_of_tree, spec))
            count = len(bound.args)
            keywords = dict(zip(bound.kwargs, values[count:], strict=True))
            calls.append((tuple(values[:count]), keywords))
        tensors = [leaf for _, leaf, axis in whole if axis is not None and isinstance(leaf, Tensor)]
        return CutArguments(calls, samples, tensors)

    def _names_of_positional(self, bound: inspect.BoundArguments) -> list[str]:
        """Returns the parameter name of each of `bound.args`; all of `*args` share one."""
        names = []
        for name, value in bound.arguments.items():
            several = self._signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            names += [name] * (len(value) if several else 1)
        return names[: len(bound.args)]

    def _is_whole(self, name: str, value: Any) -> bool:
        return name in self._non_split or isinstance(value, nn.Module)

    def _samples(self, sizes: Collection[tuple[str, int]], microbatches: int) -> list[int]:
        """Returns the number of samples of each micro-batch."""
        distinct_sizes = sorted({size for _, size in sizes})
        if not distinct_sizes:
            return [1] * microbatches  # objects that split themselves
        if distinct_sizes[0] == 0:
            raise BatchError(f"{self._name} got an empty batch")
        if len(distinct_sizes) == 1:
            return chunk_sizes(distinct_sizes[0], microbatches)
        if any(size % microbatches for size in distinct_sizes):
            listed = ", ".join(f"{name} has {size}" for name, size in sorted(sizes))
            raise BatchError(
                f"the tensors passed to {self._name} have different sizes along the batch axis "
                f"({listed}), which are not all divisible by {microbatches} micro-batches: list "
                f"arguments that must not be split in non_split_inputs=, or set another axis in "
                f"input_split_axes="
            )
        return [distinct_sizes[0] // microbatches] * microbatches


def _flat(value: Any) -> tuple[list[Any], Any]:
    if isinstance(value, set | frozenset):
        return list(value), type(value)
    leaves_of(value)  # registers dataclasses
    return tree_flatten(value)


def _joined(leaves: list[Any], spec: Any) -> Any:
    return spec(leaves) if isinstance(spec, type) else tree_unflatten(leaves, spec)


def _parts(leaf: Any, axis: int, samples: Sequence[int]) -> list[Any]:
    """Returns `leaf` for each micro-batch; views of a tensor."""
    if hasattr(leaf, "smp_slice"):
        return [leaf.smp_slice(len(samples), index, axis) for index in range(len(samples))]
    if not isinstance(leaf, Tensor) or leaf.dim() <= axis:
        return [leaf] * len(samples)
    if leaf.shape[axis] == sum(samples):
        return cut(leaf, samples, axis)
    return cut(leaf, [leaf.shape[axis] // len(samples)] * len(samples), axis)


class SplitDataset(Dataset[Any]):
    """A data set split into contiguous parts, one of which is selected.

    New scripts use `torch.utils.data.DistributedSampler(dataset, smp.dp_size(), smp.dp_rank())`,
    which also shuffles.

    Args:
        dataset: a data set with a length and an item for each index.
        partitions: the size of each part, by name: a fraction of the samples, or their number.
        initial_partition: the part selected initially; None: the first one.

    Raises:
        ConfigError: the parts together have more samples than `dataset`.
    """

    def __init__(
        self,
        dataset: Any,
        partitions: Mapping[str, float],
        initial_partition: str | None = None,
    ) -> None:
        self.dataset = dataset
        samples = len(dataset)
        shares = sum(partitions.values()) <= 1 + 1e-6
        sizes = {
            n: int(size * samples + 1e-6) if shares else int(size) for n, size in partitions.items()
        }
        if sum(sizes.values()) > samples:
            raise ConfigError(f"partitions={dict(partitions)} exceed the {samples} samples")
        self._ranges: dict[str, range] = {}
        begin = 0
        for name, size in sizes.items():
            self._ranges[name] = range(begin, begin + size)
            begin += size
        self.select(initial_partition or next(iter(self._ranges)))

    def select(self, partition: str) -> None:
        """Selects the part from which the data set returns samples."""
        if partition not in self._ranges:
            names: Sequence[str] = list(self._ranges)
            raise ConfigError(f"unknown partition {partition!r}: choose {', '.join(names)}")
        self._selected = self._ranges[partition]

    def __len__(self) -> int:
        return len(self._selected)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self._selected[index]]
