"""The data sets of the config group `data`: one function each, which returns `DataSplits`.

Each function is the `_target_` of a file in `configs/data/`, and its parameters are that file's
keys. It reads from the disk (or from the package), downloads only on request, and raises
`DataError` if the data is missing, damaged or too small. Functions import torchvision, torchtext,
datasets and transformers when they need them: these imports take seconds, and all but the first are
optional.
Random parts of a sample, such as crops or masked tokens, are drawn with PyTorch in `__getitem__`,
one sample at a time, so that a loader can seed them per sample.
"""

from typing import TYPE_CHECKING

from hybridtrain._base.registry import import_on_first_use

if TYPE_CHECKING:
    from hybridtrain.datasets.chat import chat
    from hybridtrain.datasets.cifar10 import cifar10
    from hybridtrain.datasets.digits import digits
    from hybridtrain.datasets.hf_datasets import hf_datasets
    from hybridtrain.datasets.image_folder import image_folder
    from hybridtrain.datasets.image_table import image_table
    from hybridtrain.datasets.imdb import imdb
    from hybridtrain.datasets.mnist import mnist
    from hybridtrain.datasets.python_source import python_source
    from hybridtrain.datasets.standard_input import STANDARD_INPUT
    from hybridtrain.datasets.table import table
    from hybridtrain.datasets.text_files import text_files
    from hybridtrain.datasets.token_files import token_files

__all__ = [
    "STANDARD_INPUT",
    "chat",
    "cifar10",
    "digits",
    "hf_datasets",
    "image_folder",
    "image_table",
    "imdb",
    "mnist",
    "python_source",
    "table",
    "text_files",
    "token_files",
]

# each name is that of its module
import_on_first_use(__name__, (f"{__name__}.{name.lower()}:{name}" for name in __all__))
