"""Calls the object that a `_target_` in a config names, if it is allowed.

Hydra's own `instantiate` calls any object; its documentation says that its blocklist is not a
security boundary. Here, a list defines the allowed objects for each key: classes of one kind, and
individual functions. Allowing whole packages would not be safe, because most can load a pickle or
import a module by name.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, NoneType
from typing import Any, TypeVar, cast

from hybridtrain._base.kernel_downloads import without_kernel_downloads
from hybridtrain.cli.config.keys import unknown_key
from hybridtrain.errors import ConfigError, UserError, closest, naming

T = TypeVar("T")


@dataclass(frozen=True)
class Targets:
    """The classes and functions that a key may name without `allow_targets`.

    Attributes:
        words: their description for messages.
        modules: their modules; a class is allowed if the module exports it.
        kind: the base class, as `module:name`; None: no classes.
    """

    words: str
    modules: tuple[str, ...] = ()
    kind: str | None = None


# Modules of torchmetrics without metrics that load a network by name or path.
_METRICS = (
    *("aggregation", "classification", "clustering", "detection", "nominal", "regression"),
    *("retrieval", "segmentation", "shape", "audio.sdr", "audio.snr", "text.perplexity"),
    *(f"image.{name}" for name in ("psnr", "psnrb", "ssim", "sam", "scc", "tv", "uqi", "vif")),
)

TARGETS: dict[str, Targets] = {
    "model": Targets(
        "an nn.Module of torch.nn, a model of torchvision.models, or a function of "
        "hybridtrain.models",
        ("torch.nn", "torchvision.models", "hybridtrain.models"),
        "torch.nn:Module",
    ),
    "data": Targets("a data set of hybridtrain.datasets", ("hybridtrain.datasets",)),
    "optim": Targets(
        "an optimizer of torch.optim, bitsandbytes.optim or hybridtrain.step.muon",
        ("torch.optim", "bitsandbytes.optim", "hybridtrain.step.muon"),
        "torch.optim:Optimizer",
    ),
    "lr_schedule": Targets(
        "a schedule of torch.optim.lr_scheduler or hybridtrain.step.lr_schedules",
        ("torch.optim.lr_scheduler", "hybridtrain.step.lr_schedules"),
        "torch.optim.lr_scheduler:LRScheduler",
    ),
    "trainer.metrics": Targets(
        "a metric of torchmetrics that does not load a network",
        ("torchmetrics", *(f"torchmetrics.{name}" for name in _METRICS)),
        "torchmetrics:Metric",
    ),
    "trainer.loss": Targets(
        "a loss of torch.nn, torch.nn.functional or hybridtrain.loss",
        ("torch.nn", "torch.nn.functional", "hybridtrain.loss"),
        "torch.nn.modules.loss:_Loss",
    ),
    "callbacks": Targets(
        "a callback of hybridtrain.loop.callbacks",
        ("hybridtrain.loop.callbacks",),
        "hybridtrain.loop.callbacks:Callback",
    ),
    "monitor": Targets(
        "a tracker of hybridtrain.observe.trackers, or a callback of hybridtrain.loop.callbacks",
        ("hybridtrain.observe.trackers", "hybridtrain.loop.callbacks"),
        "hybridtrain.loop.callbacks:Callback",
    ),
    "data.tokenizer": Targets(
        "a tokenizer of torchtext by name, or a file or folder with a slash (./tokenizer.json)"
    ),
}


def _exported(module: Any, name: str) -> list[object]:
    """Returns the object that a package exports under this name, without importing others."""
    return [getattr(module, name)] if name in module.__all__ else []


# The functions of a module that a config may call; for some modules, the function of that name.
_FUNCTIONS: dict[str, Callable[[Any, str], Iterable[object]]] = {
    "torchvision.models": lambda module, _: map(module.get_model_builder, module.list_models()),
    "hybridtrain.models": _exported,
    "hybridtrain.datasets": _exported,
    "hybridtrain.step.lr_schedules": _exported,
    "hybridtrain.loss": lambda losses, _: losses.LOSSES.values(),
    "torch.nn.functional": lambda module, _: (
        value
        for name, value in vars(module).items()
        if name.endswith(("_loss", "cross_entropy", "_with_logits", "kl_div"))
    ),
}


# Packages with objects that take plain values, so that their errors are about these values.
VALUES_ONLY = ("torch.optim", "bitsandbytes", "hybridtrain.step.muon", "torchmetrics")


# The extras of pyproject.toml that install a package with objects that a config may name.
_EXTRAS = {"bitsandbytes": "bnb"}


def resolve(key: str, path: object, allow: Sequence[str] = ()) -> Callable[..., Any]:
    """Returns the class or function that `path`, the value of `<key>._target_`, names.

    Args:
        key: the config key.
        path: a class or function in `TARGETS`, or any object of a package in `allow`.
        allow: the user's own packages.

    Raises:
        ConfigError: it is not allowed under `key`, does not exist or is not callable.
    """
    targets = _targets(key)
    package = str(path).partition(".")[0]
    if targets is TARGETS["optim"] and package not in ("torch", "hybridtrain"):
        from hybridtrain.step import UNSUPPORTED_OPTIMIZERS  # imports torch

        if package in UNSUPPORTED_OPTIMIZERS:
            raise ConfigError(f"{key}._target_={path}: {UNSUPPORTED_OPTIMIZERS[package]}")
    where = f"{key}={path}" if key == "data.tokenizer" else f"{key}._target_={path}"
    refusal = ConfigError(
        f"{where} is not allowed: {key} may name {targets.words}; to use your own package, set "
        f"allow_targets=[its.name] on the command line or in [tool.hybridtrain] of pyproject.toml"
    )
    if not isinstance(path, str):
        raise refusal
    is_allowed = _within(path, allow)
    # rejected before anything is imported
    if not is_allowed and (not _within(path, targets.modules) or "._" in path):
        raise refusal
    module, names = _imported(where, path)
    if not is_allowed and len(names) > 1:  # an attribute of an object, such as a method
        raise refusal
    target = _attribute(where, module, names)
    if not callable(target) or inspect.ismodule(target):
        raise ConfigError(f"{where} is not callable")
    if not _is_listed(targets, target):
        if not is_allowed:
            raise refusal
        # Objects that the user's module only imported are not the user's. For an object without a
        # name, such as a loss created there, the module of its class counts.
        imported = hasattr(target, "__name__") or len(names) > 1
        if imported and not _within(f"{getattr(target, '__module__', '')}.", allow):
            raise ConfigError(f"{where} is not allowed: it is imported from {target.__module__}")
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
    """Calls the target of `config`, which returns a `kind`, with `positional` and the other keys.

    A null key takes its value from `defaults`, and is dropped if the target does not accept it. A
    parameter of the target without a key also takes its value from `defaults`. Keys in `ignore` are
    known but not passed on.

    Raises:
        ConfigError: a key is unknown or missing, or the target returns another kind of object.
        UserError: an error of the target, with config keys instead of argument names.
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
    with naming({name: f"{key}.{name}" for name in {*parameters, *arguments}}):
        try:
            made = target(*positional, **arguments)
        except UserError:
            raise
        except Exception as error:
            if not _within(f"{target.__module__}.", VALUES_ONLY):
                raise  # the user's own code, or a model's
            raise ConfigError(_refused_values(key, arguments, config, error)) from error
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
    """Does the checks of `build` without a call; returns the target and its arguments.

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
    names = [*list(parameters)[len(positional) :], *ignore]
    for name, value in arguments.items():
        if name not in names and not takes_any:
            raise ConfigError(unknown_key(f"{key}.{name}", [f"{key}.{k}" for k in names]))
        if name in parameters:
            _check_type(f"{key}.{name}", value, parameters[name])
            arguments[name] = _with_floats(value, str(parameters[name].annotation))
    return target, arguments


def not_taken(
    key: str, config: Mapping[str, Any], names: Sequence[str], allow: Sequence[str] = ()
) -> list[str]:
    """Returns the `names` that are not arguments of the target of `config`."""
    if not names:
        return []
    parameters = inspect.signature(resolve(key, config.get("_target_"), allow)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    return [name for name in names if name not in (*parameters, "_target_")]


def _targets(key: str) -> Targets:
    """Returns the targets of `key`, or of its group."""
    while key not in TARGETS:
        key = key.rpartition(".")[0]
    return TARGETS[key]


def _is_listed(targets: Targets, target: Any) -> bool:
    """Returns whether `target` is a class or function of `targets`."""
    for name in targets.modules:
        if not _within(f"{getattr(target, '__module__', '')}.", [name]):
            continue
        module = importlib.import_module(name)
        listed: Iterable[object] = ()
        if not isinstance(target, type):
            own_name = getattr(target, "__name__", "")
            listed = _FUNCTIONS[name](module, own_name) if name in _FUNCTIONS else ()
        elif targets.kind is not None and issubclass(target, pkgutil.resolve_name(targets.kind)):
            # also the attribute, which the module may import on first use
            listed = (getattr(module, target.__name__, None), *vars(module).values())
        if any(target is one for one in listed):
            return True
    return False


# Kinds of values, and the words of an annotation that takes them.
_NOT_NUMBERS: tuple[tuple[Any, str], ...] = (
    (str, "str"),
    (NoneType, "None|Optional|Any|_empty"),
    ((list, Mapping), "list|List|tuple|Sequence|Mapping|dict|Any|_empty"),
)


def _check_type(key: str, value: object, parameter: inspect.Parameter) -> None:
    """Rejects a string or a number if the target expects another kind of value."""
    default, annotation = parameter.default, str(parameter.annotation)
    kinds = [kind.strip() for kind in annotation.split("|") if kind.strip() != "None"]
    numeric = all(kind in ("<class 'int'>", "<class 'float'>", "int", "float") for kind in kinds)
    has_number = isinstance(default, int | float)
    refused = any(
        isinstance(value, kind) and not re.search(rf"\b({words})\b", annotation)
        for kind, words in _NOT_NUMBERS
    )
    if value is None and not key.startswith("optim."):
        refused = False  # the data set or the length of the run replaces it
    if refused and (has_number or (numeric and value is not None)):
        expected = "true or false" if isinstance(default, bool) else "a number"
        shown = "null" if value is None else value
        raise ConfigError(f"{key}={shown} must be {expected}")
    whole = re.search(r"\bint\b", annotation) and not re.search(r"\bfloat\b", annotation)
    if isinstance(value, float) and whole:
        example = f", such as {int(value)}" if value.is_integer() else ""
        raise ConfigError(f"{key}={value} must be a whole number{example}")
    if all(re.match(r"(list|Sequence|tuple)\[", kind) for kind in kinds) and not isinstance(
        value, list | tuple | None
    ):
        raise ConfigError(f"{key}={value} must be a list, such as [{value}]")
    is_text = all(kind in ("<class 'str'>", "str") for kind in kinds)
    if is_text and isinstance(value, list | Mapping):
        raise ConfigError(f"{key}={value} must be a single text")
    if isinstance(default, tuple) and value is not None:
        is_list = isinstance(value, list | tuple)
        if not is_list or len(cast(Sequence[Any], value)) != len(default):
            example = ",".join(map(str, default))
            raise ConfigError(
                f"{key}={value} must be a list of {len(default)} values, such as [{example}]"
            )


def _with_floats(value: Any, annotation: str) -> Any:
    """Returns `value` with floats for whole numbers if an argument takes floats only.

    YAML has 0 for 0.0, and some of PyTorch's optimizers ask for the type.
    """
    if "float" not in annotation or re.search(r"\b(int|bool)\b", annotation):
        return value
    if isinstance(value, list):
        return [float(item) if type(item) is int else item for item in value]
    return float(value) if type(value) is int else value


def _refused_values(
    key: str, arguments: Mapping[str, Any], config: Mapping[str, Any], error: Exception
) -> str:
    """Returns the message for values that a target rejects; names the wrong one if possible."""
    last = str(error).rpartition(":")[2].strip()
    suspects = [
        name
        for name, value in arguments.items()
        if last in map(str, value if isinstance(value, list | tuple) else [value])
    ]
    text = " ".join(str(error).split()) or type(error).__name__
    if len(suspects) == 1:
        name = suspects[0]
        return f"{key}.{name}={config.get(name, arguments[name])}: {text}"
    words = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"{key}: {text} (with {words})"


def _another_kind(key: str, config: Mapping[str, Any], kind: type, found: type) -> str:
    expected = f"{kind.__module__}.{kind.__name__}"
    return f"{key}._target_={config['_target_']} must return a {expected}, not {found.__name__}"


def _within(path: str, packages: Sequence[str]) -> bool:
    return any(path.startswith(f"{package}.") for package in packages)


def _imported(where: str, path: str) -> tuple[ModuleType, list[str]]:
    """Returns the module at the start of `path`, and the names after it."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            with without_kernel_downloads() if parts[0] == "bitsandbytes" else nullcontext():
                return importlib.import_module(name), parts[cut:]
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise ConfigError(f"{where} cannot be imported: {error}") from error
    extra = _EXTRAS.get(parts[0])
    install = f": pip install 'hybridtrain[{extra}]'" if extra else "; is it installed?"
    raise ConfigError(f"{where}: there is no package {parts[0]}{install}")


def _attribute(where: str, module: ModuleType, names: Sequence[str]) -> Any:
    target: Any = module
    for name in names:
        if not hasattr(target, name):
            close = closest(name, dir(target))
            hint = f"; did you mean {close}?" if close else ""
            raise ConfigError(f"{where}: {module.__name__} has no {name}{hint}")
        target = getattr(target, name)
    return target
