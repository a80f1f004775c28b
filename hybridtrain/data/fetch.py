"""Loads batches ahead of time, in a thread and in supervised worker processes.

A data set is user code that may run in a worker process, and torch passes on a worker's exceptions
as pages of text. So exceptions are caught at their source, and only a description is passed on: one
line with the sample and the line of the user's code.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hybridtrain._base import torch_private as private
from hybridtrain._base.microbatch import Unread
from hybridtrain._base.text_table import counted
from hybridtrain.data.splits import InMemoryDataset, already_batched
from hybridtrain.errors import DataError, argument, setting
from hybridtrain.launch import end_with_parent, signal_name
from hybridtrain.options import LoaderOptions
from hybridtrain.pipeline import DrawsOf, seed_of
from hybridtrain.world import World


def _shared_memory_is_full() -> str:
    fewer = f"lower {argument('workers')}"
    return f"shared memory is full: {fewer}, or give the container a larger /dev/shm"


_log = logging.getLogger(__name__)

_LIBRARIES = {Path(torch.__file__).parent, Path(__file__).parents[1]}

_Ready = queue.SimpleQueue[tuple[Any, BaseException | None]]

EVALUATION = -1
"""The epoch number of every evaluation, so that random transforms draw the same numbers in all."""

_OF_A_COLLATE = 1  # separates the random numbers of a collate from those of a sample

# the number of batches to load ahead
_AHEAD = 2
# the interval at which a wait for a batch checks that the workers are alive
_POLL_S = 0.5
# how long closing waits for a batch in progress
_END_S = 2.0


@dataclass(frozen=True)
class Request:
    """A request for a batch.

    Attributes:
        indices: the indices of the samples; a tensor has the shape (samples,).
        epoch: the epoch; it seeds the data set's random numbers.
        seed: the seed; it seeds the data set's random numbers.
    """

    indices: Tensor | Sequence[int]
    epoch: int = EVALUATION
    seed: int = 0

    @property
    def numbers(self) -> Sequence[int]:
        """The indices as Python ints, which are cheaper to send to a worker than a tensor."""
        return self.indices.tolist() if isinstance(self.indices, Tensor) else self.indices


def fetch(
    dataset: Dataset[Any],
    batches: Iterable[Request],
    options: LoaderOptions,
    world: World,
    reads: bool = True,
) -> Generator[Any, None, None]:
    """Yields the batches of `dataset`, fetched ahead.

    Args:
        dataset: a map-style data set.
        batches: the requests for batches, in order.
        options: how to load them.
        world: the world of this process, for its devices.
        reads: False to yield `Unread` inputs and targets without reading `dataset`.

    Raises:
        DataError: a sample cannot be read, or a worker process ended or hangs; the message names
            the sample or process.
    """
    if not reads:
        return ((Unread(len(b.indices)), Unread(len(b.indices))) for b in batches)
    whole_batches = _Batches(dataset, options.collate)
    in_memory = isinstance(dataset, InMemoryDataset) and dataset.prepare is None
    if in_memory and whole_batches.collate is already_batched and world.devices[0].type == "cpu":
        # This takes less time than handing a batch over from a thread.
        return (whole_batches.dataset.__getitems__(batch.indices) for batch in batches)
    # The prefetching thread appends and removes, the main thread reads when a worker has died; each
    # of these is a single operation of a deque, which is atomic.
    requested: deque[Sequence[int]] = deque()

    def recorded() -> Iterator[Request]:
        for batch in batches:
            numbers = batch.numbers
            if options.workers:
                # When the DataLoader sends the request to a worker, which is before the batch is
                # received.
                requested.append(numbers)
            yield replace(batch, indices=numbers)

    def reading(worker: int) -> str:
        """Returns the samples that a worker is reading: its first batch not yet received."""
        # PyTorch hands out batches to the workers in turn, and returns them in that order.
        turn = (worker - watched.received) % options.workers
        indices: Sequence[int] = ()
        with suppress(IndexError):  # the other thread has just removed it
            indices = requested[turn]
        return samples_of(dataset, indices)

    watched = WatchedLoader(
        whole_batches, options, world, reading, lambda: requested and requested.popleft(),
        batch_sampler=recorded(), collate_fn=_identity,
    )  # fmt: skip
    return prefetch(watched)


class _Loader(DataLoader[Any]):
    def check_worker_number_rationality(self) -> None:
        """Says once, in a line, what PyTorch says in six lines for each loader and epoch."""
        # Not `cpu_count`: a scheduler may give this process a part of the machine.
        if self.num_workers > len(os.sched_getaffinity(0)):
            _say_too_many(self.num_workers)


@cache
def _say_too_many(workers: int) -> None:
    _log.warning(
        "%s starts more processes than there are cores for this process (%s), which can be slower",
        setting("workers", workers), counted(len(os.sched_getaffinity(0)), "core"),
    )  # fmt: skip


class _Starter:
    """A thread that starts worker processes, and lasts as long as this process.

    Linux ends a worker with the thread that has started it (`end_with_parent`), and a thread that
    prefetches ends before the workers of a stream, which stay for the next epoch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def call(self, function: Callable[[], Any]) -> Any:
        """Returns `function()`, called in that thread."""
        # A new one per call: several loaders may start workers at the same time.
        result: Future[Any] = Future()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # or this process was forked
                self._thread = threading.Thread(target=self._run, name="starter", daemon=True)
                self._thread.start()
        self._calls.put((function, result))
        # Raises what `function` has raised, in the caller's thread.
        return result.result()

    def _run(self) -> None:
        while True:
            function, result = self._calls.get()
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)
            del function, result  # or this frame would keep the workers alive


