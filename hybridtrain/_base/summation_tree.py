"""The order in which gradients of logical replicas are summed, for any number of processes.

    replicas     0   1   2   3   4        each inner node adds its two halves
                  \\ /     \\   3-4
                  0-1       \\ /
                     \\      2-4
                      \\     /
                        0-4

A process runs consecutive replicas, and adds up every subtree that lies within them: with replicas
0 to 2, the subtree 0-1 and the single replica 2. The rest is added between the processes, in the
same order. Therefore the result is bitwise independent of the number of processes and of their
shares of the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeVar

T = TypeVar("T")

Node = tuple[int, int]
"""A subtree: the first of its replicas, and the one after the last."""


def owned_by(process: int, processes: int, replicas: int) -> range:
    """Returns the consecutive replicas of a process; the numbers differ by at most one."""
    # Consecutive, so that as many subtrees as possible lie within one process.
    return range(process * replicas // processes, (process + 1) * replicas // processes)


def subtrees(part: range, replicas: int) -> list[Node]:
    """Returns the largest subtrees whose replicas are all in `part`, from left to right."""

    def inside(node: Node) -> list[Node]:
        low, high = node
        if low >= part.stop or high <= part.start:
            return []
        if part.start <= low and high <= part.stop:
            return [node]
        left, right = halves(node)
        return inside(left) + inside(right)

    return inside((0, replicas))


@cache
def most_waiting(part: range, replicas: int) -> int:
    """Returns how many sums a process keeps at most while it computes its last replicas.

    Before each of them, it has those of the largest subtrees that it has completed.

    Args:
        part: the replicas of the process.
        replicas: the number of all replicas.
    """
    ends = range(part.start, part.stop)
    return max((len(subtrees(range(part.start, end), replicas)) for end in ends), default=0)


def halves(node: Node) -> tuple[Node, Node]:
    """Returns the two subtrees that a node adds."""
    low, high = node
    # By position alone: the order must not depend on who computes it.
    middle = (low + high) // 2
    return (low, middle), (middle, high)


@cache
def sums_of_halves(replicas: int) -> Mapping[tuple[Node, Node], Node]:
    """Returns the inner nodes of the tree by their halves."""
    sums: dict[tuple[Node, Node], Node] = {}
    waiting: list[Node] = [(0, replicas)]
    while waiting:
        node = waiting.pop()
        if node[1] - node[0] > 1:
            sums[halves(node)] = node
            waiting += halves(node)
    return sums


def total(values: Mapping[Node, T], replicas: int, add: Callable[[T, T], T]) -> T:
    """Sums `values` of subtrees that cover all replicas, in the tree's order."""

    def of(node: Node) -> T:
        if node in values:
            return values[node]
        left, right = halves(node)
        return add(of(left), of(right))

    return of((0, replicas))
