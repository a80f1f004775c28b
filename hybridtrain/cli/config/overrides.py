"""Overrides such as `optim.lr=0.1`: Hydra's grammar, their keys, and quotes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from hybridtrain._base.files import read_file, reading
from hybridtrain._base.yaml_text import check_expansion
from hybridtrain.cli.config.schema import WRAPPER_KEYS, text_keys
from hybridtrain.errors import ConfigError


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Returns `overrides` as parsed by Hydra.

    Raises:
        ConfigError: one of them cannot be parsed.
    """
    try:
        parsed: list[Override] = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(unreadable(overrides) or " ".join(str(error).split())) from error
    return parsed


def unreadable(overrides: Sequence[str]) -> str | None:
    """Returns the error of the first override that Hydra cannot parse."""
    for override in overrides:
        try:
            OverridesParser.create().parse_override(override)
        except HydraException as error:
            return f"cannot parse the override {override!r}: {first_line(error)}{_quoted(override)}"
    return None


def _quoted(override: str) -> str:
    """Returns a hint to quote a string, or a list of strings, with Hydra's special characters.

    It is empty if quotes around the value do not fix the override.
    """
    key, sign, value = override.partition("=")
    forms = [f"{key}={hydra_quoted(value)}"]
    if listed := re.fullmatch(r"\[([^\[\]\"']+)\]", value):
        texts = ", ".join(f'"{text.strip()}"' for text in listed[1].split(","))
        forms.insert(0, f"{key}=[{texts}]")
    for form in forms if sign and value else ():
        with suppress(HydraException):
            OverridesParser.create().parse_override(form)
            return f"; strings with spaces or special characters need quotes: {shell_quoted(form)}"
    return ""


def hydra_quoted(text: str) -> str:
    """Returns `text` as a value that Hydra always parses as a string."""
    is_value = text.lower() in ("null", "true", "false", "nan", "inf")
    if re.fullmatch(r"[A-Za-z][\w./-]*", text, re.ASCII) and not is_value:
        return text
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + "'"


def shell_quoted(word: str) -> str:
    """Returns a word quoted for a shell, in double quotes if it contains single ones."""
    if "'" in word and not set('"$`\\!') & set(word):
        return f'"{word}"'
    return shlex.quote(word)


def with_texts(overrides: Sequence[str]) -> list[str]:
    """Returns overrides with string values for string keys: `run_name=1e3`, not 1000.0.

    Overrides that cannot be parsed stay unchanged.
    """
    return [
        _with_text(o) if o.partition("=")[0].lstrip("+") in text_keys() else o for o in overrides
    ]


def refuse_empty_texts(overrides: Sequence[str]) -> None:
    """Refuses `run_name=` and the like, as an unset variable of a shell writes it.

    Raises:
        ConfigError: names the first such key.
    """
    for override in overrides:
        key, sign, value = override.lstrip("+").partition("=")
        is_text = key in text_keys() or key.startswith(("data.", "model."))
        if sign and not value and is_text:
            raise ConfigError(f"{override} has no value: set one, or leave the key out")


def as_hydra_takes_them(overrides: Sequence[str]) -> list[str]:
    """Returns overrides that may set what Hydra alone could not.

    - A wrapper's setting, as in `model.lora.rank=8`: the wrapper is null unless a recipe sets it,
      and Hydra cannot set keys of a null value.
    - Metrics with arguments, as in `trainer.metrics={rouge: {max_new_tokens: 32}}`: a recipe has a
      list of names, and Hydra cannot merge a mapping into a list.
    """
    begins = re.compile(rf"model\.({'|'.join(WRAPPER_KEYS)})\.")
    taken: list[str] = []
    for override in overrides:
        if override.startswith("trainer.metrics={"):
            taken.append("trainer.metrics=null")
        taken.append(f"++{override}" if begins.match(override) else override)
    return taken


def _with_text(override: str) -> str:
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return override
    key, _, text = override.partition("=")
    value, texts = parsed.value(), [text]
    values = [value]
    if isinstance(value, ChoiceSweep) and value.simple_form:
        values, texts = value.list, text.split(",")
    if len(values) != len(texts) or not any(isinstance(v, int | float) for v in values):
        return override
    quoted = [
        f"'{t.strip()}'" if isinstance(v, int | float) else t
        for v, t in zip(values, texts, strict=True)
    ]
    return f"{key}={','.join(quoted)}"


def given_keys(overrides: Sequence[str]) -> list[str]:
    """Returns the keys and groups that `overrides` set, without their `+`, `++` and `~`."""
    return [override.partition("=")[0].lstrip("+~") for override in overrides]


def given_recipe(overrides: Sequence[str]) -> str | None:
    """Returns the recipe that `overrides` name, as written there.

    Raises:
        ConfigError: they name several.
    """
    named = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+") == "recipe" and value not in ("", "null"):
            named.append(value)
    if len(named) > 1:
        raise ConfigError(
            f"recipe= is given twice, as {named[0]} and {named[1]}: remove one of them"
        )
    return named[0] if named else None


def with_later(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """Returns the overrides of two commands; `later` replaces keys and groups of `earlier`."""
    keys = given_keys(later)
    remains = [not any(f"{k}.".startswith(f"{key}.") for key in keys) for k in given_keys(earlier)]
    return [*compress(earlier, remains), *later]


def read_overrides(run: Path) -> list[str]:
    """Returns the overrides in a run's `overrides.yaml`; none if there is no such file.

    Raises:
        DataError: it cannot be read.
    """
    path = run / "overrides.yaml"
    with reading(path):
        try:
            check_expansion(read_file(path).decode())
            words = OmegaConf.to_container(OmegaConf.load(path))
        except FileNotFoundError:
            return []
        if not isinstance(words, list):
            raise TypeError("not a list")
    return [str(word) for word in words]


def first_line(error: BaseException) -> str:
    """Returns the first line of a Hydra or OmegaConf message; the other lines repeat the key."""
    return str(error).strip().splitlines()[0]
