"""Batches made ahead of time: by a thread, and by worker processes that are watched."""

from __future__ import annotations

import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from hybridtrain import _torch_private as private
from hybridtrain.data.faults import (
    SHARED_MEMORY_IS_FULL,
    Failure,
    check_pair,
    name_of,
    unless_failed,
    worker_ended,
    worker_hangs,
)
from hybridtrain.data.splits import InMemoryDataset, already_batched
from hybridtrain.errors import DataError
from hybridtrain.options import LoaderOptions
from hybridtrain.world import World

_Ready = queue.SimpleQueue[tuple[Any, BaseException | None]]

# how many batches are made ahead
_AHEAD = 2
# how often a wait for a batch looks whether the workers are alive
_POLL_S = 0.5
# how long the end waits for a batch that is being made
_END_S = 2.0


def fetch(
    dataset: Dataset[Any], batches: Iterable[Tensor], options: LoaderOptions, world: World
) -> Generator[Any, None, None]:
    """Yields the batches of `dataset`, fetched ahead.

    Args:
        dataset: map-style.
        batches: the sample indices of each, of shape (samples,).
        options: how they are loaded.
        world: whose devices they are for.

    Raises:
        DataError: a sample cannot be read, or a worker process ended or hangs; it names them.
    """
    made = _Batches(dataset, options.collate)
    in_memory = isinstance(dataset, InMemoryDataset) and dataset.prepare is None
    if in_memory and made.collate is already_batched and world.devices[0].type == "cpu":
        # In less time than a thread needs to hand a batch over.
        return (made.dataset.__getitems__(indices) for indices in batches)
    asked: deque[Sequence[int]] = deque()

    def noted() -> Iterator[list[int]]:
        for batch in batches:
            indices = batch.tolist()
            if options.workers:
                asked.append(indices)
            yield indices

    def reading(worker: int) -> str:
        """Returns what a worker makes: the first of its batches that has not come."""
        turn = (worker - watched.received) % options.workers
        return samples_of(dataset, asked[turn] if turn < len(asked) else ())

    watched = WatchedLoader(
        made, options, world, reading, lambda: asked and asked.popleft(),
        batch_sampler=noted(), collate_fn=_identity,
    )  # fmt: skip
    return prefetch(watched)


class WatchedLoader:
    """The batches of a DataLoader whose worker processes may die or hang.

    torch's own handler of SIGCHLD would raise in the main thread, wherever that is. It is set only
    where the workers are started by the main thread, which is why `batches` runs in another one;
    the main thread calls `look` while it waits.

    Args:
        dataset: makes batches, or a Failure.
        options: the timeout and number of workers.
        world: whose device the batches are for.
        reading: says what a worker is making at present.
        received: called when a batch has come.
        **settings: of the DataLoader.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        options: LoaderOptions,
        world: World,
        reading: Callable[[int], str],
        received: Callable[[], object] = lambda: None,
        **settings: Any,
    ) -> None:
        self.received = 0
        self.device = world.devices[0]
        # The workers' seeds come from here, not from the default generator.
        generator = torch.Generator()
        generator.manual_seed(world.replica)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            num_workers=options.workers,
            timeout=options.timeout_s if options.workers else 0,
            generator=generator,
            pin_memory=self.device.type == "cuda",
            **settings,
        )
        self._options = options
        self._reading = reading
        self._on_batch = received
        self._iterator: Any = None

    def batches(self) -> Iterator[Any]:
        """Yields the loader's batches; for a thread that is not the main one."""
        self.received = 0
        iterator = self._iterator = iter(self._loader)
        try:
            while True:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                except RuntimeError as error:
                    self.look()
                    if str(error).startswith("DataLoader timed out after"):
                        worker = self.received % self._options.workers
                        reading = self._reading(worker)
                        self.close(kill=True)
                        raise worker_hangs(worker, self._options.timeout_s, reading) from None
                    raise
                unless_failed(batch)
                self.received += 1
                self._on_batch()
                yield batch
                del batch
        finally:
            if not self._loader.persistent_workers:
                self.close()

    def look(self) -> None:
        """Raises a DataError if a worker process has ended that should not have."""
        for number, worker in enumerate(private.loader_workers(self._iterator)):
            if worker.exitcode is not None:
                error = worker_ended(number, worker.pid, worker.exitcode, self._reading(number))
                self.close(kill=True)
                raise error

    def close(self, kill: bool = False) -> None:
        """Ends the worker processes; with `kill` without asking them."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            private.end_loader(iterator, kill)


class _Batches(Dataset[Any]):
    """A data set whose items are whole batches, or Failures; runs in the worker processes."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any] | None) -> None:
        usual = already_batched if isinstance(dataset, InMemoryDataset) else default_collate
        self.dataset = dataset
        self.collate = collate or usual

    def __getitems__(self, indices: Sequence[int]) -> Any:
        dataset = self.dataset
        index: Any = None
        try:
            if getattr(dataset, "__getitems__", None):
                items = dataset.__getitems__(indices)
            else:
                items = []
                for index in indices:
                    items.append(dataset[index])
        except Exception as error:
            where = f"sample {index}" if index is not None else _listed(indices)
            return Failure.of(f"{where} of {name_of(dataset)} cannot be read", error)
        return collated(items, self.collate, dataset, samples_of(dataset, indices))


