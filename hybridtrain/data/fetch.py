"""Batches made ahead of time: by a thread, and by worker processes that are watched.

A data set is the user's code, and it may run in another process, whose exceptions torch hands over
as pages of text. So they are caught where they happen, and only their description travels: one line
that names the sample and the line of the user.
"""

from __future__ import annotations

import queue
import random
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hybridtrain._base import torch_private as private
from hybridtrain.data.splits import InMemoryDataset, already_batched
from hybridtrain.errors import DataError
from hybridtrain.options import LoaderOptions
from hybridtrain.pipeline import DrawsOf, seed_of
from hybridtrain.world import World

_SHARED_MEMORY_IS_FULL = (
    "shared memory is full: lower workers=, or give the container a larger /dev/shm"
)

_LIBRARIES = {Path(torch.__file__).parent, Path(__file__).parents[1]}

_Ready = queue.SimpleQueue[tuple[Any, BaseException | None]]

EVALUATION = -1
"""The epoch that samples of an evaluation are drawn for: the same numbers in each."""

_OF_A_COLLATE = 1  # tells its draws from those of a sample

# how many batches are made ahead
_AHEAD = 2
# how often a wait for a batch looks whether the workers are alive
_POLL_S = 0.5
# how long the end waits for a batch that is being made
_END_S = 2.0


@dataclass(frozen=True)
class Request:
    """A batch that is to be made.

    Attributes:
        indices: of its samples; a tensor has the shape (samples,).
        epoch: which they are drawn for, where a data set draws random numbers.
        seed: which they are drawn from.
    """

    indices: Tensor | Sequence[int]
    epoch: int = EVALUATION
    seed: int = 0

    @property
    def numbers(self) -> Sequence[int]:
        """The indices as Python's numbers, which cost a worker less than a tensor."""
        return self.indices.tolist() if isinstance(self.indices, Tensor) else self.indices


def fetch(
    dataset: Dataset[Any], batches: Iterable[Request], options: LoaderOptions, world: World
) -> Generator[Any, None, None]:
    """Yields the batches of `dataset`, fetched ahead.

    Args:
        dataset: map-style.
        batches: which.
        options: how they are loaded.
        world: whose devices they are for.

    Raises:
        DataError: a sample cannot be read, or a worker process ended or hangs; it names them.
    """
    made = _Batches(dataset, options.collate)
    in_memory = isinstance(dataset, InMemoryDataset) and dataset.prepare is None
    if in_memory and made.collate is already_batched and world.devices[0].type == "cpu":
        # In less time than a thread needs to hand a batch over.
        return (made.dataset.__getitems__(batch.indices) for batch in batches)
    asked: deque[Sequence[int]] = deque()

    def noted() -> Iterator[Request]:
        for batch in batches:
            numbers = batch.numbers
            if options.workers:
                asked.append(numbers)
            yield replace(batch, indices=numbers)

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
    """A data set whose items are whole batches, or Failures; runs in the worker processes.

    What a sample draws is a function of the seed, the epoch and the sample's number, and so the
    same after a resume, and in any process. A batch that is made at once, or by a `collate` that
    draws, has the draws of its first sample.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any] | None) -> None:
        self.dataset = dataset
        self.collate = collate or already_batched

    def __getitems__(self, batch: Request) -> Any:
        with DrawsOf(generator := torch.Generator()):
            return self._made(batch, generator)

    def _made(self, batch: Request, generator: torch.Generator) -> Any:
        def draw_for(*place: int) -> None:
            seed = seed_of(batch.seed, batch.epoch, *place)
            generator.manual_seed(seed)
            if get_worker_info() is not None:  # a process that nothing else draws in
                random.seed(seed)
                np.random.seed(seed & 0xFFFF_FFFF)

        dataset, indices = self.dataset, batch.numbers
        index: Any = None
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
        draw_for(*first, _OF_A_COLLATE)
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
            advice = _SHARED_MEMORY_IS_FULL
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
    return unless_failed(_Batches(dataset, collate).__getitems__(Request(indices)))


def samples_of(dataset: Any, indices: Sequence[int]) -> str:
    """Returns "samples 3, 1, 4 of Reviews"."""
    shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    listed = f"sample{'s' * (len(indices) != 1)} {shown}" if indices else "a batch"
    return f"{listed} of {name_of(dataset)}"


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


# Faults


class _OtherProcess(Exception):
    """The traceback of an exception in a worker process, as the cause of a DataError."""


@dataclass(frozen=True)
class Failure:
    """A batch that could not be made, in place of it; pickles whatever the exception was.

    Attributes:
        message: one line.
        details: the traceback.
        cause: the exception, if it happened in this process.
    """

    message: str
    details: str = ""
    cause: Exception | None = None

    @classmethod
    def of(cls, what: str, error: Exception) -> Failure:
        """Describes `error`, which happened to `what` ("sample 3 of Reviews cannot be read")."""
        worker = get_worker_info()
        where = f", in worker process {worker.id}" if worker is not None else ""
        if isinstance(error, DataError):  # which says itself what is wrong, and in which file
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
    own = [each for each in frames if not _LIBRARIES & {*Path(each.filename).parents}]
    own = [each for each in own if "site-packages" not in Path(each.filename).parts]
    if own or frames:
        frame = (own or list(frames))[-1]
        line += f" ({frame.filename}:{frame.lineno}, in {frame.name})"
    return line


def name_of(dataset: Any) -> str:
    """Returns the type's name of a data set, as messages have it."""
    return type(dataset).__name__


