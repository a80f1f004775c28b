"""Holding out samples for evaluation, for a data set without an evaluation split."""

import torch

from hybridtrain.errors import DataError, setting


def held_out(samples: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Returns the indices of the training samples and of the evaluation samples, each in order.

    Args:
        samples: the number of samples in the data set.
        share: the share to hold out, above 0 and below 1; at least one sample.
        seed: the seed of the random choice.

    Raises:
        DataError: `share` is out of range, or there are fewer than two samples.
    """
    check_share(share)
    if samples < 2:
        raise DataError(
            f"{setting('eval_share', share)} cannot split {samples} samples: use more data"
        )
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()
    cut = min(max(round(samples * share), 1), samples - 1)
    return sorted(order[cut:]), sorted(order[:cut])


def check_share(share: float) -> None:
    """Raises a DataError if `share` is not between 0 and 1."""
    if not 0 < share < 1:
        raise DataError(f"{setting('eval_share', share)} must be above 0 and below 1")
