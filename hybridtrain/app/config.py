"""The schema: one dataclass a config group, a docstring a field.

Hydra composes YAML files and overrides, and the result is merged into this schema, so that a typo
or a wrong type is an error, whichever file or override it comes from. `model`, `data`, `optim` and
`lr_schedule` name a `_target_`; their other keys are its arguments and are checked against its
signature (see `hybridtrain.app.instantiate`). This module imports neither torch nor Hydra's runtime, so
that looking at a config is quick.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridtrain.errors import ConfigError


@dataclass
class PipelineConfig:
    """How one replica of the model is spread over the devices of its process."""

    nb_part: int = 1
    """Stages, and so devices, of one process."""
    chunks: int = 1
    """Micro-batches that a replica's batch is cut into."""
    schedule: str = "1f1b"
    """`1f1b` or `gpipe`."""
    stages_per_device: int = 1
    """Stages that each device has in turn; more than one interleaves them."""
    max_inflight: int | None = None
    """Micro-batches that may be alive at one time; null: as many as the schedule wants."""
    split: Any = "uniform"
    """Which layers go to which stage: `uniform`, `size`, `time`, `memory`, `balanced`, `manual`,
    the path of a plan (.yaml), or a list of counts, cut points, layer names or name patterns."""
    memory_weight: float = 0.2
    """For `split: balanced`: 0 for time alone, 1 for memory alone."""
    memory_limit_gib: float | None = None
    """GiB that a device may hold, for `time`, `memory` and `balanced`; null: no limit."""
    default_partition: int | None = None
    """For `split: manual`: the stage of modules that were put in none; null: each must be."""
    checkpoint: Any = "never"
    """What is recomputed in the backward: `never`, `except_last`, `always`, `{every: k}` for every
    kth layer, or a list of layers' names."""
    batch_norm: str = "micro_batch"
    """When running statistics move: at each `micro_batch`, or `deferred` to once a step."""
    sync_batch_norm: bool = False
    """Normalise over the replicas' micro-batches together (GPUs only)."""


@dataclass
class WorldConfig:
    """The processes and their devices."""

    engine: str = "local"
    """Where the stages of a replica live: `local`, all in one process, a thread each."""
    backend: str | None = None
    """`gloo` or `nccl`; null: nccl on GPUs, gloo on CPUs."""
    devices: Any = None
    """null: the GPUs, or the CPU where there are none; `auto`: the GPUs if there are enough, else
    the CPU; `cpu`; `cuda`; or a list such as [cuda:0,cuda:1]."""
    timeout_s: float = 600.0
    """How long a collective may take, in seconds."""
    broadcast_buffers: bool = True
    """As in DistributedDataParallel: every step begins with rank 0's buffers on all replicas."""
    find_unused_parameters: bool = False
    """As in DistributedDataParallel: allow steps in which a parameter gets no gradient."""


@dataclass
class TrainerConfig:
    """The training loop."""

    steps: int | None = None
    """Optimizer steps in all; one of `steps` and `epochs` is set."""
    epochs: int | None = None
    """Passes over the training data in all."""
    accumulate: int = 1
    """Batches that one optimizer step adds up."""
    clip_norm: float | None = None
    """Largest norm of the gradient over all stages; null: no clipping."""
    precision: str = "fp32"
    """`fp32`, or `bf16` or `fp16` for autocast."""
    loss_scale: float | None = None
    """For fp16: a fixed scale of the loss; null: one that adapts."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    deterministic: bool = False
    """Use deterministic algorithms only; an operation that has none is an error."""
    tf32: bool = False
    """Let GPUs multiply fp32 matrices in TF32."""
    loss: str = "cross_entropy"
    """`cross_entropy`, `nll` or `mse`."""
    metrics: Any = None
    """Names of this project's metrics, or a mapping of names to torchmetrics `_target_`s; null:
    accuracy, where there are classes."""
    log_every: int = 10
    """Steps between two logged lines."""
    eval_every: int | None = None
    """Steps between two evaluations; null: only at the end."""


@dataclass
class CheckpointConfig:
    """What is kept of a run so that it can go on."""

    every_steps: int | None = None
    """Steps between two checkpoints; null: only at the end; 0: none at all."""
    keep: int | None = 3
    """How many of the newest to keep; null: all."""


@dataclass
class MonitorConfig:
    """What one sees of a run."""

    tensorboard: bool = True
    """Write event files for TensorBoard to <run directory>/tensorboard."""
    progress: bool = True
    """Show a progress bar on a terminal, plain lines elsewhere."""
    timeline_every: int | None = None
    """Steps between two timelines of the stages; null: only at the end."""


@dataclass
class Config:
    """A whole run."""

    run_name: str | None = None
    """The folder of the run below `output_dir`; null: the recipe's name."""
    output_dir: str = "outputs"
    """Where the runs are."""
    seed: int = 0
    """Where the initial weights, the data order and the draws of dropout start from."""
    resume: str | None = "auto"
    """`auto`: the newest checkpoint in the run directory, if any; a checkpoint's path; or null."""
    allow_targets: list[str] = field(default_factory=list)
    """Packages of yours that a `_target_` may come from, e.g. [my_project.models]."""
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    lr_schedule: dict[str, Any] = field(default_factory=dict)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)


