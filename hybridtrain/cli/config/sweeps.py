"""The runs of a sweep, one list of overrides per run."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException

from hybridtrain.cli.config.compose import CONFIG_MODULE, SEARCH_PATH, with_search_path
from hybridtrain.cli.config.option_files import register
from hybridtrain.cli.config.overrides import unreadable, with_texts
from hybridtrain.errors import ConfigError


def sweep_choices(overrides: Sequence[str], config_dir: str | None = None) -> list[list[str]]:
    """Returns the overrides of each run of a sweep such as `optim.lr=1e-3,1e-2`.

    Raises:
        ConfigError: an override cannot be parsed or swept.
    """
    register()
    search_path = [o for o in overrides if o.lstrip("+").startswith(SEARCH_PATH)]
    if config_dir is not None:
        search_path = with_search_path(search_path, config_dir)
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            compose("config", overrides=search_path, return_hydra_config=True)
            loader = GlobalHydra.instance().config_loader()
            parser = OverridesParser.create(config_loader=loader)
            parsed = parser.parse_overrides(with_texts(overrides))
            for override in parsed:
                key, glob = override.key_or_group, override.value()
                if isinstance(glob, Glob) and not glob.filter(loader.get_group_options(key)):
                    raise ConfigError(
                        f"{override.input_line}: glob() selects options of a group, as in "
                        f"optim=glob(*), but no option of {key} matches; list the values: "
                        f"{key}=value1,value2"
                    )
                if override.is_interval_sweep():
                    raise ConfigError(
                        f"{override.input_line}: interval() works only in a search; a sweep runs "
                        f"every value: list them, {key}=1e-4,1e-3, or write {key}=range(1,4)"
                    )
                if str(override.input_line).endswith("="):
                    raise ConfigError(
                        f"{override.input_line} has no value: write {key}=null, or a list of "
                        f"values, {key}=value1,value2"
                    )
            # Not through hydra.main, because its jobs cannot compose further configs.
            return [list(choice) for choice in BasicSweeper.split_arguments(parsed, None)[0]]
        except HydraException as error:
            line = unreadable(overrides) or " ".join(str(error).split())
            raise ConfigError(line) from error
