"""Calls everything that a config may name, with hostile values; run by tests/cli/test_targets.py.

    python hostile_config.py        in an empty folder

Every name below the packages of `PACKAGES` is tried as a `_target_`, private ones and attributes
of objects too. What `resolve` allows is called, for each parameter with each hostile value: a
module and a pickle in the working directory, the path of such a pickle, a URL, the path of a
function. All of them contain MARKER. Meanwhile an audit hook writes down every event with MARKER
among its arguments (a file that is opened, a module that is imported, code that is compiled, a host
that is looked up), and every process that is started.

Prints a JSON object: `called`, the targets by key, and `seen`, what the hook has written down.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridtrain.cli.config import targets as instantiate
from hybridtrain.errors import ConfigError

MARKER = "hostile_marker"

# More than may be named, so that a list which is too wide is noticed.
PACKAGES = {
    "model": ("torch.nn", "torchvision.models", "hybridtrain.models"),
    "data": ("hybridtrain.data", "hybridtrain.datasets"),
    "optim": ("torch.optim",),
    "lr_schedule": ("torch.optim",),
    "trainer.metrics": ("torchmetrics",),
    "trainer.loss": ("torch.nn", "hybridtrain.loss"),
    "callbacks": ("hybridtrain.loop.callbacks", "hybridtrain.observe.trackers"),
    "monitor": ("hybridtrain.loop.callbacks", "hybridtrain.observe.trackers"),
}

# Parameters that start a download, as documented: `load_data` checks a tokenizer.
DOWNLOADING = ("tokenizer",)

# Parameters of hybridtrain's models, data sets and trackers that name files, which may be read, not
# run.
READING = ("path", "source", "model_source", "train")
LISTS = ("os.scandir", "os.listdir", "glob.glob", "glob.glob/2", "pathlib.Path.glob")

# For the other parameters that have no default, so that some calls get further.
PLAUSIBLE: tuple[Any, ...] = (4, [4, 4])

PROCESSES = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen")
NETWORK = ("socket.getaddrinfo", "socket.connect")

seen: list[list[str]] = []
watched = ""
may_read = False


class Command:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, (f"echo {MARKER}",)


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Writes down what hostile values lead to; no process and no connection is begun."""
    if not watched:
        return
    if may_read and (event in LISTS or (event == "open" and arguments[1] in ("r", "rb"))):
        return
    texts = [str(each) for each in arguments if isinstance(each, str | bytes | tuple | list)]
    if event in PROCESSES or any(MARKER in text for text in texts):
        seen.append([watched, event, *(text[:200] for text in texts)])
    if event in (*PROCESSES, *NETWORK):
        raise PermissionError(event)


@contextlib.contextmanager
def watching(what: str, reads: bool = False) -> Iterator[None]:
    """Lets the hook see what happens inside; what is raised there does not matter."""
    global watched, may_read
    watched, may_read = what, reads
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
            yield
    finally:
        watched = ""


def modules(name: str) -> Iterator[Any]:
    """Yields a module and all below it."""
    try:
        module = importlib.import_module(name)
    except Exception:  # it needs a library that is not installed
        return
    yield module
    for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
        yield from modules(f"{name}.{found.name}")


def paths(package: str) -> Iterator[str]:
    """Yields the path of every name below `package`, and of the attributes of what is no module."""
    for module in modules(package):
        # `dir` has the names that a package imports on first use, too
        for name in sorted({*vars(module), *dir(module)}):
            value = getattr(module, name, None)
            yield f"{module.__name__}.{name}"
            if getattr(value, "__module__", "") == module.__name__:
                attributes = getattr(value, "__dict__", ())
                yield from (f"{module.__name__}.{name}.{inner}" for inner in attributes)


