"""Turns an error of Hydra or OmegaConf into one line with a suggestion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import BooleanNode, FloatNode, IntegerNode, ListConfig, OmegaConf, StringNode
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from hybridtrain.cli.config.keys import unknown_key
from hybridtrain.cli.config.overrides import first_line, shell_quoted, unreadable
from hybridtrain.cli.config.schema import OPEN_GROUPS, Config
from hybridtrain.cli.config.tree import flat_keys, to_config
from hybridtrain.errors import closest, did_you_mean


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """Returns one line with the error of Hydra or OmegaConf, and how to fix it."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, MissingConfigException):
            group, _, chosen = (cause.missing_cfg_file or "").lstrip("/").rpartition("/")
            if group == "submit" and (size := re.fullmatch(r"(\d+)x(\d+)", chosen)):
                return (
                    f"submit={chosen} is unknown: for {size[1]} nodes of {size[2]} GPUs, set "
                    f"submit.nodes={size[1]} submit.gpus_per_node={size[2]}"
                )
            # `options` includes a project's
            options = cause.options or GlobalHydra.instance().config_loader().get_group_options(
                group
            )
            return f"{group}={chosen} is unknown: {did_you_mean(chosen, options)}"
    machine = [override for override in overrides if override.startswith("hardware.")]
    if machine and "NoneType" in str(error):  # the group is null
        return f"{machine[0]} needs a machine to change: also set hardware=, such as hardware=h100"
    return (
        _wrong_override(error, overrides)
        or _unknown_group(error)
        or _unknown_key(causes, overrides)
        or _wrong_value(causes)
        or " ".join(str(error).split())
    )


def _wrong_override(error: Exception, overrides: Sequence[str]) -> str | None:
    """Looks for an override that is malformed, or sets a group to a value."""
    loader = GlobalHydra.instance().config_loader()
    for override in overrides:
        if problem := unreadable([override]):
            return problem
        key, _, value = override.partition("=")
        if not key:
            return f"cannot parse the override {override!r}: there is no key before the ="
        if OverridesParser.create().parse_override(override).is_sweep_override():
            listed = shell_quoted(f"{key}=[{value}]")
            return f"{override}: write a list as {listed}; to run with each value, add --multirun"
        if key.startswith("+") and key.lstrip("+") in _groups():
            return f"{override}: {key.lstrip('+')} already exists; write {override.lstrip('+')}"
        options = loader.get_group_options(key)
        if type(error) is ValueError and options and value not in options:  # a number, say
            return f"{override} is unknown: {did_you_mean(value, options)}"
    return None


def _unknown_group(error: Exception) -> str | None:
    if unknown := re.search(r"In '(.+)': Could not override '([^@']+)", str(error)):
        groups = GlobalHydra.instance().config_loader().list_groups("")
        close = closest(unknown[2].removeprefix("recipe/"), groups)
        hint = f"; did you mean 'override /{close}'?" if close else ""
        return f"{unknown[1]}: there is no group {unknown[2]} in the defaults list{hint}"
    return None


def _unknown_key(causes: Sequence[BaseException], overrides: Sequence[str]) -> str | None:
    known = _known_keys(overrides)
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~").partition("@")[0]
        if not key or not known or key in known or key.startswith("hydra."):
            continue
        open_group = key.partition(".")[0] in OPEN_GROUPS and "." in key
        if open_group and override.startswith("+"):
            continue  # an argument of the target, which may be added
        hint = ""
        if open_group and not override.startswith("~"):
            hint = f" (If your own function takes this key: +{override})"
        return unknown_key(key, known) + hint
    for cause in causes:
        if isinstance(cause, ConfigKeyError) and cause.full_key:
            return unknown_key(cause.full_key, known)
    return None


# What a key of the schema takes, by the class of its node.
_KINDS: dict[type[Any], str] = {
    IntegerNode: "a whole number",
    FloatNode: "a number",
    BooleanNode: "true or false",
    StringNode: "a text",
    ListConfig: "a list, such as [a,b]",
}


def _wrong_value(causes: Sequence[BaseException]) -> str | None:
    for cause in causes:
        if not isinstance(cause, OmegaConfBaseException) or not cause.full_key:
            continue
        node = cause.child_node
        if not isinstance(cause, ValidationError) or node is None or type(node) not in _KINDS:
            return f"{cause.full_key}: {first_line(cause)}"
        value = "null" if cause.value is None else cause.value
        whole = isinstance(value, float) and value.is_integer() and type(node) is IntegerNode
        example = f", such as {int(value)}" if whole else ""
        null = ", or null" if node._is_optional() else ""
        return f"{cause.full_key}={value} must be {_KINDS[type(node)]}{example}{null}"
    return None


def _known_keys(overrides: Sequence[str]) -> list[str]:
    """Returns the config's keys and groups, composed from the overrides that select options."""
    groups = [group for group in _groups() if group != "schema"]
    groups.append("hydra.searchpath")  # a project's options
    choices = [o for o in overrides if o.partition("=")[0].lstrip("+") in groups]
    try:
        composed = compose("config", overrides=choices)
        to_config(cast(dict[str, Any], OmegaConf.to_container(composed)))
    except (HydraException, OmegaConfBaseException):
        composed = compose("config")
    tree = OmegaConf.to_container(composed)
    return [*flat_keys(cast(dict[str, Any], tree)), "recipe"]


def _groups() -> list[str]:
    return [*(f.name for f in fields(Config)), "recipe"]
