"""Writes what keys mean wherever it is told, from one text: `python scripts/options.py [--check]`.

The text is the docstring of the field, in the option class that the key is taken from; a key of the
command line alone has it in `hybridtrain/cli/config/schema.py`. From it come the comments in
`configs/`, the page docs/options.md and a JSON schema for editors, configs/schema.json. The keys
of the options of open groups, such as `data=datasets`, have their comments in their own files.
`--check` writes nothing and fails where a file is not what it should be.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from pydoc import locate
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf

from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.config.schema import LOADER_OPTIONS, Config, groups
from hybridtrain.observe import TRACKERS
from hybridtrain.options import LoaderOptions

ROOT = Path(__file__).resolve().parents[1]
PAGE, SCHEMA = ROOT / "docs/options.md", ROOT / "configs/schema.json"

INTRODUCTION = {
    "": """# Options

Every key, its type, its default without a recipe, and its meaning; made by
`scripts/options.py`. How keys are set is in [Configuration](configuration.md). An editor with
YAML schemas completes and explains the keys of a recipe by `schema.json` of the package
`hybridtrain.configs`.

## The run""",
    "submit": """What `hybridtrain submit` asks a cluster for; see [Clusters](clusters.md).
The other commands take no notice of it.""",
    "search": """What `hybridtrain search` looks for; see [Search](sweeps.md#search). The
other commands take no notice of it.""",
    "monitor": """`monitor=[tensorboard,wandb,mlflow,csv]` chooses the trackers of a run, see
[Trackers](trackers.md).""",
    "data": """The keys of every data set; then those of each option. `data.batch_size` counts
the samples of all replicas; `auto`: [the largest batch that fits](memory.md#the-largest-batch).
[Data sets](data-sets.md) says what files they read.""",
    "model": """A key that is null is taken from the data set, as is an argument of that name
that has no key.""",
    "optim": """The arguments of the class in `torch.optim`; beside them `optim.groups` and
`optim.layer_decay`, see
[Parameter groups](callbacks.md#parameter-groups-and-several-optimizers).""",
    "lr_schedule": """The arguments of the class in `torch.optim.lr_scheduler`. `T_max` and
`total_iters` that are null become the number of steps after the warm-up. A warm-up that is
longer than the run never reaches the learning rate.""",
    "hardware": """The machine that `hybridtrain plan` prices a run for, and that `auto` keys
are chosen for; see [The price of a run](planning.md). Or `this-machine` (after `hybridtrain
measure-machine`), or the path of a file with such keys.""",
}
FIRST = ("model", "data", "optim", "lr_schedule", "trainer", "pipeline", "world", "checkpoint")

# Pages that say more.
MORE = {
    "run_name": "[Names](configuration.md#names)",
    "resume": "[Resuming](checkpoints.md#resuming)",
    "init_from": "[Initial weights](weights.md#initial-weights)",
    "callbacks": "[Callbacks](callbacks.md)",
    "allow_targets": "[Own models](project.md)",
    "pipeline.schedule": "[Schedules](schedules.md)",
    "pipeline.split": "[Splitting](splitting.md)",
    "world.stall_s": "[Reliability](reliability.md#hangs)",
    "world.shard": "[Memory](memory-replicas.md)",
    "trainer.loss": "[The loss](losses.md)",
    "trainer.eval_first": "[Evaluations that fail](reliability.md#evaluations-that-fail)",
}


def texts_of(kind: type) -> dict[str, str]:
    """Returns the docstring of each field of a dataclass, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    found, name = {}, ""
    for statement in body:
        if isinstance(statement, ast.AnnAssign):
            name = ast.unparse(statement.target)
        elif name and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            found[name] = one_line(str(statement.value.value))
    return found


def one_line(text: str) -> str:
    """Returns the text of a key on one line, with the values as YAML has them."""
    text = " ".join(text.split()).rstrip(".")
    for word, of_yaml in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"\b{word}\b", of_yaml, text)
    return text


def keys() -> Iterator[tuple[str, str, Any, str]]:
    """Yields group, name, type and text of every key; the group is "" for keys of the run."""
    own = texts_of(Config)
    for name, kind in get_type_hints(Config).items():
        if name not in groups():
            yield "", name, kind, own.get(name, "")
    for group, schema in groups().items():
        texts: dict[str, str] = {}
        for options, taken in schema.taken.items():
            found = texts_of(options)
            texts |= {key: found[name] for name, key in taken.items()}
        texts |= texts_of(schema) | {key: one_line(text) for key, text in schema.texts.items()}
        hints = get_type_hints(schema)
        for each in fields(schema):  # type: ignore[arg-type]
            # a tracker is true, false or its arguments, for which OmegaConf has no type
            kind = bool | dict if each.name in schema.texts else hints[each.name]
            yield group, each.name, kind, texts.get(each.name, "")
    for name, text in texts_of(LoaderOptions).items():
        if name in LOADER_OPTIONS:
            yield "data", name, get_type_hints(LoaderOptions)[name], text


def with_comments(path: Path, texts: dict[str, str]) -> str:
    """Returns a YAML file of a group with the text of each of its keys behind it."""
    lines = []
    for line in path.read_text().splitlines():
        found = re.match(r"(\w+): ([^#]*[^# ])( +#.*)?$", line)
        text = texts.get(found[1], "") if found else ""
        lines.append(f"{found[1]}: {found[2]} # {plain(text)}" if found and text else line)
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Returns the first sentence of a text, as a comment shows it."""
    return text.partition(". ")[0].replace("`", "")


