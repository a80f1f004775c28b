"""`--cfg job` and `--version`: what is shown without a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf

from hybridtrain import __version__
from hybridtrain.app.compose import Composition
from hybridtrain.app.hidden import masked, to_tree
from hybridtrain.errors import ConfigError

_KEY = re.compile(r"^( *)(\w+):")


def versions() -> str:
    """Returns the versions that a report of a problem needs, on one line."""
    python = ".".join(map(str, sys.version_info[:3]))
    torch, hydra = _version("torch"), _version("hydra-core")
    return f"hybridtrain {__version__}, torch {torch}, hydra-core {hydra}, Python {python}"


def config_text(composition: Composition, resolve: bool = False, package: str | None = None) -> str:
    """Returns a config as YAML, each key with the comment of the file that it comes from.

    Args:
        composition: what to show.
        resolve: with the values of interpolations.
        package: show only this group.
    """
    tree: Any = composition.tree
    if resolve:
        tree = to_tree(composition.config)
    comments = dict(_comments(tree))
    tree = masked(tree)
    if package is not None:
        if package not in tree:
            raise ConfigError(f"--package {package}: there is no such group")
        tree = {package: tree[package]}
    group, lines = "", []
    for line in OmegaConf.to_yaml(OmegaConf.create(tree)).splitlines():
        comment = None
        if (key := _KEY.match(line)) and len(key[1]) in (0, 2):
            group = key[2] if not key[1] else group
            comment = comments.get(key[2] if not key[1] else f"{group}.{key[2]}")
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join(lines)


def _comments(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the comment of each key, out of the files of the groups."""
    folder = files("hybridtrain.configs")
    root = (folder / "config.yaml").read_text()
    yield from re.findall(r"^(\w+): .*? # (.*)$", root, re.M)
    yield from re.findall(r"^#   (data\.\w+) +(.*)$", root, re.M)
    for group, values in tree.items():
        if not isinstance(values, Mapping) or not (folder / group).is_dir():
            continue
        for option in (folder / group).iterdir():
            if not option.name.endswith(".yaml"):
                continue
            text = option.read_text()
            if "_target_" in values and f"_target_: {values['_target_']}\n" not in text:
                continue
            for key, comment in re.findall(r"^(\w+): .*? # (.*)$", text, re.M):
                yield f"{group}.{key}", comment


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