def collated(items: Any, collate: Callable[[Any], Any], dataset: Any, what: str) -> Any:
    """Returns the batch `(inputs, targets)` of `items`, or a Failure that names `what`."""
    try:
        batch = collate(items)
    except Exception as error:
        advice = (
            "return tensors of equal shape and the same keys for every sample, or pass a collate= "
            "that pads"
        )
        # a worker's batch is made in a file of PyTorch's in shared memory
        if "torch_" in str(error) and "No space left on device" in str(error):
            advice = SHARED_MEMORY_IS_FULL
        return Failure.of(f"no batch can be made of {what} ({advice})", error)
    try:
        return check_pair(batch, dataset)
    except DataError as error:
        return Failure(str(error))


def whole_batch(
    dataset: Any, indices: Sequence[int], collate: Callable[[Any], Any] | None = None
) -> Any:
    """Returns the batch `(inputs, targets)` of some samples.

    Raises:
        DataError: a sample cannot be read, or they make no batch.
    """
    return unless_failed(_Batches(dataset, collate).__getitems__(indices))


def samples_of(dataset: Any, indices: Sequence[int]) -> str:
    """Returns "samples 3, 1, 4 of Reviews"."""
    return f"{_listed(indices)} of {name_of(dataset)}"


def _listed(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return f"sample{'s' * (len(indices) != 1)} {shown}" if indices else "a batch"


def _identity(batch: Any) -> Any:
    return batch


def prefetch(watched: WatchedLoader) -> Generator[Any, None, None]:
    """Yields the batches of `watched`, which a thread makes a few ahead.

    An exception is raised where its batch would have been. The worker processes are looked at now
    and then during a wait.

    The end does not wait long for a batch that is being made: its worker processes are killed, and
    a thread in a slow source is left behind, which keeps no process from ending.
    """
    source = watched.batches()
    ready: _Ready = queue.SimpleQueue()
    wanted, ended = threading.Semaphore(_AHEAD), threading.Event()

    def fetch_all() -> None:
        if watched.device.type == "cuda":  # or its memory could not be pinned
            torch.cuda.set_device(watched.device)
        more = True
        while more:
            wanted.acquire()
            if ended.is_set():
                return
            more = fetch_next()

    def fetch_next() -> bool:
        try:
            item = next(source, None)
        except BaseException as error:
            # torch re-raises a worker's exception in a reference cycle, which would keep the
            # workers until a collection, and then end them the slow way.
            traceback.clear_frames(error.__traceback__)
            ready.put((None, error))
            return False
        ready.put((item, None))
        return item is not None

    # not of a ThreadPoolExecutor, whose threads the interpreter waits for at its exit
    thread = threading.Thread(target=fetch_all, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := _next(ready, watched)) is not None:
            wanted.release()
            yield item
            del item  # or this frame would keep it while it waits for the next one
    finally:
        ended.set()
        wanted.release()
        thread.join(_END_S)
        if thread.is_alive():
            watched.close(kill=True)


def _next(ready: _Ready, watched: WatchedLoader) -> Any:
    error = None
    try:
        while True:
            try:
                item, error = ready.get(timeout=_POLL_S)
            except queue.Empty:
                with _torch_handler_off():
                    watched.look()
                continue
            if error is not None:
                raise error
            return item
    except RuntimeError:  # by torch's handler, perhaps
        with _torch_handler_off():
            watched.look()
        raise
    finally:
        del error  # its traceback has this frame


@contextmanager
def _torch_handler_off() -> Iterator[None]:
    """Keeps torch's handler of SIGCHLD, if a loader of the user's has set it, from raising here."""
    before = signal.getsignal(signal.SIGCHLD)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not (in_main_thread and callable(before)):  # handlers run in the main thread
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
