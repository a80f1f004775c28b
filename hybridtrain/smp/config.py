"""The configuration of smp 1.x: the dictionary `parameters` of an estimator's `distribution`.

Each key of smp 1.x is listed here once, with its meaning or the reason why it has no effect.
`config_from_distribution` converts the rest of a `distribution` to a torchrun command.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hybridtrain.errors import ConfigError, Naming, check_choice, did_you_mean
from hybridtrain.options import PipelineOptions, with_settings

ENVIRONMENT = "SM_HP_MP_PARAMETERS"
"""The environment variable with the configuration, as set by SageMaker's containers."""

OWN_KEY = "hybridtrain"
"""The key of settings that smp 1.x does not have."""

SCHEDULES = {"interleaved": "1f1b", "simple": "gpipe"}

_OF_TENSOR_PARALLELISM = "it applies to tensor-parallel layers, and the degree is 1"

NO_MEANING = {
    "optimize": "it applies to tensor parallelism; here it only sets the default of memory_weight",
    "deterministic_server": "the schedule always decides the order of execution",
    "skip_tracing": "models are not traced",
    "fp16_params": "parameters are fp32; fp16=true runs the forward in fp16",
    "prescaled_batch": _OF_TENSOR_PARALLELISM,
    "contiguous": "it applies to TensorFlow; stages are always contiguous",
    "ddp": "DistributedDataParallel always averages the gradients of the replicas",
    "ddp_port": "torchrun chooses the port",
    "activation_loading_horizon": "it applies to offload_activations, which is not supported",
    "delayed_parameter_initialization": "parameters are initialized when they are created",
    "task_level_active_microbatches": "active_microbatches applies to each device",
    "static_mode": "the schedule always decides the order of execution",
    "fast_mode": "stages always send their outputs directly to the next stage",
    "checkpoint_attentions": _OF_TENSOR_PARALLELISM,
    "_match_weights": _OF_TENSOR_PARALLELISM,
    "_fp32_grad_accumulation": "gradients are always fp32",
    "tensor_parallel_seed": _OF_TENSOR_PARALLELISM,
    **dict.fromkeys(
        [
            "sdp_reduce_bucket_size",
            "sdp_param_persistence_threshold",
            "sdp_max_live_parameters",
            "sdp_hierarchical_allgather",
            "sdp_gradient_clipping",
        ],
        "it applies to sharded data parallelism, and the degree is 1",
    ),
}
"""Keys that are accepted without effect, with the reason."""

REFUSED = {
    "tensor_parallel_degree": "tensor parallelism is not supported: leave it at 1",
    "sharded_data_parallel_degree": "sharded data parallelism is not supported: leave it at 1, and "
    "use shard_optimizer_state to shard the optimizer's state over the replicas",
    "offload_activations": "offloading activations is not supported: use activation checkpointing",
    "horovod": "Horovod is not supported: DistributedDataParallel averages gradients of replicas",
    "_shard_offloaded_activations": "it applies to tensor parallelism, which is not supported",
}
"""Keys that are refused unless they have their default value, with advice."""


