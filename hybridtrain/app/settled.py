"""The last steps to a config that can be built: the keys of targets, the values of rank 0."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hybridtrain.app import instantiate
from hybridtrain.app.config import GROUP_KEYS, LOADER_KEYS, Config
from hybridtrain.app.settings import Settings
from hybridtrain.errors import ConfigError
from hybridtrain.world import World


def leave_out_leftovers(settings: Settings) -> None:
    """Removes the keys that were written for a `_target_` that has been replaced; notes each.

    Raises:
        ConfigError: a target is not allowed or does not exist.
    """
    allow = settings.config.allow_targets
    for group, leftovers in settings.leftovers.items():
        values: dict[str, Any] = getattr(settings.config, group)
        kept = (*LOADER_KEYS, *GROUP_KEYS, "warmup_steps")
        if "warmup_steps" in leftovers and (warmup := values.get("warmup_steps")):
            settings.notes.append(
                f"{group}.warmup_steps={warmup} is kept, in front of {values['_target_']}: to "
                f"leave it out, set {group}.warmup_steps=0"
            )
        names = [name for name in leftovers if name not in kept]
        for name in instantiate.not_taken(group, values, names, allow):
            if (value := values.pop(name, None)) is not None:
                settings.notes.append(
                    f"{group}.{name}={value} is left out: {values['_target_']} does not take it"
                )


def agreed(config: Config, world: World) -> Config:
    """Returns rank 0's config, which has seen the run directory; a collective call.

    Raises:
        ConfigError: a setting that was needed to join the processes is another one here or there.
    """
    configs = world.gather(config)
    for rank, other in enumerate(configs):
        one, two = (
            {"pipeline.nb_part": c.pipeline.nb_part}
            | {f"world.{key}": value for key, value in asdict(c.world).items()}
            for c in (configs[0], other)
        )
        for key in one:
            if one[key] != two[key]:
                raise ConfigError(
                    f"{key} is {one[key]} on rank 0 and {two[key]} on rank {rank}, which does not "
                    f"see the run directory: say {key}= on the command line"
                )
    return configs[0]
