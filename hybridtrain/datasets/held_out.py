"""The samples that are held out for evaluation of a data set without an evaluation split."""

import torch

from hybridtrain.errors import DataError, setting


def held_out(samples: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Returns the numbers of the training and of the evaluation samples, each in order.

    Args:
        samples: of the whole data set.
        share: the part that is held out, above 0 and below 1; at least one sample.
        seed: they are drawn from it.

    Raises:
        DataError: `share` is not such a part, or there are less than two samples.
    """
    check_share(share)
    if samples < 2:
        raise DataError(
            f"{samples} samples cannot be divided by {setting('eval_share', share)}: use more data"
        )
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()
    cut = min(max(round(samples * share), 1), samples - 1)
    return sorted(order[cut:]), sorted(order[:cut])


def check_share(share: float) -> None:
    """Raises a DataError, if it is not a part of the data."""
    if not 0 < share < 1:
        raise DataError(f"{setting('eval_share', share)} must be above 0 and below 1")
