"""The machines that `cluster=` may name: presets, files, and this machine as it was measured."""

from __future__ import annotations

import os
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from hybridtrain.errors import ConfigError

THIS_MACHINE = "this-machine"


def measured_file() -> Path:
    """Returns where `measure-machine` writes, and `cluster=this-machine` is read from."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hybridtrain" / f"{THIS_MACHINE}.yaml"


def register_cluster_file(override: str) -> str:
    """Registers the file of `cluster=path/to/file.yaml` and returns the override for it.

    Any other override is returned unchanged.

    Raises:
        ConfigError: it is a list or a mapping, the file cannot be read, or this machine has not
            been measured.
    """
    key, _, value = override.partition("=")
    if key.lstrip("+") != "cluster":
        return override
    if value.startswith(("[", "{")):
        raise ConfigError(
            f"cluster={value} must be the name of a machine, or the path of a YAML file with its "
            f"keys; single ones are set as cluster.nodes=2"
        )
    path = measured_file() if value == THIS_MACHINE else Path(value)
    if value == THIS_MACHINE and not path.exists():
        raise ConfigError(
            "cluster=this-machine: this machine has not been measured yet; "
            "`hybridtrain measure-machine` does it in a minute"
        )
    if path.suffix not in (".yaml", ".yml"):
        return override
    try:
        node = OmegaConf.create(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cluster={value}: {error.strerror}") from error
    except (UnicodeDecodeError, YAMLError) as error:
        raise ConfigError(f"cluster={value} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"cluster={value} must be a mapping of keys to values")
    name = f"{path.stem}-file"  # a preset of the same name would win
    ConfigStore.instance().store(group="cluster", name=name, package="cluster", node=node)
    return f"{key}={name}"
