"""Converts a `Config` to plain dicts and YAML, and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from hybridtrain.cli.config.schema import Config, is_own
from hybridtrain.cli.config.secrets import masked


def to_config(tree: Mapping[str, Any]) -> Config:
    """Resolves the interpolations of `tree` and returns its values as a `Config`.

    Raises:
        OmegaConfBaseException: a key is unknown, or a value is of a wrong type.
    """
    plain = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True))
    trackers = {}
    if isinstance(monitors := plain.get("monitor"), dict):
        trackers = {name: value for name, value in monitors.items() if is_own(value)}
        plain["monitor"] = {name: monitors[name] for name in monitors if name not in trackers}
    config = cast(Config, OmegaConf.to_object(OmegaConf.merge(_schema(), plain)))
    vars(config.monitor).update(trackers)
    return config


@cache
def _schema() -> DictConfig:
    """Returns the empty config, which `OmegaConf.merge` copies; to make it takes 20 ms."""
    return cast(DictConfig, OmegaConf.structured(Config))


def to_tree(config: Config) -> dict[str, Any]:
    """Returns `config` as plain dicts."""
    tree = cast(dict[str, Any], _plain(config))
    return {**tree, "monitor": copy.deepcopy(vars(config.monitor))}


def _plain(value: Any) -> Any:
    """Returns a value of a config without dataclasses, with containers of its own."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def to_yaml(
    config: Config, texts: Mapping[tuple[str | int, ...], str] = {}, mask: bool = False
) -> str:
    """Returns the YAML of a config, as in the run directory.

    Args:
        config: the config, with interpolations resolved.
        texts: by path, interpolations to write instead of the values (`from_environment`).
        mask: hide values that look like secrets, for display.
    """
    tree = to_tree(config)
    for path, text in texts.items():
        _put(tree, path, text)
    if mask:
        tree = masked(tree)
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def _put(tree: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Sets the value at `path` of nested dicts and lists, if it still exists."""
    *above, leaf = path
    try:
        for key in above:
            tree = tree[key]
        tree[leaf]
    except (KeyError, IndexError, TypeError):
        return
    tree[leaf] = value


def flat_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields every dotted key of a nested mapping, including inner nodes."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_keys(value, f"{prefix}{key}.")
