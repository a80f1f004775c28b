"""The samples of each replica in a batch, in proportion to the replicas' shares.

Samples are divided as seats are by D'Hondt's method: the next sample goes to the replica with the
largest share / (samples + 1), the first of several. So a longer batch never gives a replica less,
and equal shares give the replicas their samples in turn:

    shares 1 1 1    sample  0 1 2 3 4 5      shares 1 2    sample  0 1 2 3 4 5
                    replica 0 1 2 0 1 2                    replica 1 0 1 1 0 1
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def samples_by_replica(total: int, shares: Sequence[float]) -> list[int]:
    """Returns how many of `total` samples each replica gets."""
    if len(set(shares)) == 1:
        small, larger = divmod(total, len(shares))
        return [small + (replica < larger) for replica in range(len(shares))]
    # Exact: with floats two hosts could round a tie differently.
    weights = [Fraction(share) for share in shares]
    whole = sum(weights)
    # no replica gets less than its quota, rounded down
    counts = [int(total * weight / whole) for weight in weights]
    for _ in range(total - sum(counts)):
        counts[_next(weights, counts)] += 1
    return counts


def replica_of_samples(total: int, shares: Sequence[float]) -> list[int]:
    """Returns the replica of each of `total` samples; a shorter batch begins with the same ones."""
    if len(set(shares)) == 1:
        return [sample % len(shares) for sample in range(total)]
    weights = [Fraction(share) for share in shares]
    counts = [0] * len(weights)
    replicas = []
    for _ in range(total):
        replicas.append(_next(weights, counts))
        counts[replicas[-1]] += 1
    return replicas


def _next(weights: Sequence[Fraction], counts: Sequence[int]) -> int:
    return max(range(len(weights)), key=lambda i: (weights[i] / (counts[i] + 1), -i))
