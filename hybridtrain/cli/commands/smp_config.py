"""The command `smp-config`: translates an estimator's `distribution` into a torchrun command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hybridtrain._base.text_table import text_table
from hybridtrain.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{message}; usage: hybridtrain smp-config distribution.json [--instance-count N] "
            f"[--script train.py]"
        )


def smp_config(arguments: Sequence[str]) -> int:
    """Prints the command that starts a script with this `distribution`; returns the exit code.

    Args:
        arguments: the words of the command line: a JSON file and flags.

    Raises:
        ConfigError: the file cannot be read, or a setting in it is not supported.
    """
    parser = _Parser(
        prog="hybridtrain smp-config",
        description="Translate an estimator's distribution={...} of SageMaker's model parallel "
        "library 1.x.",
    )
    parser.add_argument("distribution", help="a JSON file with the dictionary")
    parser.add_argument(
        "--instance-count", type=int, default=1, help="the estimator's instance_count"
    )
    parser.add_argument("--script", default="train.py", help="the estimator's entry_point")
    parsed = parser.parse_args(list(arguments))
    distribution = _read(Path(parsed.distribution))

    from hybridtrain.smp import config_from_distribution  # with torch, which takes a second

    try:
        launch = config_from_distribution(distribution, parsed.instance_count)
    except ConfigError as error:
        raise ConfigError(f"{parsed.distribution}: {error}") from error
    where = "" if launch.nodes == 1 else ", on each node"
    lines = [
        f"{launch.nodes} x {launch.processes_per_node} processes, {launch.replicas} replicas of "
        f"{launch.config.pipeline_parallel_degree} stages",
        "",
        f"the script, with `import hybridtrain.smp as smp`{where}:",
        f"  {launch.command(parsed.script)}",
    ]
    if launch.notes:
        table = [("key", "why it has no effect here"), *launch.notes.items()]
        lines += ["", *text_table(table, 0)]
    print("\n".join(line.rstrip() for line in lines))
    return 0


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not JSON: {error}. In JSON, True is written true, and strings have double "
            f"quotes"
        ) from error
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path} must contain a dictionary")
    return document
