"""An estimator's `distribution` as what it means here: a torchrun line and a configuration."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridtrain.errors import ConfigError
from hybridtrain.smp.config import ENVIRONMENT, NO_MEANING, SmpConfig, parameters_of, parse

_MPI = "MPI is not used: torchrun starts the processes"


@dataclass(frozen=True)
class LaunchConfig:
    """The start of a script: processes, variables and the library's configuration.

    Attributes:
        config: of the library.
        parameters: of the library, as `smp.init` takes them.
        nodes: how many.
        processes_per_node: on each of them.
        environment: variables for all processes.
        notes: the keys without a meaning here, with the reason.
    """

    config: SmpConfig
    parameters: dict[str, Any]
    nodes: int
    processes_per_node: int
    environment: dict[str, str]
    notes: dict[str, str]

    @property
    def replicas(self) -> int:
        """The number of copies of the model."""
        per_replica = 1
        if self.config.engine == "distributed":
            per_replica = self.config.pipeline_parallel_degree
        return self.nodes * self.processes_per_node // per_replica

    def command(self, script: str = "train.py") -> str:
        """Returns what to type on each node."""
        variables = {ENVIRONMENT: json.dumps(self.parameters, sort_keys=True), **self.environment}
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        words.append("torchrun")
        if self.nodes == 1:
            words.append("--standalone")
        else:
            words += [f"--nnodes={self.nodes}", "--rdzv-backend=c10d", "--rdzv-id=smp"]
            words.append("--rdzv-endpoint=<first node>:29500")
        words += [f"--nproc-per-node={self.processes_per_node}", shlex.quote(script)]
        return " ".join(words)

    def overrides(self) -> list[str]:
        """Returns the overrides of the command line `hybridtrain` that mean the same."""
        config, options = self.config, self.config.options(0)
        found = {
            "pipeline.nb_part": config.pipeline_parallel_degree,
            "pipeline.chunks": options.chunks,
            "pipeline.schedule": options.schedule,
            "pipeline.split": "balanced" if config.auto_partition else "manual",
            "pipeline.memory_weight": options.memory_weight if config.auto_partition else None,
            "pipeline.default_partition": options.default_partition,
            "pipeline.max_inflight": options.max_inflight,
            "trainer.precision": options.precision if options.precision != "fp32" else None,
            "world.engine": config.engine,
            "world.shard": options.shard if options.shard != "none" else None,
            "world.inner": config.inner if config.inner != "pp" else None,
            "world.backend": None if config.ddp_dist_backend == "auto" else config.ddp_dist_backend,
        }
        return [f"{key}={value}" for key, value in found.items() if value is not None]


def config_from_distribution(
    distribution: Mapping[str, Any], instance_count: int = 1
) -> LaunchConfig:
    """Returns how a script with this `distribution` of an estimator is started here.

    Args:
        distribution: the dictionary `{"smdistributed": {...}, "mpi": {...}}`.
        instance_count: of the estimator: the number of nodes.

    Raises:
        ConfigError: a key is unknown or refused, or the numbers do not fit together.
    """
    for key in distribution:
        if key not in ("smdistributed", "mpi", "torch_distributed", "instance_count"):
            raise ConfigError(
                f"distribution has {key!r}: it must have smdistributed and mpi, as for the model "
                f"parallel library"
            )
    if "smdistributed" not in distribution:
        raise ConfigError('distribution has no "smdistributed": {"modelparallel": {...}}')
    instance_count = int(distribution.get("instance_count", instance_count))
    library = distribution["smdistributed"]
    if isinstance(library, Mapping) and "dataparallel" in library:
        raise ConfigError(
            "smdistributed.dataparallel cannot be used together with modelparallel: leave it out"
        )
    given = dict(parameters_of(distribution))
    config = parse(given)
    notes = {key: why for key, why in NO_MEANING.items() if key in given}
    mpi = distribution.get("mpi", {})
    processes, environment = _mpi(mpi, notes)
    if processes is None:
        processes = config.pipeline_parallel_degree if config.engine == "distributed" else 1
    degree = config.pipeline_parallel_degree if config.engine == "distributed" else 1
    if instance_count < 1 or (instance_count * processes) % degree:
        raise ConfigError(
            f"instance_count={instance_count} x mpi.processes_per_host={processes} are "
            f"{instance_count * processes} processes, which pipeline_parallel_degree={degree} does "
            f"not divide: change one of them"
        )
    meant = {key: value for key, value in given.items() if key not in NO_MEANING}
    if "memory_weight" not in given and given.get("optimize") == "speed":
        meant["memory_weight"] = config.memory_weight
    return LaunchConfig(config, meant, instance_count, processes, environment, notes)


def _mpi(mpi: Mapping[str, Any], notes: dict[str, str]) -> tuple[int | None, dict[str, str]]:
    """Returns the processes of a node, and the variables that `mpirun -x` would pass on."""
    known = ("enabled", "processes_per_host", "custom_mpi_options")
    for key in mpi:
        if key not in known:
            raise ConfigError(f"mpi.{key} is unknown: the keys are {', '.join(known)}")
    processes = mpi.get("processes_per_host")
    if processes is not None and (type(processes) is not int or processes < 1):
        raise ConfigError(f"mpi.processes_per_host={processes!r} must be 1 or more")
    if "enabled" in mpi:
        notes["mpi.enabled"] = _MPI
    environment: dict[str, str] = {}
    words = iter(shlex.split(mpi.get("custom_mpi_options") or ""))
    rest = []
    for word in words:
        if word != "-x":
            rest.append(word)
            continue
        name, _, value = next(words, "").partition("=")
        if value:
            environment[name] = value
        else:
            notes[f"mpi.custom_mpi_options: -x {name}"] = "torchrun hands on the environment itself"
    if rest:
        notes[f"mpi.custom_mpi_options: {' '.join(rest)}"] = _MPI
    return processes, environment
