"""Data sets: one function each, from where the data lies to `DataSplits`.

A function is the `_target_` of a file in `configs/data/`, and its parameters are that file's
keys. It reads what is on the disk (or ships with the package), downloads only when told to, and
raises `DataError` when the data is missing, damaged or too small. A file is imported when its
function is called for: torchvision and torchtext cost seconds, and the second is optional.
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
