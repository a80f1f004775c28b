"""Writes what keys mean wherever it is told, from one text: `python scripts/options.py [--check]`.

The text is the docstring of the field, in the option class that the key is taken from; a key of the
command line alone has it in `hybridtrain/app/config.py`. From it come the comments in `configs/`,
the tables of docs/configuration.md and a JSON schema for editors and for `--cfg job`,
configs/schema.json. `--check` writes nothing and fails where a file is not what it should be.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from hybridtrain.app.config import LOADER_OPTIONS, Config, groups
from hybridtrain.options import LoaderOptions

ROOT = Path(__file__).resolve().parents[1]
PAGE, SCHEMA = ROOT / "docs/configuration.md", ROOT / "configs/schema.json"

# Pages that say more.
MORE = {
    "run_name": "[Names](#names-and-sweeps)",
    "resume": "[Resuming](checkpoints.md#resuming)",
    "init_from": "[Checkpoints](checkpoints.md#initial-weights)",
    "callbacks": "[Callbacks](guide.md#callbacks)",
    "allow_targets": "[Own models](own-models-and-data.md#from-the-command-line)",
    "pipeline.schedule": "[Backwards in two parts](performance.md#backwards-in-two-parts)",
    "pipeline.split": "[Splitting](splitting.md)",
    "world.stall_s": "[Reliability](reliability.md#hangs)",
    "world.shard": "[Performance](performance.md#memory-over-replicas)",
    "trainer.loss": "[The loss](own-models-and-data.md#the-loss)",
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
            text = " ".join(str(statement.value.value).split()).rstrip(".")
            for word, of_yaml in (("None", "null"), ("True", "true"), ("False", "false")):
                text = re.sub(rf"\b{word}\b", of_yaml, text)
            found[name] = text
    return found


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
        texts |= texts_of(schema)
        hints = get_type_hints(schema)
        for each in fields(schema):  # type: ignore[arg-type]
            yield group, each.name, hints[each.name], texts.get(each.name, "")
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
    """Returns docs/configuration.md with its rows made anew; the defaults stay."""
    texts = {f"{group}.{name}".strip("."): text for group, name, _, text in all_keys}

    def row(found: re.Match[str]) -> str:
        key = found[1]
        text = texts.get(key)
        if not text:
            return found[0]
        more = f". See {MORE[key]}" if key in MORE else ""
        return f"| `{key}` | {found[2]} | {text}{more} |"

    return re.sub(r"^\| `([\w.]+)` \| (`[^|]*`) \| (.*) \|$", row, PAGE.read_text(), flags=re.M)


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
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what its docstrings say: run scripts/options.py")
        if not check:
            path.write_text(wanted[path])
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
