"""Calls the object that a `_target_` in a config names, if an allow-list has its package.

Hydra's own `instantiate` calls whatever a config names; its documentation says that its blocklist
is not a security boundary. Here a target must fit its key (an optimizer, a schedule, ...), and the
object it resolves to must come from a listed package: a name that only passes through such a
package (`torch.optim.os.system`) is refused.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from hybridtrain.app.keys import errors_with_config_keys
from hybridtrain.errors import ConfigError, UserError, closest

T = TypeVar("T")

# The packages that each key may name without the user's `allow_targets`.
PACKAGES: dict[str, tuple[str, ...]] = {
    "model": ("hybridtrain.models", "torchvision.models", "torch.nn"),
    "data": ("hybridtrain.data",),
    "optim": ("torch.optim",),
    "lr_schedule": ("torch.optim.lr_scheduler",),
    "trainer.metrics": ("torchmetrics",),
    "trainer.loss": ("torch.nn", "hybridtrain.losses"),
    "callbacks": ("hybridtrain.callbacks", "hybridtrain.monitor"),
    "data.tokenizer": ("torchtext.data",),
}


# Packages whose objects take plain values, so that each error of theirs is about such a value.
VALUES_ONLY = ("torch.optim", "torchmetrics")


def resolve(key: str, path: object, allow: Sequence[str] = ()) -> Callable[..., Any]:
    """Returns the class or function that `path`, the value of `<key>._target_`, names.

    Raises:
        ConfigError: it is not allowed under `key`, does not exist or is not callable.
    """
    packages = (*_own_packages(key), *allow)
    where = f"{key}={path}" if key == "data.tokenizer" else f"{key}._target_={path}"
    if not isinstance(path, str) or not _within(path, packages):
        raise ConfigError(
            f"{where} is not allowed: it must come from {', '.join(packages)}; to use your own "
            f"package, set allow_targets=[its.name]"
        )
    target = _locate(where, path)
    if not callable(target) or inspect.ismodule(target):
        raise ConfigError(f"{where} is not callable")
    if not _within(f"{getattr(target, '__module__', '')}.", packages):
        raise ConfigError(f"{where} is not allowed: it comes from {target.__module__}")
    return cast(Callable[..., Any], target)


def build(
    key: str,
    config: Mapping[str, Any],
    kind: type[T],
    allow: Sequence[str] = (),
    *,
    positional: Sequence[object] = (),
    defaults: Mapping[str, Any] | None = None,
    ignore: Sequence[str] = (),
) -> T:
    """Calls the target of `config`, which makes a `kind`, with `positional` and the other keys.

    A key that is null takes its value from `defaults`, and is left out if the target does not take
    it. A parameter of the target without a key takes its value from `defaults` too. Keys in
    `ignore` are known but not passed on.

    Raises:
        ConfigError: a key is unknown or missing, or the target makes something else.
        UserError: the target's own, with config keys in the place of its arguments' names.
    """
    defaults = defaults or {}
    target, arguments = check(
        key, config, kind, allow, positional=positional, defaults=defaults, ignore=ignore
    )
    signature = inspect.signature(target)
    parameters = signature.parameters
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name in list(parameters)[len(positional) :]:
        if name in defaults and name not in config and parameters[name].kind in by_name:
            arguments[name] = defaults[name]
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        name = getattr(target, "__qualname__", repr(target))
        raise ConfigError(f"{key} ({name}): {error}") from None
    with errors_with_config_keys({name: f"{key}.{name}" for name in {*parameters, *arguments}}):
        try:
            made = target(*positional, **arguments)
        except UserError:
            raise
        except Exception as error:
            if not _within(f"{target.__module__}.", VALUES_ONLY):
                raise  # the user's own code, or a model's
            raise ConfigError(_refused_values(key, arguments, error)) from error
    if not isinstance(made, kind):
        raise ConfigError(_another_kind(key, config, kind, type(made)))
    return made


def check(
    key: str,
    config: Mapping[str, Any],
    kind: type,
    allow: Sequence[str] = (),
    *,
    positional: Sequence[object] = (),
    defaults: Mapping[str, Any] = {},
    ignore: Sequence[str] = (),
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Checks what `build` can check without a call; returns the target and the keys' arguments.

    Raises:
        ConfigError: the target is not allowed, or a key is unknown or of a wrong type.
    """
    target = resolve(key, config.get("_target_"), allow)
    if isinstance(target, type) and not issubclass(target, kind):
        raise ConfigError(_another_kind(key, config, kind, target))
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {
        name: defaults.get(name) if value is None else value
        for name, value in config.items()
        if name not in ("_target_", *ignore)
        and (value is not None or takes_any or name in parameters)
    }
    known = [*list(parameters)[len(positional) :], *ignore]
    for name, value in arguments.items():
        if name not in known and not takes_any:
            raise ConfigError(unknown_key(f"{key}.{name}", [f"{key}.{k}" for k in known]))
        if name in parameters:
            _check_type(f"{key}.{name}", value, parameters[name])
    return target, arguments


