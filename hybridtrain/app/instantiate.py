"""From a `_target_` in a config to the object it names, through an allow-list.

Hydra's own `instantiate` calls whatever a config names, and its blocklist is declared to be no
security boundary. Here a target must be what its key is for (an optimizer, a schedule, ...) and,
as the resolved object, come from a package that is listed; a name that merely passes through such
a package (`torch.optim.os.system`) does not.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from hybridtrain.errors import ConfigError

# What each key may name without the user's `allow_targets`.
PACKAGES: dict[str, tuple[str, ...]] = {
    "model": ("hybridtrain.models", "torchvision.models", "torch.nn"),
    "data": ("hybridtrain.data",),
    "optim": ("torch.optim",),
    "lr_schedule": ("torch.optim.lr_scheduler",),
    "trainer.metrics": ("torchmetrics",),
    "data.tokenizer": ("torchtext.data",),
}


def resolve(key: str, path: object, allow: Sequence[str] = ()) -> Callable[..., Any]:
    """The class or function that `path`, the value of `<key>._target_`, names.

    Raises:
        ConfigError: it is not allowed under `key`, does not exist or cannot be called.
    """
    packages = (*PACKAGES[key], *allow)
    where = f"{key}={path}" if key == "data.tokenizer" else f"{key}._target_={path}"
    if not isinstance(path, str) or not _within(path, packages):
        raise ConfigError(
            f"{where} is not allowed: it must come from {', '.join(packages)}; to use a package of "
            f"your own, set allow_targets=[its.name]"
        )
    target = _locate(where, path)
    if not callable(target) or inspect.ismodule(target):
        raise ConfigError(f"{where} is no class or function")
    if not _within(f"{getattr(target, '__module__', '')}.", packages):
        raise ConfigError(f"{where} is not allowed: it comes from {target.__module__}")
    return cast(Callable[..., Any], target)


def build(
    key: str,
    config: Mapping[str, Any],
    allow: Sequence[str] = (),
    *,
    positional: Sequence[object] = (),
    facts: Mapping[str, Any] | None = None,
    ignore: Iterable[str] = (),
) -> Any:
    """Calls the target of `config` with `positional` and the config's other keys.

    A key that is null is filled from `facts`, if they have it, and left out if the target does not
    take it.

    Raises:
        ConfigError: an unknown or a missing key; says which are known. Those in `ignore` are, but
            do not go to the target.
    """
    target = resolve(key, config.get("_target_"), allow)
    facts, ignore = facts or {}, list(ignore)
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {
        name: facts.get(name) if value is None else value
        for name, value in config.items()
        if name != "_target_"
        and name not in ignore
        and (value is not None or takes_any or name in parameters)
    }
    check_arguments(key, target, positional, arguments, ignore)
    return target(*positional, **arguments)


def check_arguments(
    key: str,
    target: Callable[..., Any],
    positional: Sequence[object],
    arguments: Mapping[str, Any],
    others: Sequence[str] = (),
) -> None:
    """Makes sure that `target` takes `arguments`.

    Raises:
        ConfigError: names the key under `key`, and the one that was probably meant, also among
            `others`, which are not for the target.
    """
    signature = inspect.signature(target)
    known = [*list(signature.parameters)[len(positional) :], *others]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name, value in arguments.items():
        if name not in known and not takes_any:
            raise ConfigError(unknown_key(f"{key}.{name}", [f"{key}.{k}" for k in known]))
        parameter = signature.parameters.get(name)
        if isinstance(value, str) and parameter and isinstance(parameter.default, int | float):
            kind = "true or false" if isinstance(parameter.default, bool) else "a number"
            raise ConfigError(f"{key}.{name}={value} must be {kind}")
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        raise ConfigError(f"{key} ({_name(target)}): {error}") from None


def unknown_key(key: str, known: Sequence[str]) -> str:
    """The message for a key that does not exist."""
    parent, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    close = difflib.get_close_matches(leaf, siblings, n=1)
    meant = siblings[close[0]] if close else None
    if meant is None:  # the right key in the wrong place, or a typo in the first part
        elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
        meant = next(iter([*elsewhere, *difflib.get_close_matches(key, known, 1, 0.8)]), None)
    if meant is not None:
        return f"{key}: there is no such key; did you mean {meant}?"
    return f"{key}: there is no such key; there are: {', '.join(siblings.values() or known)}"


def unknown_option(group: str, chosen: str, options: Sequence[str]) -> str:
    """The message for an option that a config group does not have."""
    close = difflib.get_close_matches(chosen, options, n=1)
    hint = f"did you mean {group}={close[0]}?" if close else f"there are: {', '.join(options)}"
    return f"{group}={chosen}: there is no such option; {hint}"


def _within(path: str, packages: Sequence[str]) -> bool:
    return any(path.startswith(f"{package}.") for package in packages)


def _locate(where: str, path: str) -> Any:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise ConfigError(f"{where} cannot be imported: {error}") from error
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                close = difflib.get_close_matches(part, dir(found), n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigError(f"{where}: {module_name} has no {part}{hint}")
            found = getattr(found, part)
        return found
    raise ConfigError(f"{where}: there is no package {parts[0]}; is it installed?")


def _name(target: Callable[..., Any]) -> str:
    return getattr(target, "__qualname__", repr(target))