@dataclass(frozen=True)
class SmpConfig:
    """The validated configuration of smp 1.x.

    Raises:
        ConfigError: a value is wrong; the message names the key.
    """

    pipeline_parallel_degree: int = 1
    microbatches: int = 1
    pipeline: str = "interleaved"
    placement_strategy: str = "cluster"
    auto_partition: bool = True
    default_partition: int | None = None
    memory_weight: float = 0.8
    active_microbatches: int | None = None
    shard_optimizer_state: bool = False
    fp16: bool = False
    bf16: bool = False
    ddp_dist_backend: str = "auto"
    own: Mapping[str, Any] = field(default_factory=dict)
    """The settings under the key `hybridtrain`: keys in `OWN_KEYS`, and fields of
    `PipelineOptions`."""

    def __post_init__(self) -> None:
        for name in ("pipeline_parallel_degree", "microbatches", "active_microbatches"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        for name in ("auto_partition", "shard_optimizer_state", "fp16", "bf16"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be true or false")
        check_choice("pipeline", self.pipeline, SCHEDULES)
        check_choice("ddp_dist_backend", self.ddp_dist_backend, ("auto", "nccl", "gloo"))
        strategy = self.placement_strategy
        if strategy not in ("cluster", "spread") and sorted(strategy) != ["D", "P", "T"]:
            raise ConfigError(
                f"placement_strategy={strategy!r} must be cluster, spread, or an order of the "
                f"letters D, P and T"
            )
        if self.fp16 and self.bf16:
            raise ConfigError("fp16 and bf16 cannot both be true: choose one")
        if not self.auto_partition and self.default_partition is None:
            raise ConfigError(
                "auto_partition=false needs default_partition=, the partition of modules outside "
                "any smp.partition"
            )
        names = {option.name for option in fields(PipelineOptions)} | {*OWN_KEYS}
        for name in self.own:
            if name not in names:
                hint = did_you_mean(name, sorted(names), "settings")
                raise ConfigError(f"{OWN_KEY}.{name} is unknown: {hint}")
        check_choice(f"{OWN_KEY}.engine", self.engine, ("local", "distributed"))
        if type(self.own.get("broadcast_batch", False)) is not bool:
            raise ConfigError(
                f"{OWN_KEY}.broadcast_batch={self.own['broadcast_batch']!r} must be true or false"
            )

    @property
    def inner(self) -> str:
        """The processes with consecutive ranks: `pp` or `dp`, as in `World`."""
        if self.placement_strategy in ("cluster", "spread"):
            return "pp" if self.placement_strategy == "cluster" else "dp"
        # the letter further right is the one with consecutive ranks
        strategy = self.placement_strategy
        return "pp" if strategy.index("P") > strategy.index("D") else "dp"

    @property
    def engine(self) -> str:
        """The engine: one process per stage by default."""
        default = "distributed" if self.pipeline_parallel_degree > 1 else "local"
        return str(self.own.get("engine", default))

    @property
    def precision(self) -> str:
        """The option `precision`."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"

    @property
    def trusts_pickles(self) -> bool:
        """True if objects of any type are saved and loaded with pickle, which can run code."""
        return self.own.get("trust_pickles", False) is True

    @property
    def broadcasts_batch(self) -> bool:
        """True if all processes of a pipeline use the batch of the first one."""
        return self.own.get("broadcast_batch", False) is True

    def options(self, seed: int) -> PipelineOptions:
        """Returns the options of the pipeline.

        Args:
            seed: the seed for random operations of layers.
        """
        options = PipelineOptions(
            chunks=self.microbatches,
            schedule=SCHEDULES[self.pipeline],
            split="uniform" if self.auto_partition else "manual",
            default_partition=None if self.auto_partition else self.default_partition,
            max_inflight=self.active_microbatches,
            memory_weight=self.memory_weight,
            precision=self.precision,
            shard="optimizer" if self.shard_optimizer_state else "none",
            seed=seed,
        )
        settings = {name: value for name, value in self.own.items() if name not in OWN_KEYS}
        return with_settings(options, settings)


OWN_KEYS = ("engine", "devices", "timeout_s", "stall_s", "trust_pickles", "broadcast_batch")


def _value(name: str, value: object) -> str:
    """Formats a value of the library's option `name` as in an smp configuration."""
    smp_names = {ours: schedule for schedule, ours in SCHEDULES.items()}
    return smp_names.get(str(value), str(value)) if name == "schedule" else str(value)


NAMING = Naming(
    keys={
        **{name: f"{OWN_KEY}.{name}" for name in OWN_KEYS},
        **{option.name: f"{OWN_KEY}.{option.name}" for option in fields(PipelineOptions)},
        "memory_weight": "memory_weight",
        "default_partition": "default_partition",
        "nb_part": "pipeline_parallel_degree",
        "chunks": "microbatches",
        "schedule": "pipeline",
        "max_inflight": "active_microbatches",
        "inner": "placement_strategy",
        "backend": "ddp_dist_backend",
    },
    value=_value,
    phrases={
        "HybridModel": "smp.DistributedModel",
        "world.data_parallel_rank of world.data_parallel_size": "smp.dp_rank() of smp.dp_size()",
    },
)
"""The names of the library's arguments in smp, for functions that call the library."""


def parse(parameters: Mapping[str, Any]) -> SmpConfig:
    """Validates the dictionary `parameters` of smp 1.x and returns it as a configuration.

    Raises:
        ConfigError: a key is unknown or refused, or a value is wrong; the message names the key.
    """
    values = dict(parameters)
    if "partitions" in values:
        degree = values.pop("partitions")
        if values.setdefault("pipeline_parallel_degree", degree) != degree:
            raise ConfigError("partitions and pipeline_parallel_degree differ: set one of them")
    if "pipeline_parallel_degree" not in values:
        raise ConfigError(
            "pipeline_parallel_degree (or partitions) is missing: set the number of partitions to "
            "divide the model into; 1 for data parallelism only"
        )
    for name, why in REFUSED.items():
        value = values.pop(name, None)
        if value is True or value not in (None, False, 0, 1):
            raise ConfigError(f"{name}={parameters[name]!r}: {why}")
    for name in NO_MEANING:
        values.pop(name, None)
    settings = values.pop(OWN_KEY, {})
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{OWN_KEY}={settings!r} must be a dictionary of settings")
    keys = [option.name for option in fields(SmpConfig) if option.name != "own"]
    for name in values:
        if name not in keys:
            everything = [*keys, "partitions", *NO_MEANING, *REFUSED, OWN_KEY]
            raise ConfigError(f"{name} is unknown: {did_you_mean(name, everything, 'keys')}")
    if "memory_weight" not in values and parameters.get("optimize") == "speed":
        values["memory_weight"] = 0.2  # smp's defaults
    return SmpConfig(**values, own=dict(settings))


def parameters_of(distribution: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the dictionary `parameters` of an estimator's `distribution`, or such a dictionary.

    Raises:
        ConfigError: the distribution does not enable model parallelism.
    """
    if "smdistributed" not in distribution:
        return distribution
    library = distribution["smdistributed"]
    if not isinstance(library, Mapping) or "modelparallel" not in library:
        raise ConfigError(
            "smdistributed has no modelparallel: a script that uses only the data parallel library "
            "does not need hybridtrain.smp"
        )
    options = _dictionary(library["modelparallel"], "smdistributed.modelparallel")
    if not options.get("enabled", False):
        raise ConfigError("smdistributed.modelparallel.enabled must be true")
    if "parameters" not in options:
        raise ConfigError("smdistributed.modelparallel.parameters is missing")
    return _dictionary(options["parameters"], "smdistributed.modelparallel.parameters")


def _dictionary(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} must be a dictionary")
    return value


def read(text: str) -> Mapping[str, Any]:
    """Reads the parameters from `text`: JSON, or the path of a JSON file.

    Raises:
        ConfigError: the file does not exist, or is not JSON.
    """
    source = f"{ENVIRONMENT}={text[:80]}"
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read {source}: {error.strerror or error}") from error
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error
    if not isinstance(document, Mapping):
        raise ConfigError(f"{source} must be a dictionary")
    return parameters_of(document)


_MPI = "MPI is not used: torchrun starts the processes"


@dataclass(frozen=True)
class LaunchConfig:
    """The launch of a script: processes, environment variables and the configuration of smp.

    Attributes:
        config: the checked configuration.
        parameters: the dictionary for `smp.init`.
        nodes: the number of nodes.
        processes_per_node: the number of processes on each node.
        environment: variables for all processes.
        notes: the keys without effect, each with the reason.
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
        """Returns the command to run on each node."""
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


def config_from_distribution(
    distribution: Mapping[str, Any], instance_count: int = 1
) -> LaunchConfig:
    """Converts an estimator's `distribution` to a launch with torchrun.

    Args:
        distribution: the dictionary `{"smdistributed": {...}, "mpi": {...}}`.
        instance_count: the number of nodes, as in the estimator.

    Raises:
        ConfigError: a key is unknown or refused, or the numbers of processes do not match.
    """
    for key in distribution:
        if key not in ("smdistributed", "mpi", "torch_distributed", "instance_count"):
            raise ConfigError(
                f"distribution has the unknown key {key!r}: use the keys smdistributed and mpi, as "
                f"for the model parallel library"
            )
    if "smdistributed" not in distribution:
        raise ConfigError('distribution has no "smdistributed": {"modelparallel": {...}}')
    instance_count = distribution.get("instance_count", instance_count)
    if type(instance_count) is not int or instance_count < 1:
        raise ConfigError(f"instance_count={instance_count!r} must be 1 or more")
    library = distribution["smdistributed"]
    if isinstance(library, Mapping) and "dataparallel" in library:
        raise ConfigError(
            "smdistributed.dataparallel cannot be combined with modelparallel: remove it"
        )
    parameters = dict(parameters_of(distribution))
    config = parse(parameters)
    notes = {key: why for key, why in NO_MEANING.items() if key in parameters}
    mpi = _dictionary(distribution.get("mpi", {}), "mpi")
    processes, environment = _mpi(mpi, notes)
    if processes is None:
        processes = config.pipeline_parallel_degree if config.engine == "distributed" else 1
    degree = config.pipeline_parallel_degree if config.engine == "distributed" else 1
    if (instance_count * processes) % degree:
        raise ConfigError(
            f"instance_count={instance_count} x mpi.processes_per_host={processes} is "
            f"{instance_count * processes} processes, which is not a multiple of "
            f"pipeline_parallel_degree={degree}: change one of them"
        )
    meant = {key: value for key, value in parameters.items() if key not in NO_MEANING}
    if "memory_weight" not in parameters and parameters.get("optimize") == "speed":
        meant["memory_weight"] = config.memory_weight
    return LaunchConfig(config, meant, instance_count, processes, environment, notes)


def _mpi(mpi: Mapping[str, Any], notes: dict[str, str]) -> tuple[int | None, dict[str, str]]:
    """Returns the processes per node, and the variables that `mpirun -x` would pass on."""
    keys = ("enabled", "processes_per_host", "custom_mpi_options")
    for key in mpi:
        if key not in keys:
            raise ConfigError(f"mpi.{key} is unknown: the keys are {', '.join(keys)}")
    processes = mpi.get("processes_per_host")
    if processes is not None and (type(processes) is not int or processes < 1):
        raise ConfigError(f"mpi.processes_per_host={processes!r} must be 1 or more")
    if "enabled" in mpi:
        notes["mpi.enabled"] = _MPI
    environment: dict[str, str] = {}
    text = mpi.get("custom_mpi_options") or ""
    try:
        words = iter(shlex.split(text))
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"cannot parse mpi.custom_mpi_options={text!r}: {error}") from error
    rest = []
    for word in words:
        if word != "-x":
            rest.append(word)
            continue
        name, _, value = next(words, "").partition("=")
        if value:
            environment[name] = value
        else:
            notes[f"mpi.custom_mpi_options: -x {name}"] = "torchrun passes on variables itself"
    if rest:
        notes[f"mpi.custom_mpi_options: {' '.join(rest)}"] = _MPI
    return processes, environment