def page(all_keys: list[tuple[str, str, Any, str]]) -> str:
    """Returns docs/options.md: tables of the run's keys, and of each group and its options."""
    config: Any = OmegaConf.to_container(OmegaConf.structured(compose_config([])))
    config |= {"recipe": None, "run_name": None}  # as on the command line; composed: `run`
    files = {
        group: sorted((ROOT / "configs" / group).glob("*.yaml")) for group in groups_of(config)
    }
    parts = [INTRODUCTION[""]]
    for group in ["", *files]:
        rows = [
            (f"{group}.{name}".strip("."), type_name(kind), value, text)
            for of_group, name, kind, text in all_keys
            if of_group == group and (group or name not in files)
            for value in [((config[group] if group else config) or {}).get(name)]
        ]
        parts += [f"## {group}", INTRODUCTION.get(group, "")] if group else []
        parts += [table(rows)] if rows else []
        shared = {key for key, *_ in rows}
        for path in files.get(group, ()):
            own = [row for row in rows_of_option(path) if row[0] not in shared]
            if path.stem != "default" and (own or comment_of(path)):
                parts += [f"### {group}={path.stem}", comment_of(path), table(own) if own else ""]
    return "\n\n".join(part for part in parts if part) + "\n"


def groups_of(config: dict[str, Any]) -> list[str]:
    """Returns the groups, those that a recipe begins with first."""
    found = {path.name for path in (ROOT / "configs").iterdir() if path.name in config}
    return [*FIRST, *sorted(found.difference(FIRST))]


def table(rows: list[tuple[str, str, Any, str]]) -> str:
    """Returns a table of keys in Markdown."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, text in rows:
        shown = json.dumps(default) if isinstance(default, bool | None) else default
        more = f". See {MORE[key]}" if key in MORE else ""
        lines.append(f"| `{key}` | {kind} | `{shown}` | {text}{more} |".replace("|  |", "| |"))
    return "\n".join(lines)


def rows_of_option(path: Path) -> Iterator[tuple[str, str, Any, str]]:
    """Yields key, type, default and text of an option's file, the text from its comments."""
    values = yaml.safe_load(path.read_text()) or {}
    comments = dict(re.findall(r"^(\w+): [^#\n]*# (.*)$", path.read_text(), re.M))
    values.pop("defaults", None)
    target = locate(values.pop("_target_", ""))
    ours = callable(target) and target.__module__.startswith("hybridtrain")
    hints = get_type_hints(target) if ours else {}
    for name, value in values.items():
        kind = hints.get(name, type(value))
        yield f"{path.parent.name}.{name}", type_name(kind), value, comments.get(name, "")


def comment_of(path: Path) -> str:
    """Returns the comment that an option's file begins with."""
    lines = re.match(r"(?:#.*\n)*", path.read_text())
    return re.sub(r"^# ?", "", lines[0], flags=re.M).strip() if lines else ""


def type_name(kind: Any) -> str:
    """Returns a type in the words of YAML; null may stand for any of them."""
    names = {str: "text", float: "number", int: "int", bool: "bool", Any: "any"}
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    found = []
    for part in parts:
        origin = get_origin(part) or part
        sequence = origin in (list, tuple, Sequence)
        found.append(names.get(part, "list" if sequence else "mapping"))
    return " or ".join(n for n, part in zip(found, parts, strict=True) if part is not type(None))


def schema(all_keys: list[tuple[str, str, Any, str]]) -> str:
    """Returns the JSON schema of a recipe, which an editor completes and checks keys by."""
    root: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    defaults = "The option of each group, such as override /model: gpt"
    root["properties"]["defaults"] = {"type": "array", "description": defaults}
    for group, name, kind, text in all_keys:
        at = root
        if group:
            is_open = group in ("data", "monitor")  # to arguments, or names of the user's own
            made = {"type": "object", "properties": {}, "additionalProperties": is_open}
            at = root["properties"].setdefault(group, made)
            at.setdefault("properties", {})
        at["properties"][name] = {**json_type(kind), "description": text.replace("`", "")}
    return (
        json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **root}, indent=1) + "\n"
    )


def json_type(kind: Any) -> dict[str, Any]:
    """Returns the JSON schema of a type; a `${...}` may stand for any value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    kinds = getattr(kind, "__args__", (kind,))
    found = [names[one] for one in kinds if one in names]
    return {"type": sorted({*found, "string"})} if len(found) == len(kinds) else {}


def main(check: bool) -> int:
    """Writes the files, or checks them; returns 1 where that fails."""
    all_keys = list(keys())
    if missing := [f"{group}.{name}" for group, name, _, text in all_keys if not text]:
        print(f"keys without a text: {', '.join(missing)}")
        return 1
    wanted = {PAGE: page(all_keys), SCHEMA: schema(all_keys)}
    for group in {group for group, *_ in all_keys}:
        path = ROOT / "configs" / group / "default.yaml" if group else ROOT / "configs/config.yaml"
        if path.exists():
            texts = {name: text for own, name, _, text in all_keys if own == group}
            wanted[path] = with_comments(path, texts)
    for name in TRACKERS:  # `monitor=[name]`; one with arguments lists them in its file
        path = ROOT / f"configs/monitor/{name}.yaml"
        wanted.setdefault(path, path.read_text() if path.exists() else f"{name}: true\n")
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what its docstrings say: run scripts/options.py")
        if not check:
            path.write_text(wanted[path])
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
