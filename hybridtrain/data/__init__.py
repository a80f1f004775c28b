"""Data sets: one function each, which returns `DataSplits`.

A function is the `_target_` of a file in `configs/data/`, and its parameters are that file's
keys. It reads from the disk (or from the package), downloads only when told to, and raises
`DataError` when the data is missing, damaged or too small. torchvision and torchtext are imported
when a function needs them: they take seconds, and torchtext is optional.
"""

from hybridtrain.data.digits import digits
from hybridtrain.data.imdb import imdb
from hybridtrain.data.mnist import mnist
from hybridtrain.data.python_source import python_source
from hybridtrain.data.splits import DataSplits, InMemoryDataset, already_batched

__all__ = [
    "DataSplits",
    "InMemoryDataset",
    "already_batched",
    "digits",
    "imdb",
    "mnist",
    "python_source",
]