_starter = _Starter()


def _begin_worker(number: int) -> None:
    """Makes the system kill this worker process with its parent, even if it hangs or is stopped.

    PyTorch's worker looks for its parent only between two batches.
    """
    end_with_parent(always=True, number=signal.SIGKILL)


class WatchedLoader:
    """A DataLoader whose worker processes may die or hang.

    torch's SIGCHLD handler would raise in the main thread at an arbitrary line. torch installs it
    only if the main thread starts the workers, so `batches` runs in another thread, and the main
    thread calls `check_workers` while it waits.

    Args:
        dataset: returns batches or a `Failure`.
        options: the timeout and number of workers.
        world: the world of this process, for its devices.
        reading: `reading(worker)` returns the samples that a worker is reading, for messages.
        received: called when a batch has arrived.
        **settings: further arguments of the DataLoader.
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
        # The workers' seeds come from this generator instead of the default one.
        # Drawing from the default one would change the random numbers of the script.
        generator = torch.Generator()
        generator.manual_seed(world.data_parallel_rank)
        self._loader = _Loader(
            dataset,
            num_workers=options.workers,
            timeout=options.timeout_s if options.workers else 0,
            generator=generator,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_begin_worker,
            **settings,
        )
        self._options = options
        self._reading = reading
        self._on_batch = received
        self._iterator: Any = None
        self._closing = threading.Lock()

    def batches(self) -> Iterator[Any]:
        """Yields the loader's batches; must not run in the main thread."""
        self.received = 0
        # Read by the main thread in `check_workers` and `close`.
        iterator = self._iterator = self._started()
        try:
            while True:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                except RuntimeError as error:
                    # First: a worker that died explains the error better than the queue that broke.
                    self.check_workers()
                    if str(error).startswith("DataLoader timed out after"):
                        worker = self.received % self._options.workers
                        reading = self._reading(worker)
                        # A hanging worker does not answer a request to stop.
                        self.close(kill=True)
                        raise worker_hangs(worker, self._options.timeout_s, reading) from None
                    raise
                unless_failed(batch)
                self.received += 1
                self._on_batch()
                yield batch
                # Or this frame would keep it until the next one is there.
                del batch
        finally:
            # Persistent workers of a stream stay for the next epoch; the stream closes them.
            if not self._loader.persistent_workers:
                self.close()

    def _started(self) -> Any:
        def start() -> Any:
            if self.device.type == "cuda":  # required to pin memory of this device
                torch.cuda.set_device(self.device)
            return iter(self._loader)

        return _starter.call(start) if self._options.workers else start()

    def check_workers(self) -> None:
        """Raises a DataError if a worker process has ended unexpectedly."""
        # Without its signal handler PyTorch notices a dead worker only after its timeout.
        for number, worker in enumerate(private.loader_workers(self._iterator)):
            if worker.exitcode is not None:
                error = worker_ended(number, worker.pid, worker.exitcode, self._reading(number))
                # The other thread is waiting for a batch that will not come.
                self.close(kill=True)
                raise error

    def close(self, kill: bool = False) -> None:
        """Stops the worker processes; with `kill`, kills them."""
        with self._closing:  # two threads may find a dead worker at the same time
            iterator, self._iterator = self._iterator, None
        if iterator is not None:
            private.end_loader(iterator, kill)


