"""A config as YAML: written to a run directory, and shown with the comments of its files.

Secrets are neither written nor shown. A key such as `token: ${oc.env:MY_TOKEN}` has its value while
a run lives; `config.yaml` has the text between the quotes, which is resolved again when it is read.
What looks like a secret by its name is shown as `***`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from hybridtrain.app.config import OPEN_GROUPS, RARE, ClusterConfig, Config
from hybridtrain.errors import ConfigError

if TYPE_CHECKING:
    from hybridtrain.app.compose import Composition

MASK = "***"

# Whole words of a key: `hub_token` and `api_key`, but neither `tokenizer` nor `monkey`.
_SECRET_KEY = re.compile(
    r"(?:^|_)(?:token|password|passwd|secret|credentials?|(?:api|access|secret|private)_?key)$",
    re.IGNORECASE,
)
_ENVIRONMENT = "oc.env"


def to_config(tree: Mapping[str, Any]) -> Config:
    """Resolves the interpolations of `tree` and returns its values as a `Config`.

    Raises:
        OmegaConfBaseException: a key is unknown, or a value is of a wrong type.
    """
    plain = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True)
    merged = OmegaConf.merge(OmegaConf.structured(Config), plain)
    return cast(Config, OmegaConf.to_object(merged))


def to_tree(config: Config) -> dict[str, Any]:
    """Returns `config` as plain dicts."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(config)))


def from_environment(tree: Mapping[str, Any]) -> dict[tuple[str | int, ...], str]:
    """Returns, by path, the interpolations whose value depends on an environment variable.

    Also those that take such a value over from another key: each is resolved a second time with
    other environment variables, and compared.
    """
    config = OmegaConf.create(dict(tree))
    texts = {path: text for path, text in _leaves(tree) if isinstance(text, str) and "${" in text}
    if not any(_ENVIRONMENT in text for text in texts.values()):
        return {}
    now = {path: _resolved(config, path) for path in texts}
    OmegaConf.register_new_resolver(_ENVIRONMENT, lambda *_: "another value", replace=True)
    try:
        others = {path: _resolved(config, path) for path in texts}
    finally:
        OmegaConf.register_new_resolver(_ENVIRONMENT, oc.env, replace=True)
    return {path: text for path, text in texts.items() if now[path] != others[path]}


def masked(value: Any, name: str = "") -> Any:
    """Returns a copy of `value` in which the values of keys that look like secrets are `***`."""
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    if isinstance(value, str) and value and _SECRET_KEY.search(name) and "${" not in value:
        return MASK
    return value


def put(tree: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Sets the value at `path` of nested dicts and lists, if it is still there."""
    *above, leaf = path
    try:
        for key in above:
            tree = tree[key]
        tree[leaf]
    except (KeyError, IndexError, TypeError):
        return
    tree[leaf] = value


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def _resolved(config: Any, path: tuple[str | int, ...]) -> Any:
    """Returns the value at `path`; an object that equals no other if it cannot be resolved."""
    try:
        for key in path:
            config = config[key]
    except OmegaConfBaseException:
        return object()
    return config


def to_yaml(
    config: Config, texts: Mapping[tuple[str | int, ...], str] = {}, mask: bool = False
) -> str:
    """Returns a config as written to the run directory.

    Args:
        config: with its interpolations resolved.
        texts: by path, interpolations to write in the place of the values (`from_environment`).
        mask: for people: without what looks like a secret.
    """
    tree = to_tree(config)
    for path, text in texts.items():
        put(tree, path, text)
    if mask:
        tree = masked(tree)
    return OmegaConf.to_yaml(OmegaConf.create(tree))


_KEY = re.compile(r"^( *)(\w+):")


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
        lines.append(f"# rare keys, at their defaults: {', '.join(left_out)}")
    return "\n".join(lines)


def _without_rare(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the tree without rare keys that have their defaults, and these keys."""
    defaults = to_tree(Config(cluster=ClusterConfig()))
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
    """Yields the comment of each key: out of the schema, and the files of the open groups."""
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
