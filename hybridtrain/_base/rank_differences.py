"""Compares facts that must be the same on all ranks.

The ranks gather each other's `RankFacts` once, at the start, and every rank then computes the same
`differences`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hybridtrain.errors import ConfigError, argument

# Longer lists of hosts are abbreviated.
_MOST_HOSTS = 4

PLAIN = (bool, int, float, str, type(None))
"""The types of plain values."""


@dataclass(frozen=True)
class RankFacts:
    """The facts of one rank, by name, with its host.

    Attributes:
        facts: short values, which are compared and shown in messages; None if unknown.
        host: the name of the rank's host.
    """

    facts: Mapping[str, Any]
    host: str


def facts_here(facts: Mapping[str, Any]) -> RankFacts:
    """Returns the facts of this process."""
    return RankFacts(facts, socket.gethostname())


def check_same_settings(
    gather: Callable[[RankFacts], Sequence[RankFacts]], owner: str, settings: Mapping[str, Any]
) -> None:
    """Checks that all ranks give an object the same settings; a collective call.

    Args:
        gather: returns the facts of all ranks (`World.gather`).
        owner: the name of the object's class, for messages.
        settings: its arguments, by name; `None` counts as a value.

    Raises:
        ConfigError: a setting differs; the message has its values with ranks and hosts.
    """
    texts = {f"{argument(name)} of {owner}": repr(value) for name, value in settings.items()}
    check_same(gather, texts)


def check_same(
    gather: Callable[[RankFacts], Sequence[RankFacts]], facts: Mapping[str, Any], advice: str = ""
) -> None:
    """Checks that facts are equal on all ranks that know them; a collective call.

    Args:
        gather: returns the facts of all ranks (`World.gather`).
        facts: short values, by a phrase that names each in a message.
        advice: the end of the message.

    Raises:
        ConfigError: a fact differs; the message has its values with ranks and hosts.
    """
    for name, values in differences(gather(facts_here(facts))):
        raise ConfigError(f"{name} differs between the ranks: {values}{advice}")


def plain_attributes(values: Mapping[str, Any], kinds: tuple[type, ...] = PLAIN) -> dict[str, str]:
    """Returns the public values that consist of plain values only, as text.

    Args:
        values: values by name, such as the attributes of an object.
        kinds: the types that count as plain.
    """
    return {
        name: repr(value)
        for name, value in values.items()
        if not name.startswith("_") and _is_plain(value, kinds)
    }


def _is_plain(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_plain(item, kinds) for item in value)
    if isinstance(value, dict):
        return bool(value) and all(_is_plain(item, kinds) for item in value.values())
    return type(value) in kinds


def differences(facts_by_rank: Sequence[RankFacts]) -> Iterator[tuple[str, str]]:
    """Yields each fact whose known values differ, and its values with their ranks and hosts.

    Args:
        facts_by_rank: the facts of all ranks, in order.
    """
    # In the order of the first rank's facts, so that all ranks report the same difference.
    for name in dict.fromkeys(name for rank_facts in facts_by_rank for name in rank_facts.facts):
        ranks_of: dict[str, list[int]] = {}
        for rank, rank_facts in enumerate(facts_by_rank):
            if (value := rank_facts.facts.get(name)) is not None:
                ranks_of.setdefault(str(value), []).append(rank)
        if len(ranks_of) > 1:
            hosts = {
                value: list(dict.fromkeys(facts_by_rank[rank].host for rank in ranks))
                for value, ranks in ranks_of.items()
            }
            yield (
                name,
                ", ".join(
                    f"{value} on {_in_words(ranks)} ({_first(hosts[value])})"
                    for value, ranks in ranks_of.items()
                ),
            )


def _in_words(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as "rank 3" or "ranks 0-6, 8"."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    shown = (str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}"


def _first(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:_MOST_HOSTS]) + ", ..." * (len(hosts) > _MOST_HOSTS)