def not_taken(
    key: str, config: Mapping[str, Any], names: Sequence[str], allow: Sequence[str] = ()
) -> list[str]:
    """Returns those of `names` that are not arguments of the target of `config`."""
    if not names:
        return []
    parameters = inspect.signature(resolve(key, config.get("_target_"), allow)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    return [name for name in names if name not in (*parameters, "_target_")]


def _own_packages(key: str) -> tuple[str, ...]:
    """Returns the packages of `key`, or of the group that it is an entry of."""
    while key not in PACKAGES:
        key = key.rpartition(".")[0]
    return PACKAGES[key]


def _check_type(key: str, value: object, parameter: inspect.Parameter) -> None:
    """Refuses a text or a single number where the target expects another kind of value."""
    default, annotation = parameter.default, str(parameter.annotation)
    numeric = annotation in ("<class 'int'>", "<class 'float'>", "int", "float")
    if isinstance(value, str) and (isinstance(default, int | float) or numeric):
        expected = "true or false" if isinstance(default, bool) else "a number"
        raise ConfigError(f"{key}={value} must be {expected}")
    if isinstance(default, tuple) and value is not None:
        is_list = isinstance(value, list | tuple)
        if not is_list or len(cast(Sequence[Any], value)) != len(default):
            example = ",".join(map(str, default))
            raise ConfigError(
                f"{key}={value} must be a list of {len(default)} values, such as [{example}]"
            )


def _refused_values(key: str, arguments: Mapping[str, Any], error: Exception) -> str:
    """Returns the message for values that a target does not accept; names the one, if it can."""
    last = str(error).rpartition(":")[2].strip()
    suspects = [
        name
        for name, value in arguments.items()
        if last in map(str, value if isinstance(value, list | tuple) else [value])
    ]
    text = " ".join(str(error).split()) or type(error).__name__
    if len(suspects) == 1:
        name = suspects[0]
        return f"{key}.{name}={arguments[name]}: {text}"
    given = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"{key}: {text} (with {given})"


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Returns the message for a key that does not exist."""
    parent, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    meant = siblings.get(closest(leaf, siblings) or "")
    if meant is None:  # the right key in the wrong group, or a typo in the group
        elsewhere = (k for k in known if k.rpartition(".")[2] == leaf)
        meant = next(elsewhere, None) or closest(key, known, cutoff=0.8)
    if meant is not None:
        return f"{key}: unknown key; did you mean {meant}?"
    return f"{key}: unknown key; the choices are: {', '.join(siblings.values() or known)}"


def _another_kind(key: str, config: Mapping[str, Any], kind: type, found: type) -> str:
    expected = f"{kind.__module__}.{kind.__name__}"
    return f"{key}._target_={config['_target_']} must give a {expected}, not {found.__name__}"


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
                close = closest(part, dir(found))
                hint = f"; did you mean {close}?" if close else ""
                raise ConfigError(f"{where}: {module_name} has no {part}{hint}")
            found = getattr(found, part)
        return found
    raise ConfigError(f"{where}: there is no package {parts[0]}; is it installed?")
