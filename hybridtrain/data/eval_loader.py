"""Loaders of evaluation batches: every sample once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hybridtrain.data.fetch import Request, fetch
from hybridtrain.data.loader import first_samples, is_stream, reads_here, shares_in
from hybridtrain.data.same_data import check_same_data
from hybridtrain.data.splits import WithoutTargets, already_batched
from hybridtrain.data.stream import StreamLoader
from hybridtrain.options import LoaderOptions, check_batch_size
from hybridtrain.world import World


class EvalLoader:
    """Yields every sample of `dataset` once over all replicas; share sizes may differ.

    The constructor is a collective call: it compares map-style data sets of all ranks.

    Args:
        dataset: a map-style data set, of which each replica takes a contiguous share; or an
            iterable one.
        batch_size: the number of samples of a batch, over all replicas.
        world: determines the replica of this process.
        options: how to load batches.
        inputs_alone: True if the data set yields inputs without targets, for `predict`.
        classes: the class names in index order, used to name the values of per-class metrics.
        tokenizer: decodes generated tokens, for metrics and samples of texts.

    Attributes:
        dataset: the data set.
        classes, tokenizer: as passed.
        samples: the number of samples of this copy of the model; None if it is unknown.

    Raises:
        ConfigError: `batch_size` is not a positive number, or a setting differs between the ranks.
        DataError: the data set differs between the ranks.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        world: World,
        *,
        options: LoaderOptions | None = None,
        inputs_alone: bool = False,
        classes: Sequence[str] | None = None,
        tokenizer: Any = None,
    ) -> None:
        check_batch_size(batch_size)
        self.dataset = dataset
        self.classes = classes
        self.tokenizer = tokenizer
        self._batch_size = max(1, batch_size // world.logical_replicas)
        self._world = world
        self._options = options or LoaderOptions()
        if inputs_alone:
            pairs = WithoutTargets(self._options.collate or already_batched)
            self._options = replace(self._options, collate=pairs)
        self._shares: list[slice] = []
        self.samples: int | None = None
        if not is_stream(dataset):
            first = self._options.first_batches
            check_same_data(
                dataset, world, type(self).__name__, batch_size=batch_size, first_batches=first
            )
            samples = first_samples(len(dataset), batch_size, self._options)
            self._shares = shares_in(samples, world)
            self.samples = sum(share.stop - share.start for share in self._shares)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for _, batch in self.by_replica():
            yield batch

    def by_replica(
        self, readers: Collection[int] | None = None
    ) -> Iterator[tuple[int, tuple[Any, Any]]]:
        """Yields the batches of each logical replica of this process, with the replica's index.

        Args:
            readers: as in `Loader.stream`.
        """
        if self.samples is None:
            size, options = self._batch_size * self._world.logical_replicas, self._options
            yield from StreamLoader(self.dataset, size, self._world, options=options).once(readers)
            return
        batches = [
            (replica, indices)
            for replica, share in zip(self._world.owned_replicas, self._shares, strict=True)
            if share.stop > share.start
            for indices in torch.arange(share.start, share.stop).split(self._batch_size)
        ]
        if batches:
            requests = (Request(indices) for _, indices in batches)
            reads = reads_here(readers, self._world)
            fetched = fetch(self.dataset, requests, self._options, self._world, reads)
            for (replica, _), batch in zip(batches, fetched, strict=False):
                yield replica, batch
