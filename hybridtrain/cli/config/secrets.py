"""Keeps secrets in a config out of files and output.

A key such as `token: ${oc.env:MY_TOKEN}` has its value only in memory; `config.yaml` stores the
interpolation, which is resolved again on reading (`from_environment`). Values of keys with names
that suggest secrets are shown as `***` (`masked`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

_MASK = "***"

# Whole words of a key: `hub_token` and `api_key`, but neither `tokenizer` nor `monkey`.
_SECRET_KEY = re.compile(
    r"(?:^|_)(?:token|password|passwd|passphrase|secret|credentials?|authorization"
    r"|(?:api|access|secret|private)_?key)$",
    re.IGNORECASE,
)
_PASSWORD_IN_URL = re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)")
_ENVIRONMENT = "oc.env"


def from_environment(tree: Mapping[str, Any]) -> dict[tuple[str | int, ...], str]:
    """Returns, by path, the interpolations that depend on an environment variable.

    This includes interpolations of other keys with such values: it resolves each a second time with
    other environment variables, and compares.
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
    """Returns a copy of `value` with `***` for values of keys that look like secrets, and for
    passwords in addresses."""
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    if isinstance(value, str) and value and _SECRET_KEY.search(name) and "${" not in value:
        return _MASK
    if isinstance(value, str) and "${" not in value:
        return _PASSWORD_IN_URL.sub(rf"\1{_MASK}", value)
    return value


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
    """Returns the value at `path`, or a unique object if it cannot be resolved."""
    try:
        for key in path:
            config = config[key]
    except OmegaConfBaseException:
        return object()
    return config
