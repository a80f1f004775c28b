"""The text of `--cfg job`: a config as YAML, each key with the comment from its file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf

from hybridtrain.cli.config.compose import Composition
from hybridtrain.cli.config.schema import OPEN_GROUPS, Config, HardwareConfig
from hybridtrain.cli.config.secrets import masked
from hybridtrain.cli.config.tree import to_tree
from hybridtrain.errors import ConfigError

RARE = {
    "pipeline": ("max_inflight", "memory_weight", "default_partition"),
    "world": ("inner", "broadcast_buffers", "find_unused_parameters"),
    "submit": ("account", "qos", "constraint", "srun_args", "sbatch_args", "array_parallelism"),
    "search": ("sampler", "pruner", "storage", "launcher", "metric", "mode"),
    "hardware": (
        "flops_reached",
        "bandwidth_reached",
        "node_latency_s",
        "network_latency_s",
        "operator_s",
        "backward_operator_s",
        "library_gib",
        "library_gib_per_stage",
        "action_s",
        "microbatch_s",
        "message_s",
        "to_host_bytes_per_s",
        "from_host_bytes_per_s",
        "both_ways_bytes_per_s",
    ),
}
"""Keys by group that `--cfg job` shows only if they are set."""

_KEY = re.compile(r"^( *)(\w+):")


def config_text(composition: Composition, resolve: bool = False, package: str | None = None) -> str:
    """Returns a config as YAML, each key with the comment from its file.

    Args:
        composition: the config to show.
        resolve: show the values of interpolations.
        package: show only this group.
    """
    tree: Any = composition.tree
    if resolve:
        tree = to_tree(composition.config)
    comments = dict(_comments(tree))
    tree, left_out = _without_rare(masked(tree))
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
    if package is None:
        lines.append(f"# rarely used keys, not shown at their defaults: {', '.join(left_out)}")
    return "\n".join(lines)


def _without_rare(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the tree without rarely used keys at their defaults, and these keys."""
    defaults = to_tree(Config(hardware=HardwareConfig()))
    left_out = [
        f"{group}.{key}"
        for group, keys in RARE.items()
        for key in keys
        if tree.get(group) and tree[group].get(key) == defaults[group][key]
    ]
    shown = {
        group: {key: value for key, value in values.items() if f"{group}.{key}" not in left_out}
        if group in RARE and values
        else values
        for group, values in tree.items()
    }
    return shown, left_out


def _comments(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the comment of each key, from the schema and the files of the open groups."""
    folder = files("hybridtrain.configs")
    for name, entry in json.loads((folder / "schema.json").read_text())["properties"].items():
        for key, inner in {"": entry, **entry.get("properties", {})}.items():
            text: str = inner.get("description", "")
            yield f"{name}.{key}".rstrip("."), text.partition(". ")[0]
    for group in OPEN_GROUPS:
        target = f"_target_: {(tree.get(group) or {}).get('_target_')}\n"
        for option in (folder / group).iterdir():
            text = option.read_text() if option.name.endswith(".yaml") else ""
            if target in text:
                for key, comment in re.findall(r"^(\w+): .*? # (.*)$", text, re.M):
                    yield f"{group}.{key}", comment