def check_pair(batch: Any, dataset: Any) -> Any:
    """Returns `batch` if it is `(inputs, targets)` with a tensor in it.

    Raises:
        DataError: it is anything else; says what, and what to return.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        hint = ""
        if isinstance(batch, Mapping):
            hint = (
                "; for a model that takes the whole dict and computes its own loss, return "
                "`(item, item['labels'])`, or do so in collate="
            )
        raise DataError(
            f"{name_of(dataset)} must give pairs `(inputs, target)`, and gave "
            f"{outline(batch)}{hint}"
        )
    if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(list(batch))):
        raise DataError(
            f"a batch of {name_of(dataset)} has no tensor with samples in dim 0: it is "
            f"{outline(batch)}. Return tensors or numbers from the data set (texts are made token "
            f"ids first), or pass a collate= that makes tensors"
        )
    return batch


def outline(tree: Any, depth: int = 2) -> str:
    """Returns a short description of a batch: its containers, and the shapes of tensors."""
    if isinstance(tree, Tensor):
        return f"a tensor of shape {list(tree.shape)}"
    if depth and isinstance(tree, Mapping) and tree:
        inner = ", ".join(f"{key!r}: {outline(x, depth - 1)}" for key, x in list(tree.items())[:4])
        return f"a dict {{{inner}{', ...' * (len(tree) > 4)}}}"
    if depth and isinstance(tree, Sequence) and not isinstance(tree, str | bytes) and tree:
        inner = ", ".join(outline(x, depth - 1) for x in tree[:3])
        return f"a {type(tree).__name__} of {len(tree)}: ({inner}{', ...' * (len(tree) > 3)})"
    return f"a {type(tree).__name__}"


def worker_ended(number: int, pid: int | None, exitcode: int | None, reading: str) -> DataError:
    """Returns the error of worker process `number`, which ended while it was `reading`."""
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        how, why = f"was killed by {name}", ""
        if -exitcode == signal.SIGKILL:
            why = "; if the machine ran out of memory, lower workers= or batch_size="
        elif -exitcode == signal.SIGBUS:
            why = f"; {_SHARED_MEMORY_IS_FULL}"
    else:
        how, why = f"exited with code {exitcode}", "; something in the data set ends the process"
    return DataError(f"worker process {number} (pid {pid}) {how} while it made {reading}{why}")


def worker_hangs(number: int, timeout_s: float, reading: str) -> DataError:
    """Returns the error of worker process `number`, which does not answer."""
    return DataError(
        f"worker process {number} has not made {reading} in timeout_s={timeout_s:g} seconds: the "
        f"data set hangs there, or is slow: raise timeout_s=, or use workers=0 to see where"
    )
