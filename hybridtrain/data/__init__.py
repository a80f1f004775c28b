"""Loaders of batches, and what a data set function returns.

loader             `Loader` and its `Position`, which alone says where a run is in its data
stream             iterable data sets
same_data          the comparison of data sets over the ranks
agreement          loaders of replicas that agree on each batch, such as one of the user's own
fetch              batches ahead of the step, by threads or workers
splits             `DataSplits`: the data sets of a training
"""

from hybridtrain.data.agreement import OwnLoader, as_loader
from hybridtrain.data.fetch import name_of
from hybridtrain.data.loader import (
    Batch,
    EvalLoader,
    Loader,
    Position,
    TrainLoader,
    batches_in,
    first_samples,
    is_stream,
    share_of,
    take,
)
from hybridtrain.data.splits import (
    DataSplits,
    InMemoryDataset,
    WithoutTargets,
    already_batched,
    below_common_folder,
    digest_of_files,
    for_trained_models,
    length_of,
)
from hybridtrain.data.stream import StreamLoader, example_batch, largest_batch

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
    "WithoutTargets",
    "already_batched",
    "as_loader",
    "batches_in",
    "below_common_folder",
    "digest_of_files",
    "example_batch",
    "first_samples",
    "for_trained_models",
    "is_stream",
    "largest_batch",
    "length_of",
    "name_of",
    "share_of",
    "take",
]
