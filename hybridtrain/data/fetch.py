"""Batches fetched ahead of time, by worker processes or by a thread."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from hybridtrain.data.splits import InMemoryDataset
from hybridtrain.options import LoaderOptions
from hybridtrain.world import World

T = TypeVar("T")

_CPU = torch.device("cpu")


def fetch(
    dataset: Dataset[Any], batches: Iterable[list[int]], options: LoaderOptions, world: World
) -> Generator[Any, None, None]:
    """Yields the batches of `dataset` whose sample indices `batches` lists, fetched ahead."""
    device = world.devices[0]
    if isinstance(dataset, InMemoryDataset) and dataset.prepare is None and device.type == "cpu":
        # In less time than a thread needs to hand a batch over.
        return (dataset.__getitems__(indices) for indices in batches)
    # The workers' seeds come from here, not from the default generator.
    generator = torch.Generator()
    generator.manual_seed(world.replica)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=options.workers,
        timeout=options.timeout_s if options.workers else 0,
        collate_fn=options.collate,
        generator=generator,
        pin_memory=device.type == "cuda",
    )
    return prefetch((batch for batch in loader), device=device)


def prefetch(
    source: Iterator[T], depth: int = 2, device: torch.device = _CPU
) -> Generator[T, None, None]:
    """Yields from `source`, which a thread runs up to `depth` items ahead.

    An exception of `source` is raised where its item would have been. `device` is where the items
    go: to pin memory for a GPU, the thread must have it as its current device.
    """

    def fetch_next() -> T | None:
        try:
            return next(source, None)
        except BaseException as error:
            # torch re-raises a worker's exception in a reference cycle, which would keep the
            # workers until a collection, and then end them the slow way.
            traceback.clear_frames(error.__traceback__)
            raise

    prepare = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    thread = ThreadPoolExecutor(1, "prefetch", prepare)
    try:
        ready = deque(thread.submit(fetch_next) for _ in range(depth))
        while (item := ready.popleft().result()) is not None:
            ready.append(thread.submit(fetch_next))
            yield item
            del item  # or this frame would keep it while it waits for the next one
    finally:
        thread.shutdown(cancel_futures=True)