class _Batches(Dataset[Any]):
    """A data set whose items are whole batches or `Failure`s; runs in the worker processes.

    A sample's random numbers depend only on the seed, the epoch and the sample's index, so they are
    the same after a resume and in any process. A data set's `__getitems__`, and a `collate` that
    draws random numbers, use those of the batch's first sample.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any] | None) -> None:
        self.dataset = dataset
        self.collate = collate or already_batched

    def __getitems__(self, batch: Request) -> Any:
        # A generator of its own, so that a transform in this process does not draw from the default
        # one, which the training uses.
        with DrawsOf(generator := torch.Generator()):
            return self._made(batch, generator)

    def _made(self, batch: Request, generator: torch.Generator) -> Any:
        def draw_for(*place: int) -> None:
            seed = seed_of(batch.seed, batch.epoch, *place)
            generator.manual_seed(seed)
            if get_worker_info() is not None:  # no other code draws in a worker process
                random.seed(seed)
                # NumPy takes 32 bits.
                np.random.seed(seed & 0xFFFF_FFFF)

        dataset, indices = self.dataset, batch.numbers
        index: Any = None
        # Not all indices: the numbers of a sample must not depend on the others in its batch.
        first = [*indices[:1]]
        try:
            if getattr(dataset, "__getitems__", None):
                draw_for(*first)
                items = dataset.__getitems__(indices)
            else:
                items = []
                for index in indices:
                    draw_for(index)
                    items.append(dataset[index])
        except Exception as error:
            where = samples_of(dataset, indices if index is None else [index])
            return Failure.of(f"{where} cannot be read", error)
        # Again: how much the samples have drawn must not matter.
        draw_for(*first, _OF_A_COLLATE)
        return collated(items, self.collate, dataset, samples_of(dataset, indices))


def collated(items: Any, collate: Callable[[Any], Any], dataset: Any, what: str) -> Any:
    """Returns the batch `(inputs, targets)` of `items`, or a `Failure` that names `what`."""
    try:
        batch = collate(items)
    except Exception as error:
        advice = (
            "return tensors of equal shape and the same keys for every sample, or pass a collate= "
            "that pads"
        )
        # PyTorch allocates a worker's batch as a file in shared memory
        if "torch_" in str(error) and "No space left on device" in str(error):
            advice = _shared_memory_is_full()
        return Failure.of(f"cannot collate {what} into a batch ({advice})", error)
    try:
        return check_pair(batch, dataset)
    except DataError as error:
        return Failure(str(error))


def whole_batch(
    dataset: Any, indices: Sequence[int], collate: Callable[[Any], Any] | None = None
) -> Any:
    """Returns the batch `(inputs, targets)` of some samples.

    Raises:
        DataError: a sample cannot be read, or the samples cannot be collated.
    """
    return unless_failed(_Batches(dataset, collate).__getitems__(Request(indices)))


def samples_of(dataset: Any, indices: Sequence[int]) -> str:
    """Returns "samples 3, 1, 4 of Reviews"."""
    shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    listed = f"sample{'s' * (len(indices) != 1)} {shown}" if indices else "a batch"
    return f"{listed} of {name_of(dataset)}"


def _identity(batch: Any) -> Any:
    return batch


def prefetch(watched: WatchedLoader) -> Generator[Any, None, None]:
    """Yields the batches of `watched`, which a thread loads a few batches ahead.

    An exception is raised in place of its batch. While waiting, the worker processes are checked
    regularly.

    Closing the generator waits only briefly for a batch in progress. Then it kills the worker
    processes and abandons a thread that is stuck in a slow source; the thread does not keep the
    process from exiting.
    """
    source = watched.batches()
    ready: _Ready = queue.SimpleQueue()
    free_slots, ended = threading.Semaphore(_AHEAD), threading.Event()

    def fetch_all() -> None:
        if watched.device.type == "cuda":  # required to pin the thread's memory
            torch.cuda.set_device(watched.device)
        has_more = True
        while has_more:
            # Before the fetch, so that no more than `_AHEAD` batches exist besides the one in use.
            free_slots.acquire()
            if ended.is_set():  # the consumer has freed this slot to end the thread
                return
            has_more = fetch_next()

    def fetch_next() -> bool:
        try:
            item = next(source, None)
        except BaseException as error:
            # torch re-raises a worker's exception in a reference cycle, which would keep the
            # workers alive until a collection, and then shut them down the slow way.
            traceback.clear_frames(error.__traceback__)
            ready.put((None, error))
            return False
        # An unbounded queue: `free_slots` is the bound, so this never blocks.
        ready.put((item, None))
        return item is not None

    # not a ThreadPoolExecutor: the interpreter would wait for its threads at exit
    thread = threading.Thread(target=fetch_all, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := _next(ready, watched)) is not None:
            free_slots.release()  # before the step: the thread fetches while this thread computes
            yield item
            del item  # or this frame would keep it alive while waiting for the next item
    finally:
        # Before the release, by which the thread wakes and looks at it.
        ended.set()
        free_slots.release()
        # The thread may be in the user's code, which cannot be interrupted.
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
                # Or the handler would raise its own text for the same worker here.
                with _torch_handler_off():
                    watched.check_workers()
                continue
            if error is not None:
                raise error
            return item
    except RuntimeError:  # perhaps from torch's handler
        with _torch_handler_off():
            watched.check_workers()
        raise
    finally:
        del error  # its traceback references this frame


@contextmanager
def _torch_handler_off() -> Iterator[None]:
    """Disables torch's SIGCHLD handler in the block; a user's loader may have installed it."""
    previous = signal.getsignal(signal.SIGCHLD)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not (in_main_thread and callable(previous)):  # handlers run in the main thread
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous)


# Errors


class _OtherProcess(Exception):
    """The traceback of an exception in a worker process, as the cause of a DataError."""


@dataclass(frozen=True)
class Failure:
    """Takes the place of a batch that failed; picklable for any exception.

    Attributes:
        message: the error in one line.
        details: the traceback as text.
        cause: the exception, if it happened in this process.
    """

    message: str
    details: str = ""
    cause: Exception | None = None

    @classmethod
    def of(cls, what: str, error: Exception) -> Failure:
        """Describes `error` with its context `what` ("sample 3 of Reviews cannot be read")."""
        worker = get_worker_info()
        where = f", in worker process {worker.id}" if worker is not None else ""
        if isinstance(error, DataError):  # it already says what is wrong, and in which file
            return cls(str(error), cause=error if worker is None else None)
        details = "".join(traceback.format_exception(error))
        cause = error if worker is None else None
        return cls(f"{what}: {described(error)}{where}", details, cause)


def unless_failed(batch: Any) -> Any:
    """Returns `batch`; raises it as a DataError if it is a Failure."""
    if isinstance(batch, Failure):
        raise DataError(batch.message) from batch.cause or _OtherProcess("\n" + batch.details)
    return batch


def described(error: BaseException) -> str:
    """Returns the type and first line of `error`, and the innermost line of the user's code."""
    text = str(error).strip().partition("\n")[0]
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame_summary
        for frame_summary in frames
        if not _LIBRARIES & {*Path(frame_summary.filename).parents}
    ]
    user_frames = [
        frame_summary
        for frame_summary in user_frames
        if "site-packages" not in Path(frame_summary.filename).parts
    ]
    if user_frames or frames:
        frame = (user_frames or list(frames))[-1]
        line += f" ({frame.filename}:{frame.lineno}, in {frame.name})"
    return line


