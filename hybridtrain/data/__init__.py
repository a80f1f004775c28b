"""Data sets and loaders of batches.

loader             `Loader` and its `Position`, which tracks where a run is in its data
stream             loaders of iterable data sets
eval_loader        loaders of evaluation batches
same_data          checks that all ranks have the same data set
agreement          loaders whose replicas agree on each batch, such as a user's loader
fetch              loads batches ahead of the step, in threads or worker processes
splits             `DataSplits`: the data sets of a run, as returned by a data set function
"""

from hybridtrain.data.agreement import OwnLoader, as_loader
from hybridtrain.data.eval_loader import EvalLoader
from hybridtrain.data.fetch import name_of
from hybridtrain.data.loader import (
    Batch,
    Loader,
    Position,
    TrainLoader,
    batches_in,
    first_samples,
    in_order_of_replicas,
    is_stream,
    next_step,
)
from hybridtrain.data.splits import (
    DataSplits,
    HeldOutError,
    InMemoryDataset,
    WithoutTargets,
    already_batched,
    below_common_folder,
    digest_of_files,
    digest_of_texts,
    for_trained_models,
    length_of,
    metadata_of_training,
)
from hybridtrain.data.stream import StreamLoader, example_batch, largest_batch

__all__ = [
    "Batch",
    "DataSplits",
    "EvalLoader",
    "HeldOutError",
    "InMemoryDataset",
    "Loader",
    "OwnLoader",
    "Position",
    "StreamLoader",
    "TrainLoader",
    "WithoutTargets",
    "already_batched",
    "as_loader",
    "batches_in",
    "below_common_folder",
    "digest_of_files",
    "digest_of_texts",
    "example_batch",
    "first_samples",
    "for_trained_models",
    "in_order_of_replicas",
    "is_stream",
    "largest_batch",
    "length_of",
    "metadata_of_training",
    "name_of",
    "next_step",
]
