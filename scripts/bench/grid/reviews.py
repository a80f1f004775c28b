"""The reviews that cells train on: the data set where it is, otherwise synthetic ones."""

from __future__ import annotations

import torch

from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run.run_data import load_data
from hybridtrain.data.splits import DataSplits, InMemoryDataset
from hybridtrain.datasets.imdb import with_mask
from hybridtrain.errors import UserError
from hybridtrain.world import World
from scripts.bench.grid.results import EPOCH

# The vocabulary has two tokens beside the words, for padding and for what is not in it.
_SPECIAL = 2


def load_reviews(config: Config, world: World) -> tuple[DataSplits, bool]:
    """Returns the reviews of the config, and whether they are synthetic."""
    try:
        return load_data(config, world), False
    except UserError:  # on all processes alike
        return synthetic_reviews(config), True


def synthetic_reviews(config: Config, samples: int = EPOCH) -> DataSplits:
    """Returns reviews of the shapes and types of the data set, of random words.

    Each is padded to `data.max_len` tokens, as in the data set. The padding is computed like any
    other token, so the time of a step depends neither on the words nor on the lengths, which are
    drawn from a log-normal distribution with the median 174 and cut at `max_len`.
    """
    draws = torch.Generator().manual_seed(0)
    length, words = config.data["max_len"], config.data["max_vocab"]
    lengths = torch.empty(samples).log_normal_(5.16, 0.6, generator=draws).long().clamp(1, length)
    shape, size = (samples, length), words + _SPECIAL
    tokens = torch.randint(_SPECIAL, size, shape, generator=draws, dtype=torch.int32)
    tokens[torch.arange(length) >= lengths.unsqueeze(1)] = 1
    labels = torch.randint(2, (samples,), generator=draws)
    return DataSplits(
        train=InMemoryDataset((tokens, lengths), labels, prepare=with_mask),
        eval=None,
        metadata={"num_classes": 2, "max_len": length, "vocab_size": size, "pad_index": 1},
    )
