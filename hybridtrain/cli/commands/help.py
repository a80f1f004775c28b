"""The help of the command line, from the table of commands and the schema of the config."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from importlib.resources import files

from hybridtrain.cli.command_table import COMMANDS, FLAGS, listed

WIDTH = 79


def overview() -> str:
    """Returns the help of the command line as a whole."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: hybridtrain <command> [key=value ...]",
        "",
        *_wrapped("Train PyTorch models with pipeline and data parallelism.", ""),
        "",
        "commands:",
    ]
    for name, command in COMMANDS.items():
        lines += _wrapped(command.summary, f"  {name:<{width}}  ")
    lines += [
        "",
        "examples:",
        "  hybridtrain recipe=digits                  train (the default command)",
        "  hybridtrain recipe=digits --cfg job        show every key of that run",
        "  hybridtrain <command> --help               describe a command and its keys",
        "  torchrun --standalone --nproc-per-node 2 -m hybridtrain recipe=digits",
        "",
        "options of each group, as in optim=sgd:",
    ]
    for group, options in _options():
        lines += _wrapped(", ".join(options), f"  {group}: ", indent=4)
    return "\n".join(lines)


def help_of(name: str) -> str:
    """Returns the help of one command."""
    command = COMMANDS[name]
    lines = [f"usage: hybridtrain {name} {command.usage}".rstrip(), ""]
    lines += [*_wrapped(command.text.replace("`", ""), ""), ""]
    if command.keys:
        lines.append(f"keys of {name}:")
        schema = json.loads((files("hybridtrain.configs") / "schema.json").read_text())
        for key in command.keys:
            entry = schema["properties"][key]
            is_group = "properties" in entry and key == command.keys[0]
            for inner, value in (entry["properties"] if is_group else {"": entry}).items():
                text = value.get("description", "").replace("`", "")
                whole = f"{key}.{inner}".rstrip(".")
                lines += [f"  {whole}=", *_wrapped(text, " " * 6)]
        of_run = (
            f"{name} also reads all keys of a run, such as trainer.steps= and data.batch_size=; "
        )
        if command.of_run is not None:
            of_run = f"{name} also reads these keys of a run: {listed(command.of_run)}; "
        lines += [
            "",
            *_wrapped(f"{of_run}hybridtrain {name} --cfg job lists them.", ""),
            "",
        ]
    if command.flags:
        lines.append("flags:")
        width = max(map(len, command.flags))
        for flag in command.flags:
            lines += _wrapped(FLAGS[flag], f"  {flag:<{width}}  ")
        lines.append("")
    lines.append("example:" if len(command.examples) == 1 else "examples:")
    lines += [f"  {example}" for example in command.examples]
    return "\n".join(lines)


def _options() -> Iterator[tuple[str, list[str]]]:
    """Yields each group with the names of its options, recipes first."""
    folder = files("hybridtrain.configs")
    groups = sorted(entry.name for entry in folder.iterdir() if (folder / entry.name).is_dir())
    for name in ("recipe", *groups):
        place = files("hybridtrain.recipes") if name == "recipe" else folder / name
        options = [entry.name for entry in place.iterdir() if entry.name.endswith(".yaml")]
        others = sorted(option.removesuffix(".yaml") for option in options)
        if others and others != ["default"]:
            yield name, others


def _wrapped(text: str, head: str, indent: int | None = None) -> list[str]:
    """Returns `text` as lines, the first one after `head`, the others indented to match."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * (len(head) if indent is None else indent),
        break_on_hyphens=False,
        break_long_words=False,
    ) or [head.rstrip()]