def name_of(dataset: Any) -> str:
    """Returns the class name of a data set, for messages."""
    return type(dataset).__name__


def check_pair(batch: Any, dataset: Any) -> Any:
    """Returns `batch` if it is `(inputs, targets)` with at least one tensor.

    Raises:
        DataError: it is anything else; the message describes it, and what to return instead.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        hint = ""
        if isinstance(batch, Mapping):
            hint = (
                "; for a model that takes the whole dict and computes its own loss, return "
                "`(item, item['labels'])`, or do so in collate="
            )
        raise DataError(
            f"{name_of(dataset)} must yield pairs `(inputs, target)`, but yielded "
            f"{describe_batch(batch)}{hint}"
        )
    if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(list(batch))):
        raise DataError(
            f"a batch of {name_of(dataset)} has no tensor with the batch in dim 0: it is "
            f"{describe_batch(batch)}. Return tensors or numbers from the data set (tokenize text "
            f"first), or pass a collate= that creates tensors"
        )
    return batch


def describe_batch(tree: Any, depth: int = 2) -> str:
    """Returns a short description of a batch: its containers, and the shapes of tensors."""
    if isinstance(tree, Tensor):
        return f"a tensor of shape {list(tree.shape)}"
    if depth and isinstance(tree, Mapping) and tree:
        inner = ", ".join(
            f"{key!r}: {describe_batch(x, depth - 1)}" for key, x in list(tree.items())[:4]
        )
        return f"a dict {{{inner}{', ...' * (len(tree) > 4)}}}"
    if depth and isinstance(tree, Sequence) and not isinstance(tree, str | bytes) and tree:
        inner = ", ".join(describe_batch(x, depth - 1) for x in tree[:3])
        return f"a {type(tree).__name__} of {len(tree)}: ({inner}{', ...' * (len(tree) > 3)})"
    return f"a {type(tree).__name__}"


def worker_ended(number: int, pid: int | None, exitcode: int | None, reading: str) -> DataError:
    """Returns the error of worker process `number`, which ended while it was `reading`."""
    if exitcode is not None and exitcode < 0:
        how, why = f"was killed by {signal_name(-exitcode)}", ""
        if -exitcode == signal.SIGKILL:
            why = (
                f"; if the machine ran out of memory, lower {argument('workers')} or "
                f"{argument('batch_size')}"
            )
        elif -exitcode == signal.SIGBUS:
            why = f"; {_shared_memory_is_full()}"
    else:
        how, why = f"exited with code {exitcode}", "; code of the data set ended the process"
    return DataError(f"worker process {number} (pid {pid}) {how} while loading {reading}{why}")


def worker_hangs(number: int, timeout_s: float, reading: str) -> DataError:
    """Returns the error of worker process `number`, which does not respond."""
    return DataError(
        f"worker process {number} has not loaded {reading} within "
        f"{argument('timeout_s', 'loader')}{timeout_s:g} seconds: the data set hangs or is slow. "
        f"Raise {argument('timeout_s', 'loader')}, or set {setting('workers', 0)} to find where "
        "it hangs"
    )
