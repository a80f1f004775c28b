"""Removes keys written for a `_target_` that was replaced.

With `model=gpt` and a recipe for another model, Hydra merges the recipe's model arguments into the
new group. Arguments that the new target does not accept are removed with a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from hybridtrain.cli.config.overrides import given_keys
from hybridtrain.cli.config.schema import (
    AUTO,
    GROUP_KEYS,
    LOADER_KEYS,
    OPEN_GROUPS,
    WARMUP_KEYS,
    WRAPPER_KEYS,
)
from hybridtrain.cli.config.targets import not_taken

if TYPE_CHECKING:
    from hybridtrain.cli.config.resolve import Settings


def leftovers_of(
    tree: Mapping[str, Any], overrides: Sequence[str], recipe: str | None
) -> dict[str, list[str]]:
    """Returns, for each open group, the keys that were not written for its `_target_`."""
    of_recipe: Mapping[str, Any] = {}
    if recipe is not None:
        store = ConfigStore.instance()
        if f"{recipe}.yaml" in store.repo["recipe"]:
            recipe_node = store.load(f"recipe/{recipe}.yaml").node
            of_recipe = cast(dict[str, Any], OmegaConf.to_container(recipe_node))
    keys = given_keys(overrides)
    leftovers = {}
    for group in OPEN_GROUPS:
        names = {key.split(".")[1] for key in keys if key.startswith(f"{group}.")}
        in_recipe = of_recipe.get(group)
        if group in keys and isinstance(in_recipe, dict) and "_target_" not in names:
            # the recipe's keys for the option that was replaced
            leftovers[group] = [key for key in in_recipe if key not in names]
            continue
        if "_target_" not in names:
            if not isinstance(in_recipe, dict) or "_target_" not in in_recipe or group in keys:
                continue
            names |= set(in_recipe)
        leftovers[group] = [key for key in tree.get(group) or {} if key not in names]
    return leftovers


def leave_out_leftovers(settings: Settings) -> None:
    """Removes the keys written for a `_target_` that was replaced, with a note for each.

    Raises:
        ConfigError: a target is not allowed or does not exist.
    """
    allow = settings.config.allow_targets
    for group, leftovers in settings.leftovers.items():
        values: dict[str, Any] = getattr(settings.config, group)
        shared = (*LOADER_KEYS, *GROUP_KEYS, *WRAPPER_KEYS, *WARMUP_KEYS)
        settings.notes += [
            f"keeping {group}.{key}={warmup} before {values['_target_']}; "
            f"{group}.{key}=0 turns it off"
            for key in WARMUP_KEYS
            if key in leftovers and (warmup := values.get(key))
        ]
        names = [name for name in leftovers if name not in shared]
        for name in not_taken(group, values, names, allow):
            if (value := values.pop(name, None)) not in (None, AUTO):
                settings.notes.append(
                    f"ignoring {group}.{name}={value}: {values['_target_']} does not accept it"
                )