def allowed(key: str) -> dict[str, Any]:
    """Returns everything that a config may name under `key`, by one of its paths."""
    found: dict[int, tuple[str, Any]] = {}
    for package in PACKAGES[key]:
        for path in paths(package):
            with contextlib.suppress(ConfigError):
                target = instantiate.resolve(key, path)
                found.setdefault(id(target), (path, target))
    return dict(found.values())


def calls(target: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the hostile parameter of each call and all arguments.

    There are fewer calls for a builder of a model, which takes long.
    """
    every = list(inspect.signature(target).parameters.values())
    parameters = [p for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in parameters if p.default is p.empty]
    names = [p.name for p in parameters if p.name not in DOWNLOADING]
    if any(p.kind is p.VAR_KEYWORD for p in every):
        names += ["model_name_or_path", "norm_layer"]
    values = [
        MARKER,
        str(Path.cwd() / f"{MARKER}.pth"),
        f"https://{MARKER}.invalid/{MARKER}.pth",
        f"{MARKER}:function",
        {"_target_": f"{MARKER}.function"},
    ]
    if is_builder(target):
        del values[2:]
    for name in names:
        for value in values:
            for plausible in PLAUSIBLE if set(needed) - {name} else PLAUSIBLE[:1]:
                yield name, {**dict.fromkeys(needed, plausible), name: value}


def call(key: str, path: str, target: Any) -> None:
    """Calls `target` with every hostile value, and uses what it makes as a run does."""
    first: list[Any] = []
    if key == "optim":
        first = [[nn.Parameter(torch.zeros(2, 2))]]
    elif key == "lr_schedule":
        first = [torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))], lr=0.1)]
    elif key == "trainer.loss" and not isinstance(target, type):
        first = [torch.randn(4, 4), torch.tensor([0, 1, 2, 3])]
    needed = list(inspect.signature(target).parameters)[: len(first)]
    for hostile, arguments in calls(target):
        settings = {name: value for name, value in arguments.items() if name not in needed}
        # of a model on the device "meta" nothing is computed
        device = torch.device("meta" if key == "model" else "cpu")
        is_own = path.startswith(
            # a tracker looks whether the file that it would replace is one of its own
            ("hybridtrain.models.", "hybridtrain.datasets.", "hybridtrain.observe.trackers.")
        )
        with watching(f"{path}({settings})", is_own and hostile in READING), device:
            made = target(*first, **settings)
            if key in ("trainer.metrics", "trainer.loss"):
                made(torch.randn(4, 4), torch.tensor([0, 1, 2, 3]))
            elif key in ("optim", "lr_schedule"):
                made.step()


def one_of_each(targets: dict[str, Any]) -> dict[str, Any]:
    """Returns `targets` with one of torchvision's builders for each file and signature."""
    found: dict[object, tuple[str, Any]] = {}
    for path, target in targets.items():
        parameters = inspect.signature(target).parameters
        alike = (target.__module__, *parameters) if is_builder(target) else path
        found.setdefault(alike, (path, target))
    return dict(found.values())


def is_builder(target: Any) -> bool:
    """Returns whether `target` is a function of torchvision that builds a model."""
    return str(target.__module__).startswith("torchvision.") and not isinstance(target, type)


def main() -> None:
    """Tries all keys."""
    torch.save(Command(), MARKER)
    torch.save(Command(), f"{MARKER}.pth")
    Path(f"{MARKER}.py").write_text("def function(*args, **kwargs): return []\n")
    sys.path.insert(0, os.getcwd())
    warnings.simplefilter("ignore")
    sys.addaudithook(hook)
    # what the hook must see
    with watching("control: pickle"):
        torch.load(MARKER, weights_only=False)
    with watching("control: import"):
        importlib.import_module(MARKER)
    called = {}
    for key in PACKAGES:
        targets = allowed(key)
        called[key] = sorted(targets)
        for path, target in one_of_each(targets).items():
            call(key, path, target)
    print(json.dumps({"called": called, "seen": seen}))


if __name__ == "__main__":
    main()
