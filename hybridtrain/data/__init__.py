"""Loaders of batches, and data sets: one function each, which returns `DataSplits`.

    loader             `Loader` and its `Position`, which alone says where a run is in its data
    stream, own_loader iterable data sets, and loaders of the user's own
    agreement          loaders of replicas that agree on each batch
    fetch              batches ahead of the step, by threads or workers
    splits             what a data set function returns; digits, mnist, imdb, python_source

A data set function is the `_target_` of a file in `configs/data/`, and its parameters are that
file's keys. It reads from the disk (or from the package), downloads only when told to, and raises
`DataError` when the data is missing, damaged or too small. torchvision and torchtext are imported
when a function needs them: they take seconds, and torchtext is optional.
"""

from hybridtrain.data.agreement import OwnLoader, as_loader
from hybridtrain.data.digits import digits
from hybridtrain.data.fetch import name_of
from hybridtrain.data.imdb import imdb
from hybridtrain.data.loader import (
    Batch,
    EvalLoader,
    Loader,
    Position,
    TrainLoader,
    is_stream,
    share_of,
    take,
)
from hybridtrain.data.mnist import mnist
from hybridtrain.data.python_source import python_source
from hybridtrain.data.splits import DataSplits, InMemoryDataset, already_batched
from hybridtrain.data.stream import StreamLoader, example_batch

__all__ = [
    "Batch",
    "DataSplits",
    "EvalLoader",
    "InMemoryDataset",
    "Loader",
    "OwnLoader",
    "Position",
    "StreamLoader",
    "TrainLoader",
    "already_batched",
    "as_loader",
    "digits",
    "example_batch",
    "imdb",
    "is_stream",
    "mnist",
    "name_of",
    "python_source",
    "share_of",
    "take",
]
