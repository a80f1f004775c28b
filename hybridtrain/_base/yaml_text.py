"""YAML texts that someone else may have written: whose aliases expand to gigabytes, or long."""

from __future__ import annotations

from typing import Any

import yaml

MOST_VALUES = 100_000
"""The most values that a text may expand to. A config of a run has about 200."""

MOST_CHARACTERS = 1_000_000
"""The longest text. A config of a run has about 10,000 characters, and PyYAML reads 100,000 in a
second.
"""


def check_expansion(text: str) -> str:
    """Returns a YAML text that is not too long, with aliases that expand to few values.

    Raises:
        ValueError: it is longer than `MOST_CHARACTERS`, or its aliases expand to more than
            `MOST_VALUES` values or lead back to themselves.
        yaml.YAMLError: it is no YAML.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
    if "*" in text and "&" in text:  # in most texts no alias is possible
        root = yaml.compose(text, Loader=yaml.SafeLoader)  # here aliases share nodes
        if root is not None and _size(root, {}) > MOST_VALUES:
            raise ValueError(f"its aliases expand to more than {MOST_VALUES:,} values")
    return text


def load_yaml(text: str) -> Any:
    """Returns the value of a YAML text, see `check_expansion`."""
    return yaml.safe_load(check_expansion(text))


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Returns the number of values of a node; an alias counts its values again."""
    if id(node) not in sizes:
        sizes[id(node)] = MOST_VALUES + 1  # a node inside itself
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in inner)
    return sizes[id(node)]
