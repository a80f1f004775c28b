"""One config for all processes: rank 0's."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from hybridtrain.cli.config.schema import Config
from hybridtrain.errors import ConfigError

if TYPE_CHECKING:
    from hybridtrain.world import World


def agreed(config: Config, world: World) -> Config:
    """Returns rank 0's config, which includes the run directory's; a collective call.

    Raises:
        ConfigError: a setting for joining the processes differs across ranks.
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
                    f"{key} is {one[key]} on rank 0 but {two[key]} on rank {rank}, which does not "
                    f"see the run directory: set {key}= on the command line"
                )
    return configs[0]