def check(config: Config) -> None:
    """Checks what types cannot say.

    Raises:
        ConfigError: names the key to change.
    """
    for key, value in _positive(config):
        if value is not None and value < 1:
            raise ConfigError(f"{key}={value} must be at least 1")
    if not 0 <= config.pipeline.memory_weight <= 1:
        raise ConfigError(
            f"pipeline.memory_weight={config.pipeline.memory_weight} must lie between 0 (time "
            f"alone) and 1 (memory alone)"
        )
    if (limit := config.pipeline.memory_limit_gib) is not None and not limit > 0:
        raise ConfigError(f"pipeline.memory_limit_gib={limit} must be positive, or null")
    if (config.pipeline.default_partition or 0) < 0:
        raise ConfigError("pipeline.default_partition must be the number of a stage, or null")
    if not -(2**63) <= config.seed < 2**63:
        raise ConfigError(f"seed={config.seed} must fit in 64 bits")
    if (config.trainer.steps is None) == (config.trainer.epochs is None):
        raise ConfigError(
            f"set one of trainer.steps and trainer.epochs, and the other to null; they are "
            f"{config.trainer.steps} and {config.trainer.epochs}"
        )
    if config.trainer.clip_norm is not None and config.trainer.clip_norm <= 0:
        raise ConfigError(f"trainer.clip_norm={config.trainer.clip_norm} must be positive, or null")
    if (config.checkpoint.every_steps or 0) < 0:
        raise ConfigError("checkpoint.every_steps must be positive, 0 for none, or null")
    batch_size = config.data.get("batch_size")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"data.batch_size={batch_size} must be a positive number of samples")
    workers, timeout_s = config.data.get("workers", 0), config.data.get("timeout_s", 120)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ConfigError(f"data.workers={workers} must be a number of processes, 0 or more")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        raise ConfigError(f"data.timeout_s={timeout_s} must be a positive number of seconds")
    if not isinstance(drop_last := config.data.get("drop_last", False), bool):
        raise ConfigError(f"data.drop_last={drop_last} must be true or false")
    name = config.run_name or ""
    if not name or name != name.strip("/. ") or ".." in name.split("/"):
        raise ConfigError(f"run_name={config.run_name!r} must be the name of a folder")


def _positive(config: Config) -> Iterator[tuple[str, int | float | None]]:
    yield "pipeline.nb_part", config.pipeline.nb_part
    yield "pipeline.chunks", config.pipeline.chunks
    yield "pipeline.stages_per_device", config.pipeline.stages_per_device
    yield "pipeline.max_inflight", config.pipeline.max_inflight
    yield "monitor.timeline_every", config.monitor.timeline_every
    yield "trainer.steps", config.trainer.steps
    yield "trainer.epochs", config.trainer.epochs
    yield "trainer.accumulate", config.trainer.accumulate
    yield "trainer.log_every", config.trainer.log_every
    yield "trainer.eval_every", config.trainer.eval_every
    yield "checkpoint.keep", config.checkpoint.keep
    yield "world.timeout_s", config.world.timeout_s


def flat_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a nested mapping, inner nodes too."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_keys(value, f"{prefix}{key}.")
