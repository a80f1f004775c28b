"""Faults while batches are made, as one line that names the sample and the line of the user.

A data set is the user's code, and it may run in another process, whose exceptions torch hands over
as pages of text. So they are caught where they happen, and only their description travels.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info

from hybridtrain.errors import DataError

SHARED_MEMORY_IS_FULL = (
    "shared memory is full: lower workers=, or give the container a larger /dev/shm"
)

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])


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
    own = [frame for frame in frames if not _of_a_library(frame.filename)]
    if own or frames:
        frame = (own or list(frames))[-1]
        line += f" ({frame.filename}:{frame.lineno}, in {frame.name})"
    return line


def _of_a_library(file: str) -> bool:
    path = Path(file)
    return "site-packages" in path.parts or any(each in path.parents for each in _LIBRARIES)


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
            why = f"; {SHARED_MEMORY_IS_FULL}"
    else:
        how, why = f"exited with code {exitcode}", "; something in the data set ends the process"
    return DataError(f"worker process {number} (pid {pid}) {how} while it made {reading}{why}")


def worker_hangs(number: int, timeout_s: float, reading: str) -> DataError:
    """Returns the error of worker process `number`, which does not answer."""
    return DataError(
        f"worker process {number} has not made {reading} in timeout_s={timeout_s:g} seconds: the "
        f"data set hangs there, or is slow: raise timeout_s=, or use workers=0 to see where"
    )
