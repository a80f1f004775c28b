"""The data sets of the recipes: one function each, which returns `DataSplits`.

A function is the `_target_` of a file in `configs/data/`, and its parameters are that file's keys.
It reads from the disk (or from the package), downloads only when told to, and raises `DataError`
when the data is missing, damaged or too small. torchvision and torchtext are imported when a
function needs them: they take seconds, and torchtext is optional.
"""

from hybridtrain.datasets.digits import digits
from hybridtrain.datasets.imdb import imdb
from hybridtrain.datasets.mnist import mnist
from hybridtrain.datasets.python_source import python_source

__all__ = ["digits", "imdb", "mnist", "python_source"]
