"""Messages name arguments through `argument` and `setting`: each interface has its own names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from hybridtrain.cli.config.keys import KEYS, NAMING
from hybridtrain.loop import callbacks
from hybridtrain.options import LoaderOptions, PipelineOptions, TrainerOptions
from hybridtrain.world import World

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "hybridtrain"

ARGUMENT = re.compile(r"(?<![\w.\-/?&])([a-z_]\w*)=(?!=)")
CALL = re.compile(r"\b\w+\([^()]*(\([^()]*\)[^()]*)*\)")
"""Code for the user to write, `World.from_env(nb_part=2)`, which only has the names of Python."""

PLAIN_NAMES = {
    "callbacks": ("", "the key has the same name"),
    "collate": ("data/", "only Python has it"),
    "default_partition": ("smp/config.py", "a key of smp with the same name"),
    "drop_last": ("smp/", "the user's own DataLoader"),
}
"""Names that messages of some modules, by the begin of their path, may have; and why."""


def _targets(tree: object) -> Iterator[str]:
    if isinstance(tree, dict):
        if isinstance(target := tree.get("_target_"), str):
            yield target
        tree = list(tree.values())
    if isinstance(tree, list):
        for branch in tree:
            yield from _targets(branch)


def names_that_the_command_line_binds() -> set[str]:
    """Returns the arguments that have a key on the command line."""
    called = [World.from_env, *(getattr(callbacks, name) for name in callbacks.__all__)]
    for path in (ROOT / "configs").rglob("*.yaml"):
        targets = _targets(yaml.safe_load(path.read_text()))
        for package, _, name in (target.rpartition(".") for target in targets):
            if package.startswith("hybridtrain"):
                called.append(getattr(importlib.import_module(package), name))
    names = {name.rpartition(".")[2] for name in KEYS}
    for options in (PipelineOptions, TrainerOptions, LoaderOptions):
        names |= {option.name for option in fields(options)}
    for function in filter(callable, called):
        names |= set(inspect.signature(function).parameters)
    return names - {"self", "args", "kwargs", "optimizer"}  # which is passed to a schedule


def _is_message(node: ast.AST) -> bool:
    """Returns whether this raises, warns, logs, or makes a text for one of these."""
    if isinstance(node, ast.Raise | ast.Return):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name.endswith("Error") or name in (
        "add_note", "debug", "error", "exception", "info", "warn", "warning",
    )  # fmt: skip


def literal_names(source: str, known: set[str]) -> list[str]:
    """Returns the known arguments that messages in `source` have as plain text."""
    texts = (CALL.sub("", text) for text in messages(source))
    return [name for text in texts for name in ARGUMENT.findall(text) if name in known]


def messages(source: str) -> Iterator[str]:
    """Yields the texts of the messages in `source`."""
    for function in ast.walk(ast.parse(source)):
        if getattr(function, "name", "") in ("__repr__", "__str__"):
            for node in ast.walk(function):
                node.__dict__["of_repr"] = True
            continue
        if not _is_message(function) or "of_repr" in function.__dict__:
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_no_message_has_the_name_of_an_argument_as_plain_text() -> None:
    known = names_that_the_command_line_binds()
    found, needed = {}, set()
    for path in sorted(LIBRARY.rglob("*.py")):
        module = str(path.relative_to(LIBRARY))
        for name in set(literal_names(path.read_text(), known)):
            if name in PLAIN_NAMES and module.startswith(PLAIN_NAMES[name][0]):
                needed.add(name)
            else:
                found[module] = name
    assert found == {}
    assert needed == set(PLAIN_NAMES), "remove the names that no message has"


def test_no_message_of_the_library_has_a_key_of_the_command_line() -> None:
    keys = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, NAMING.keys.values()))})=")
    found = {
        str(path.relative_to(LIBRARY)): key
        for path in sorted(LIBRARY.rglob("*.py"))
        if path.relative_to(LIBRARY).parts[0] != "cli"
        for text in messages(path.read_text())
        if "hybridtrain recipe=" not in text  # a command to copy
        for key in keys.findall(text)
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    ['raise ValueError("lower chunks=")', 'raise E(f"chunks={chunks} is wrong")',
     'log.warning("chunks=%d", 3)', 'return f"set {x}, or split=time"'],
)  # fmt: skip
def test_plain_names_are_found(source: str) -> None:
    assert literal_names(f"def f():\n    {source}", {"chunks", "split"})


@pytest.mark.parametrize(
    "source",
    ['raise ValueError(f"lower {argument(\'chunks\')}")', 'raise E("set pipeline.chunks=3")',
     'raise E("write World.from_env(chunks=2)")', 'text = "chunks="'],
)  # fmt: skip
def test_other_texts_are_not_taken_for_names(source: str) -> None:
    assert not literal_names(f"def f():\n    {source}", {"chunks"})
